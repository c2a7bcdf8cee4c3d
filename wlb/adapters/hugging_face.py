"""Balanced training with transformers' Trainer, TRL's SFTTrainer and accelerate.

    trainer = balanced(SFTTrainer)(..., balance=Balance(context_window=8192))

The library's loop stays as it is. Its batches are replaced by padding-free rows of several
documents. Packing balances their work over ranks and accumulation steps, and may delay long rows to
a later step.

The first training step begins with a probe, which refuses models that let documents of a row see
each other. With `Balance(cp=2)`, two processes share each micro-batch. For your own loop, use
`BalancedBatchSampler`, `BalancedCollator.of_model(model)` and `check_documents_apart`.
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
    """Options of packing for a Trainer. They must be the same on all ranks.

    Lengths are in tokens.
    """

    context_window: int  # typical length of a micro-batch, and longest row allowed
    s_max: int | None = None  # longest micro-batch allowed; None means 1.5 context windows
    # Most tokens of a step on all ranks. None means s_max for every micro-batch.
    step_tokens: int | None = None
    max_delay: int = 10  # most steps that a row may be delayed
    # Workload model. The default has LLaMA2-7B's ratio of attention to linear FLOPs;
    # `wlb.workload_of` makes one for a measured GPU.
    cost: WorkloadModel = LLAMA2_7B
    seed: int = 0  # seed of the shuffle
    # Number of processes that share each micro-batch, which may then be cp times as long. It must
    # divide the number of all processes.
    cp: int = 1
    strategy: str = "adaptive"  # sharding strategy, see `ContextSharder`; used only if cp > 1
    # Exchange of keys and values, see `ContextSharder`; used only if cp > 1.
    exchange: str = "gather"

    def planner(
        self, lengths: IntLike, *, num_ranks: int, accumulation_steps: int, epochs: int
    ) -> Planner:
        """Return a planner over rows of these lengths.

        Args:
            lengths: Tokens of each dataset row.
            num_ranks: Data-parallel ranks.
            accumulation_steps: Micro-batches of a rank in each step.
            epochs: Times that the dataset is trained; 0 means without end.

        Raises:
            UserError: A row is longer than the context window.
        """
        # Every field but `exchange` is a keyword argument of `Planner.for_lengths`.
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
    """Batch sampler that yields the micro-batches of all ranks, as lists of dataset rows.

    Give it to DataLoader(dataset, batch_sampler=..., collate_fn=BalancedCollator.of_model(model)).
    After accelerate's `prepare`, batch i belongs to process i % num_processes. Without accelerate,
    use `of_rank`. If Balance has cp > 1, each micro-batch is repeated cp times, for the consecutive
    processes that share it.

    All epochs are planned as one stream. A row that is delayed at the end of an epoch is trained in
    the next one, and every row is trained once per epoch overall. The Trainer wants epochs of equal
    length, so an epoch has 1/epochs of all steps, rounded up. The last epochs may therefore be
    short or empty, and a learning-rate schedule should have `num_steps` steps.

    Steps depend only on the lengths and the options. So a run resumes without saved state, by
    skipping the batches that are done. Iterating past `epochs` raises IndexError.

    Args:
        lengths: Tokens of each dataset row.
        balance: Options of packing.
        num_ranks: Data-parallel ranks, which are the processes divided by cp.
        accumulation_steps: Micro-batches of a rank in each step.
        epochs: Times that the dataset is trained. Ignored if max_steps is given.
        max_steps: Steps to train, over as many epochs as that takes. Steps are then planned one by
            one, when their micro-batches are requested.
    """

    # accelerate's BatchSamplerShard requires None where the sizes of batches vary.
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
            # Each step reads one context window of tokens for each of its micro-batches.
            tokens_read = self._num_micro_batches * balance.context_window
            in_data = ceil(int(self.lengths.sum()) / tokens_read)
            self._num_steps, self.steps_per_epoch = max_steps, min(max_steps, in_data)
            self.epochs = ceil(max_steps / self.steps_per_epoch)

    @property
    def sampler(self) -> "BalancedBatchSampler":
        """Return this sampler itself, because accelerate looks for `set_epoch` here."""
        return self

    @functools.cached_property
    def dealt(self) -> DealtRows:
        """Return all steps as rows. With max_steps, this plans every step that remains."""
        return self._dealt_steps.all_rows()

    @property
    def num_steps(self) -> int:
        """Return the number of steps of all epochs."""
        return self._num_steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate next, counted from 0."""
        self.epoch = epoch

    @property
    def num_processes(self) -> int:
        """Return the number of processes: data-parallel ranks times cp."""
        return self._num_ranks * self.balance.cp

    def __len__(self) -> int:
        """Return the micro-batches of the chosen epoch on all processes."""
        return len(self._steps()) * self._num_micro_batches * self.balance.cp

    def __iter__(self) -> Iterator[list[int]]:
        if not self._steps():
            self.warn_of_empty_epochs()
        for step in self._steps():
            for rows in self._dealt_steps.step(step):
                # One copy for each process of a CP group.
                for _ in range(self.balance.cp):
                    yield rows.tolist()

    def of_rank(self, rank: int) -> "RankBatches":
        """Return one process's micro-batches, for loops without accelerate."""
        return RankBatches(self, rank)

    def rank_balance(self) -> RankBalance:
        """Return the predicted balance over all epochs."""
        return RankBalance.of(self.dealt.work_ns(self.lengths, self.balance.cost))

    def warn_of_empty_epochs(self) -> None:
        """Warn if there are too few steps to give every epoch one."""
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
    """Micro-batches of one process of a `BalancedBatchSampler`, whose epoch it shares.

    Args:
        batches: The sampler of all processes.
        rank: Rank of the process.
    """

    def __init__(self, batches: BalancedBatchSampler, rank: int) -> None:
        if not 0 <= rank < batches.num_processes:
            raise UserError(
                f"rank = {rank} is not one of the {batches.num_processes} processes of the plan"
            )
        self.batches, self.rank = batches, rank

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the shared sampler."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches) // self.batches.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        for i, rows in enumerate(self.batches):
            if i % self.batches.num_processes == self.rank:
                yield rows


class BalancedTrainer(PlannedTrainer):
    """Mixin that makes a Trainer train balanced batches; see `balanced`.

    Put it before the Trainer: `class Mine(BalancedTrainer, SFTTrainer)`. Before training, it raises
    UserError for settings that would lose, repeat or mix rows, or train masked tokens: packed
    datasets, loss masks outside of labels, streams, accelerate's dispatch_batches and
    split_batches, ranks that share a sequence by other means than Balance's cp, losses that are not
    a mean over the tokens of a step, and models that let documents see each other.

    Args:
        balance: Options of packing.
        *args: Of the Trainer.
        **kwargs: Of the Trainer and of `PlannedTrainer`.
    """

    balanced_batches: BalancedBatchSampler  # set by `get_train_dataloader`
    context: ContextParallel | None  # None if Balance has cp = 1

    def __init__(self, *args: Any, balance: Balance, **kwargs: Any) -> None:
        self.balance = balance
        super().__init__(*args, **kwargs)
        check_at_least("cp of Balance", balance.cp, 1)
        self.context = None
        if balance.cp > 1:
            names = ("cp", "strategy", "exchange", "cost")
            options = {name: getattr(balance, name) for name in names}
            self.context = context_of_trainer(self, **options)
            # CP's attention reads document boundaries from the plan, and only model families with
            # a test are accepted. So no probe is needed.
            self._is_to_be_checked = False

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """Return the Trainer's DataLoader over balanced batches, prepared by its accelerator."""
        args, collator = self.args, self._collator()
        if args.auto_find_batch_size:
            raise UserError(
                "auto_find_batch_size = True lowers per_device_train_batch_size when memory runs "
                "out, but that does not make balanced micro-batches smaller; set it to False, and "
                "lower Balance's context_window or s_max"
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
        """Return the Trainer's values, with the schedule limited to the planned steps.

        The Trainer computes its last value, the steps of the learning-rate schedule, from the
        number of batches in an epoch, and would count steps that do not exist.
        """
        theirs = cast(Any, super())
        *values, max_steps = theirs.set_initial_training_values(args, dataloader)
        return (*values, min(max_steps, max(1, self.balanced_batches.num_steps)))


def balanced(trainer: type[Any]) -> type[Any]:
    """Return a subclass of `trainer` that takes `balance=` and trains balanced batches."""
    made: Any = type(f"Balanced{trainer.__name__}", (BalancedTrainer, trainer), {})
    return made


def _check_rows(lengths: IntArray, balance: Balance) -> None:
    """Raise UserError for rows that cannot be trained whole."""
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
    """Raise UserError for limits that no step could satisfy; name the options to change."""
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
    tokens_read = num_ranks * accumulation_steps * window
    if balance.step_tokens is not None and balance.step_tokens <= tokens_read:
        raise UserError(
            f"Balance's step_tokens = {balance.step_tokens} is not more than the "
            f"{tokens_read} tokens that are read for each step ({num_ranks} processes x "
            f"gradient_accumulation_steps = {accumulation_steps} x context_window = {window}), so "
            f"rows that were delayed could never be trained; raise step_tokens or lower "
            f"gradient_accumulation_steps"
        )
