"""Balanced training with transformers' Trainer, TRL's SFTTrainer and accelerate.

    trainer = balanced(SFTTrainer)(..., balance=Balance(context_window=8192))

The library's training loop is not changed, only its batches: each micro-batch is one padding-free
row of several documents. Packing gives the micro-batches of a step nearly equal work, over ranks
and gradient accumulation steps, and may delay long documents to a later step.

The first training step begins with a test of whether the model keeps the documents of a row apart;
if not, UserError is raised. With `Balance(cp=2)`, two processes share each micro-batch. For your
own loop, use `BalancedBatchSampler`, `BalancedCollator.of_model(model)` and
`check_documents_apart`.
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
    """How dataset rows are packed into micro-batches; must be the same on all ranks.

    Each dataset row is one document. Lengths are in tokens.
    """

    context_window: int  # mean length of micro-batches, and longest row allowed
    s_max: int | None = None  # longest micro-batch allowed; None means 1.5 context windows
    # Most tokens of a step on all ranks; None means s_max times the number of micro-batches.
    step_tokens: int | None = None
    max_delay: int = 10  # most steps that a row may be delayed
    # Predicts the time of a document from its length. The default has LLaMA2-7B's ratio of
    # attention FLOPs to other FLOPs; `wlb.workload_of` makes a model of a measured GPU.
    cost: WorkloadModel = LLAMA2_7B
    seed: int = 0  # seed of the shuffle
    # Context parallelism: the number of processes that share each micro-batch, which may then be cp
    # times as long. cp must divide the number of all processes.
    cp: int = 1
    strategy: str = "adaptive"  # sharding strategy, see `ContextSharder`; used only if cp > 1
    # Exchange of keys and values, see `ContextSharder`; used only if cp > 1.
    exchange: str = "gather"

    def planner(
        self, lengths: IntLike, *, num_ranks: int, accumulation_steps: int, epochs: int
    ) -> Planner:
        """Return a planner that packs dataset rows of the given lengths.

        Args:
            lengths: Tokens of each dataset row.
            num_ranks: Data-parallel ranks.
            accumulation_steps: Micro-batches of a rank in each step.
            epochs: Times that the dataset is trained; 0 means without end.

        Raises:
            UserError: A row is longer than the context window.
        """
        # All fields except `exchange` are keyword arguments of `Planner.for_lengths`.
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

    All epochs are planned as one stream of steps. A row that is delayed at the end of an epoch is
    trained in the next epoch, and over the whole run every row is trained `epochs` times. The
    Trainer requires epochs with equally many steps, so each has 1/epochs of all steps, rounded up.
    The last epochs may therefore be short or empty. A learning-rate schedule should have
    `num_steps` steps.

    Steps depend only on the lengths and the options. So a run resumes without saved state, by
    skipping the batches that were trained. Iterating over more than `epochs` epochs raises
    IndexError.

    Args:
        lengths: Tokens of each dataset row.
        balance: Options of packing.
        num_ranks: Data-parallel ranks: the number of processes divided by cp.
        accumulation_steps: Micro-batches of a rank in each step.
        epochs: Times that the dataset is trained. Ignored if max_steps is given.
        max_steps: Number of steps to train; the data is repeated as often as needed. Each step is
            then planned only when its micro-batches are requested.
    """

    # None tells accelerate's BatchSamplerShard that batches have different numbers of rows.
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
        """Return the dataset rows of all steps; plan the steps that are not planned yet."""
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
        """Return the number of processes, num_ranks * cp."""
        return self._num_ranks * self.balance.cp

    def __len__(self) -> int:
        """Return the number of micro-batches of the epoch to iterate next, over all processes."""
        return len(self._steps()) * self._num_micro_batches * self.balance.cp

    def __iter__(self) -> Iterator[list[int]]:
        if not self._steps():
            self.warn_of_empty_epochs()
        for step in self._steps():
            for rows in self._dealt_steps.step(step):
                # All processes of a CP group get the same rows.
                for _ in range(self.balance.cp):
                    yield rows.tolist()

    def of_rank(self, rank: int) -> "RankBatches":
        """Return a sampler of one process's micro-batches, for loops without accelerate."""
        return RankBatches(self, rank)

    def rank_balance(self) -> RankBalance:
        """Return how evenly predicted work is divided over data-parallel ranks, over all epochs."""
        return RankBalance.of(self.dealt.work_ns(self.lengths, self.balance.cost))

    def warn_of_empty_epochs(self) -> None:
        """Warn if there are fewer steps than epochs, so that the last epochs have no steps."""
        filled = ceil(self.num_steps / max(1, self.steps_per_epoch))
        if 0 < filled < self.epochs:
            warnings.warn(
                f"the {self.num_steps} planned steps fill only {filled} of {self.epochs} epochs "
                f"with {self.steps_per_epoch} steps each: every row is still trained "
                f"{self.epochs} times, but actions at the end of an epoch run only {filled} "
                "times; for more steps, use a shorter context_window or fewer "
                "gradient_accumulation_steps",
                stacklevel=2,
            )

    def _steps(self) -> range:
        if not 0 <= self.epoch < self.epochs:
            raise IndexError(
                f"epoch {self.epoch} was not planned, because BalancedBatchSampler was made with "
                f"{self.epochs} epochs; give it the number of epochs to train"
            )
        first = self.epoch * self.steps_per_epoch
        return range(first, min(first + self.steps_per_epoch, self.num_steps))


class RankBatches(Sampler[list[int]]):
    """Batch sampler that yields one process's micro-batches of a `BalancedBatchSampler`.

    Args:
        batches: The sampler of all processes.
        rank: Rank of the process.
    """

    def __init__(self, batches: BalancedBatchSampler, rank: int) -> None:
        if not 0 <= rank < batches.num_processes:
            raise UserError(
                f"rank = {rank} must be between 0 and {batches.num_processes - 1}, because the "
                f"sampler plans for {batches.num_processes} processes"
            )
        self.batches, self.rank = batches, rank

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate next, by setting it in the sampler of all processes."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches) // self.batches.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        for i, rows in enumerate(self.batches):
            if i % self.batches.num_processes == self.rank:
                yield rows


class BalancedTrainer(PlannedTrainer):
    """Mixin that makes a transformers Trainer train balanced batches; see `balanced`.

    List it before the Trainer: `class Mine(BalancedTrainer, SFTTrainer)`. UserError is raised for
    settings with which rows would be lost or repeated, documents would see each other, masked
    tokens would be trained, or tokens would have unequal weights:

    - datasets that are packed already or streamed, and loss masks other than labels;
    - accelerate's dispatch_batches and split_batches;
    - ranks that share a sequence by other means than Balance's cp;
    - losses that are not a mean over the tokens of a step;
    - models that do not keep the documents of a row apart.

    Args:
        balance: Options of packing.
        *args: Arguments of the Trainer.
        **kwargs: Arguments of the Trainer and of `PlannedTrainer`.
    """

    balanced_batches: BalancedBatchSampler  # set by `get_train_dataloader`
    context: ContextParallel | None  # context parallelism; None if Balance.cp is 1

    def __init__(self, *args: Any, balance: Balance, **kwargs: Any) -> None:
        self.balance = balance
        super().__init__(*args, **kwargs)
        check_at_least("cp of Balance", balance.cp, 1)
        self.context = None
        if balance.cp > 1:
            names = ("cp", "strategy", "exchange", "cost")
            options = {name: getattr(balance, name) for name in names}
            self.context = context_of_trainer(self, **options)
            # No probe is needed, because attention over CP ranks reads document boundaries from the
            # plan, and only tested model families are accepted.
            self._is_to_be_checked = False

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """Return the Trainer's DataLoader over balanced batches, prepared by its accelerator."""
        args, collator = self.args, self._collator()
        if args.auto_find_batch_size:
            raise UserError(
                "auto_find_batch_size = True cannot make balanced micro-batches smaller, because "
                "it only lowers per_device_train_batch_size; set auto_find_batch_size = False, "
                "and lower context_window or s_max of Balance"
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
        """Return the values of the Trainer's method, with max_steps limited to the planned steps.

        max_steps is the last of these values. It is also the length of the learning-rate schedule.
        The Trainer computes it as steps per epoch times epochs, which may exceed the number of
        planned steps, because the last epochs may be short or empty.
        """
        theirs = cast(Any, super())
        *values, max_steps = theirs.set_initial_training_values(args, dataloader)
        return (*values, min(max_steps, max(1, self.balanced_batches.num_steps)))


def balanced(trainer: type[Any]) -> type[Any]:
    """Return a subclass of `trainer` that takes `balance=` and trains balanced batches."""
    made: Any = type(f"Balanced{trainer.__name__}", (BalancedTrainer, trainer), {})
    return made


def _check_rows(lengths: IntArray, balance: Balance) -> None:
    """Raise UserError if there is no dataset row, or if one is empty or longer than the window."""
    if not lengths.size:
        raise UserError("train_dataset has no rows; give a dataset with at least one row")
    if int(lengths.min()) < 1:
        empty = np.flatnonzero(lengths < 1)
        raise UserError(
            f"{empty.size} rows of train_dataset have no tokens (the first is row {empty[0]}); "
            'remove these rows: train_dataset.filter(lambda row: len(row["input_ids"]) > 0)'
        )
    if int(lengths.max()) > balance.context_window:
        row = int(lengths.argmax())
        raise UserError(
            f"row {row} of train_dataset has {lengths[row]} tokens, more than context_window = "
            f"{balance.context_window} of Balance; raise context_window, or truncate rows "
            "(max_length of the tokenizer or of SFTConfig)"
        )


def _check_sizes(balance: Balance, num_ranks: int, accumulation_steps: int) -> None:
    """Raise UserError for sizes below 1, and for limits with which some rows could never train."""
    check_at_least("number of processes", num_ranks, 1)
    check_at_least("gradient_accumulation_steps", accumulation_steps, 1)
    check_at_least("context_window of Balance", balance.context_window, 1)
    check_at_least("max_delay of Balance", balance.max_delay, 1)
    window = balance.context_window
    if balance.s_max is not None and balance.s_max < window:
        raise UserError(
            f"s_max = {balance.s_max} of Balance must be at least context_window = {window}, "
            "because a row of context_window tokens must fit into a micro-batch; raise s_max"
        )
    tokens_read = num_ranks * accumulation_steps * window
    if balance.step_tokens is not None and balance.step_tokens <= tokens_read:
        raise UserError(
            f"step_tokens = {balance.step_tokens} of Balance must be more than the {tokens_read} "
            f"tokens that each step reads ({num_ranks} processes x gradient_accumulation_steps = "
            f"{accumulation_steps} x context_window = {window}), so that delayed rows can be "
            "trained; raise step_tokens or lower gradient_accumulation_steps"
        )
