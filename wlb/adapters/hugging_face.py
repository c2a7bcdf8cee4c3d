"""transformers' Trainer, TRL's SFTTrainer and accelerate, with work balanced over ranks.

    trainer = balanced(SFTTrainer)(..., balance=Balance(context_window=8192))

The library's loop stays; its batches become padding-free rows, balanced over ranks x accumulation
steps by packing with delay. The first step begins with a probe that refuses models which let
documents see each other. With `Balance(cp=2)` two processes share each micro-batch. Own loops:
`BalancedBatchSampler`, `BalancedCollator.of_model(model)`, `check_documents_apart`.
"""

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, cast

from wlb.adapters.versions import require
from wlb.plan import check_at_least

require("transformers>=5.23", "accelerate>=1.15")

import numpy as np
from torch.utils.data import DataLoader, Sampler

from wlb.adapters.dealt import DealtRows, DealtSteps, RankBalance
from wlb.adapters.probe import check_documents_apart as check_documents_apart
from wlb.adapters.trainers import BalancedCollator as BalancedCollator
from wlb.adapters.trainers import PlannedTrainer, lengths_of
from wlb.adapters.transformers_cp import ContextParallel, context_of_trainer
from wlb.cost import WorkloadModel
from wlb.plan import IntArray, IntLike, UserError, int_array
from wlb.planner import LLAMA2_7B, Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How rows are packed; lengths in tokens, the same on all ranks.

    context_window: typical tokens of a micro-batch and limit of a row. s_max: limit of a
    micro-batch, default 1.5 windows. step_tokens: limit of a step on all ranks. max_delay: most
    steps that a row waits. cost: workload model; the default has LLaMA2-7B's ratio of attention to
    linear FLOPs, `wlb.workload_of` makes one of a measured GPU. seed: of the shuffle. cp: processes
    that share each micro-batch, which then may be cp times as long; their number must divide that
    of all processes. strategy, exchange: of `ContextSharder`, read with cp > 1.
    """

    context_window: int
    s_max: int | None = None
    step_tokens: int | None = None
    max_delay: int = 10
    cost: WorkloadModel = LLAMA2_7B
    seed: int = 0
    cp: int = 1
    strategy: str = "adaptive"
    exchange: str = "gather"

    def planner(
        self, lengths: IntLike, *, num_ranks: int, accumulation_steps: int, epochs: int
    ) -> Planner:
        """A planner over rows of these lengths; UserError for one above the window.
        Every field but `exchange` is a keyword of `Planner.for_lengths`.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "exchange"}
        return Planner.for_lengths(
            lengths,
            num_micro_batches=num_ranks * accumulation_steps,
            dp=num_ranks,
            long_documents="refuse",
            epochs=epochs,
            shuffle=True,
            **given,
        )


class BalancedBatchSampler(Sampler[list[int]]):
    """Micro-batches of all ranks as lists of dataset rows, for accelerate to shard.

    DataLoader(dataset, batch_sampler=this, collate_fn=BalancedCollator.of_model(model)): after
    accelerate's `prepare`, batch i belongs to process i % num_processes. Without accelerate, use
    `of_rank`. With Balance's cp, each micro-batch comes cp times, for the consecutive processes
    that share it.

    All epochs are planned as one stream: rows held back in one epoch come in the next, and every
    row is trained once per epoch overall. An epoch iterates 1/epochs of all steps, rounded up,
    because the Trainer asks for one epoch length; so the last epochs may be short or empty, and a
    learning-rate schedule should be `num_steps` long. Steps depend on lengths and options only:
    resuming needs no state besides skipped batches. Iterating past `epochs` is an IndexError.

    lengths: tokens of each dataset row. num_ranks: data-parallel ranks, which are processes / cp.
    accumulation_steps: micro-batches per rank and step. max_steps: stop there, after as many epochs
    as it takes; `epochs` is not read, and steps are planned when their micro-batches are asked for.
    """

    # accelerate's BatchSamplerShard requires None for varying sizes.
    batch_size = None
    drop_last = False

    def __init__(
        self,
        lengths: IntLike,
        balance: Balance,
        *,
        num_ranks: int,
        accumulation_steps: int = 1,
        epochs: int = 1,
        max_steps: int | None = None,
    ) -> None:
        if max_steps is None:
            check_at_least("epochs", epochs, 1, ", as all are planned at once")
        else:
            check_at_least("max_steps", max_steps, 1)
        self.lengths = int_array("lengths", lengths)
        _check_sizes(balance, num_ranks, accumulation_steps)
        _check_rows(self.lengths, balance)
        self.balance, self.epoch = balance, 0
        self._num_ranks, self._num_micro_batches = num_ranks, num_ranks * accumulation_steps
        planner = balance.planner(
            self.lengths,
            num_ranks=num_ranks,
            accumulation_steps=accumulation_steps,
            epochs=epochs if max_steps is None else 0,
        )
        self._dealt_steps = DealtSteps(planner, self.lengths.size, max_steps)
        if max_steps is None:
            self._num_steps, self.epochs = self.dealt.num_steps, epochs
            self.steps_per_epoch = ceil(self._num_steps / epochs)
        else:
            # A window of tokens comes for each micro-batch.
            brought = self._num_micro_batches * balance.context_window
            in_data = ceil(int(self.lengths.sum()) / brought)
            self._num_steps, self.steps_per_epoch = max_steps, min(max_steps, in_data)
            self.epochs = ceil(max_steps / self.steps_per_epoch)

    @property
    def sampler(self) -> "BalancedBatchSampler":
        """Itself; accelerate's loaders look for `set_epoch` here."""
        return self

    @functools.cached_property
    def dealt(self) -> DealtRows:
        """All steps as rows; with max_steps this plans those that were not iterated yet."""
        return self._dealt_steps.all_rows()

    @property
    def num_steps(self) -> int:
        """Steps of all epochs."""
        return self._num_steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate next, from 0."""
        self.epoch = epoch

    @property
    def num_processes(self) -> int:
        """Data-parallel ranks times Balance's cp."""
        return self._num_ranks * self.balance.cp

    def __len__(self) -> int:
        """Micro-batches of the epoch on all processes."""
        return len(self._steps()) * self._num_micro_batches * self.balance.cp

    def __iter__(self) -> Iterator[list[int]]:
        if not self._steps():
            self.warn_of_empty_epochs()
        for step in self._steps():
            for rows in self._dealt_steps.step(step):
                for _ in range(self.balance.cp):
                    yield rows.tolist()

    def of_rank(self, rank: int) -> "RankBatches":
        """One process's micro-batches, for loops without accelerate."""
        return RankBatches(self, rank)

    def rank_balance(self) -> RankBalance:
        """Predicted balance over all epochs."""
        return RankBalance.of(self.dealt.work_ns(self.lengths, self.balance.cost))

    def warn_of_empty_epochs(self) -> None:
        """UserWarning if there are fewer steps than epochs."""
        filled = ceil(self.num_steps / max(1, self.steps_per_epoch))
        if 0 < filled < self.epochs:
            warnings.warn(
                f"{self.num_steps} steps make {filled} epochs of {self.steps_per_epoch} and leave "
                f"none for the last {self.epochs - filled} of {self.epochs}: every row is still "
                f"trained {self.epochs} times, but per-epoch actions run {filled} times only; for "
                f"more steps use a shorter context_window or fewer accumulation steps",
                stacklevel=2,
            )

    def _steps(self) -> range:
        if not 0 <= self.epoch < self.epochs:
            raise IndexError(
                f"epoch {self.epoch} is not one of the {self.epochs} that were planned; give "
                f"BalancedBatchSampler the number of epochs to train"
            )
        first = self.epoch * self.steps_per_epoch
        return range(first, min(first + self.steps_per_epoch, self.num_steps))


class RankBatches(Sampler[list[int]]):
    """One process's micro-batches of a BalancedBatchSampler; it shares the sampler's epoch."""

    def __init__(self, batches: BalancedBatchSampler, rank: int) -> None:
        if not 0 <= rank < batches.num_processes:
            raise UserError(
                f"rank = {rank} is not one of the {batches.num_processes} that were planned for"
            )
        self.batches, self.rank = batches, rank

    def set_epoch(self, epoch: int) -> None:
        """Set the shared sampler's epoch."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches) // self.batches.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        for i, rows in enumerate(self.batches):
            if i % self.batches.num_processes == self.rank:
                yield rows


class BalancedTrainer(PlannedTrainer):
    """A mixin left of a Trainer: `class Mine(BalancedTrainer, SFTTrainer)`; see `balanced`.

    data_collator, check_documents: of `PlannedTrainer`. UserError before training for settings that
    would lose, repeat or mix rows or train masked tokens: packed datasets, loss masks that are not
    in labels, streams, accelerate's dispatch_batches and split_batches, ranks that share a sequence
    by other means than Balance's cp, losses that are not a mean over a step's tokens, and models
    that let documents see each other. context: of Balance's cp, None with 1.
    """

    balanced_batches: BalancedBatchSampler
    context: ContextParallel | None

    def __init__(self, *args: Any, balance: Balance, **kwargs: Any) -> None:
        self.balance = balance
        super().__init__(*args, **kwargs)
        check_at_least("cp of Balance", balance.cp, 1)
        self.context = None
        if balance.cp > 1:
            names = ("cp", "strategy", "exchange", "cost")
            options = {name: getattr(balance, name) for name in names}
            self.context = context_of_trainer(self, **options)
            # Its attention takes documents from the plan, in families that are tested.
            self._is_to_be_checked = False

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """The Trainer's DataLoader over balanced batches, prepared by its accelerator."""
        args, collator = self.args, self._collator()
        if args.auto_find_batch_size:
            raise UserError(
                "auto_find_batch_size = True lowers per_device_train_batch_size when memory runs "
                "out, which changes no balanced micro-batch; set it to False, and lower Balance's "
                "context_window or s_max"
            )
        rows, num_ranks = self._rows(collator), self._num_ranks(cp=self.balance.cp)
        batches = BalancedBatchSampler(
            lengths_of(rows),
            self.balance,
            num_ranks=num_ranks,
            accumulation_steps=args.gradient_accumulation_steps,
            epochs=max(1, ceil(args.num_train_epochs)),
            max_steps=args.max_steps if args.max_steps > 0 else None,
        )
        if self.context is not None:
            collator = self.context.collator(collator)
        loader = self._loader(rows, batches, collator)
        self.balanced_batches = batches
        batches.warn_of_empty_epochs()
        return loader

    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """The Trainer's values, with the last (steps of the schedule) limited to planned steps."""
        theirs = cast(Any, super())
        *values, max_steps = theirs.set_initial_training_values(args, dataloader)
        return (*values, min(max_steps, max(1, self.balanced_batches.num_steps)))


def balanced(trainer: type[Any]) -> type[Any]:
    """A subclass of the Trainer that takes `balance=` and trains balanced batches."""
    made: Any = type(f"Balanced{trainer.__name__}", (BalancedTrainer, trainer), {})
    return made


def _check_rows(lengths: IntArray, balance: Balance) -> None:
    """UserError for rows that cannot be trained whole, in words of the libraries."""
    if not lengths.size:
        raise UserError("train_dataset has no rows; give one that has some")
    if int(lengths.min()) < 1:
        empty = np.flatnonzero(lengths < 1)
        raise UserError(
            f"{empty.size} rows of train_dataset have no tokens, the first is row {empty[0]}; "
            f'remove them: train_dataset.filter(lambda row: len(row["input_ids"]) > 0)'
        )
    if int(lengths.max()) > balance.context_window:
        row = int(lengths.argmax())
        raise UserError(
            f"row {row} of train_dataset has {lengths[row]} tokens, more than Balance's "
            f"context_window = {balance.context_window}; raise it, or truncate rows (max_length of "
            f"the tokenizer, or of SFTConfig)"
        )


def _check_sizes(balance: Balance, num_ranks: int, accumulation_steps: int) -> None:
    """UserError for limits that no step could hold, with the options that decide them."""
    check_at_least("number of processes", num_ranks, 1)
    check_at_least("gradient_accumulation_steps", accumulation_steps, 1)
    check_at_least("context_window of Balance", balance.context_window, 1)
    check_at_least("max_delay of Balance", balance.max_delay, 1)
    window = balance.context_window
    if balance.s_max is not None and balance.s_max < window:
        raise UserError(
            f"Balance's s_max = {balance.s_max} is below its context_window = {window}, so a row "
            f"that fills it could never be placed; raise s_max"
        )
    brought = num_ranks * accumulation_steps * window
    if balance.step_tokens is not None and balance.step_tokens <= brought:
        raise UserError(
            f"Balance's step_tokens = {balance.step_tokens} is not more than the {brought} tokens "
            f"that come for each step ({num_ranks} processes x gradient_accumulation_steps = "
            f"{accumulation_steps} x context_window = {window}), so rows held back could never be "
            f"caught up; raise step_tokens or lower gradient_accumulation_steps"
        )
