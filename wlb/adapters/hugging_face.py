"""transformers' Trainer, TRL's SFTTrainer and accelerate: work balanced over data-parallel ranks.

    from trl import SFTTrainer
    from wlb.adapters.hugging_face import Balance, balanced

    trainer = balanced(SFTTrainer)(..., balance=Balance(context_window=8192))

The library's loop stays; its training batches are ours: padding-free rows (documents one after the
other, `position_ids` restarting, nothing padded) whose work is balanced over ranks x accumulation
steps by packing with delay. `per_device_train_batch_size` does not count any more: a micro-batch
has some `context_window` tokens, `Balance.s_max` at most. In loops of your own, hand
`BalancedBatchSampler` to a DataLoader as batch_sampler, and let accelerate prepare it.

All epochs are one stream: what an epoch holds back comes in the next, and every row is trained as
often as there are epochs. An epoch has the E-th part of all steps, rounded up, because the Trainer
asks once for the length of all epochs and reckons with it when it resumes. So the last epoch has up
to E - 1 steps fewer; where epochs have hardly any, the last ones have none, and a warning says so.
The Trainer's schedule is as long as the steps there are. Steps are a function of lengths and
options, so a resumed run needs no state of its own: the Trainer skips what it has trained
(`skip_first_batches`).

Attention has to keep documents apart: flash attention, or SDPA with a model that reads restarting
position_ids (`wlb.adapters.collate.collators`). Our collator reads the columns in `READ`.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeVar, cast

from wlb.adapters.versions import require

require("transformers>=5.23", "accelerate>=1.15")

import numpy as np
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader, Sampler

from wlb.adapters.collate import PaddingFreeCollator, flatten
from wlb.adapters.collate.collators import LOSS_MASKS
from wlb.adapters.dealt import DealtRows, RankBalance
from wlb.cost import WorkloadModel
from wlb.plan import IGNORE, IntArray, IntLike, int_array
from wlb.planner import LLAMA2_7B, Planner

T = TypeVar("T")

BLOCK = 1 << 16
"""Rows whose lengths are looked up at once."""
PACKED_COLUMNS = ("seq_lengths", "lengths")
"""With a list in each row, where that row holds several documents."""
READ = ("input_ids", "labels", "attention_mask", "position_ids")
"""attention_mask only to refuse padding, which would be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How rows are packed. Lengths in tokens; the same on all ranks.

    context_window: C, typical tokens of a micro-batch and most of a row. s_max: most tokens of a
    micro-batch, 1.5 windows unless given. step_tokens: most of a step on all ranks. max_delay: most
    steps that a row is held back. cost: what is balanced; the default has LLaMA2-7B's ratio of
    attention to linear FLOPs, `wlb.workload_of` makes one of a measured GPU. seed: of the order.
    """

    context_window: int
    s_max: int | None = None
    step_tokens: int | None = None
    max_delay: int = 10
    cost: WorkloadModel = LLAMA2_7B
    seed: int = 0

    def planner(
        self, lengths: IntLike, *, num_ranks: int, accumulation_steps: int, epochs: int
    ) -> Planner:
        """Over rows of these lengths; ValueError for one above the window."""
        return Planner.for_lengths(
            lengths,
            context_window=self.context_window,
            num_micro_batches=num_ranks * accumulation_steps,
            dp=num_ranks,
            cost=self.cost,
            s_max=self.s_max,
            step_tokens=self.step_tokens,
            max_delay=self.max_delay,
            long_documents="refuse",
            epochs=epochs,
            shuffle=True,
            seed=self.seed,
        )


class BalancedBatchSampler(Sampler[list[int]]):
    """Batches of rows: a step's micro-batches of all ranks, dealt as accelerate deals them.

    DataLoader(dataset, batch_sampler=this, collate_fn=BalancedCollator()), which accelerate's
    `prepare` shards: batch i is rank i % num_ranks's. Without accelerate, `of_rank` gives one
    rank's. lengths: tokens of each row of the dataset. accumulation_steps: micro-batches of a rank
    in a step. epochs: that will be trained; `set_epoch` says which one is next, as accelerate and
    the Trainer do. Iterating past them is an IndexError. A schedule should be `num_steps` long: the
    last epochs may be short or empty.
    """

    batch_size = None  # of varying numbers of rows: what BatchSamplerShard asks for
    drop_last = False

    def __init__(
        self,
        lengths: IntLike,
        balance: Balance,
        *,
        num_ranks: int,
        accumulation_steps: int = 1,
        epochs: int = 1,
    ) -> None:
        if epochs < 1:
            raise ValueError(f"epochs = {epochs} must be at least 1: all are planned at once")
        self.lengths = int_array("lengths", lengths)
        self.balance, self.epochs, self.epoch = balance, epochs, 0
        planner = balance.planner(
            self.lengths,
            num_ranks=num_ranks,
            accumulation_steps=accumulation_steps,
            epochs=epochs,
        )
        self.dealt = DealtRows.of(planner, self.lengths.size)
        self.steps_per_epoch = ceil(self.dealt.num_steps / epochs)

    @property
    def sampler(self) -> "BalancedBatchSampler":
        """Itself: where accelerate's loaders look for `set_epoch`."""
        return self

    @property
    def num_steps(self) -> int:
        """Of all epochs."""
        return self.dealt.num_steps

    def set_epoch(self, epoch: int) -> None:
        """Which epoch is iterated next, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Micro-batches of the epoch, of all ranks."""
        return len(self._steps()) * self.dealt.num_micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        if not self._steps():
            self.warn_of_empty_epochs()
        for step in self._steps():
            for rows in self.dealt.step(step):
                yield rows.tolist()

    def of_rank(self, rank: int) -> "RankBatches":
        """One rank's micro-batches, for loops that do not shard."""
        return RankBatches(self, rank)

    def rank_balance(self) -> RankBalance:
        """Of all epochs, as predicted."""
        return RankBalance.of(self.dealt.work_ns(self.lengths, self.balance.cost))

    def warn_of_empty_epochs(self) -> None:
        """UserWarning where there are too few steps for one an epoch."""
        filled = ceil(self.num_steps / max(1, self.steps_per_epoch))
        if 0 < filled < self.epochs:
            warnings.warn(
                f"{self.num_steps} steps make {filled} epochs of {self.steps_per_epoch} and leave "
                f"none for the last {self.epochs - filled} of {self.epochs}: every row is trained "
                f"{self.epochs} times all the same, but what is done once an epoch is done "
                f"{filled} times; for more steps use a shorter context_window or fewer "
                f"accumulation steps",
                stacklevel=2,
            )

    def _steps(self) -> range:
        if not 0 <= self.epoch < self.epochs:
            raise IndexError(
                f"epoch {self.epoch} is not one of the {self.epochs} that were planned; give "
                f"BalancedBatchSampler as many epochs as are trained"
            )
        first = self.epoch * self.steps_per_epoch
        return range(first, min(first + self.steps_per_epoch, self.num_steps))


class RankBatches(Sampler[list[int]]):
    """A rank's micro-batches of a BalancedBatchSampler, whose epoch it follows."""

    def __init__(self, batches: BalancedBatchSampler, rank: int) -> None:
        if not 0 <= rank < batches.dealt.num_ranks:
            raise ValueError(
                f"rank = {rank} is not one of the {batches.dealt.num_ranks} that were planned for"
            )
        self.batches, self.rank = batches, rank

    def set_epoch(self, epoch: int) -> None:
        """Of the sampler of all ranks."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches) // self.batches.dealt.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for i, rows in enumerate(self.batches):
            if i % self.batches.dealt.num_ranks == self.rank:
                yield rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedCollator:
    """`PaddingFreeCollator`, and one token of padding for a micro-batch that got no row.

    That happens when fewer rows than micro-batches are left. Its loss is no label's: divide by the
    labels of all ranks, as the Trainer does, not by this rank's.
    """

    collator: PaddingFreeCollator = PaddingFreeCollator()

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if features:
            return self.collator(features)
        nothing = flatten(
            [[self.collator.pad_token_id]], labels=[[IGNORE]], options=self.collator.options
        )
        return self.collator.batch(nothing)


class BalancedTrainer:
    """Mixed into a Trainer, left of it: `class Mine(BalancedTrainer, SFTTrainer)`, or `balanced`.

    balance: how rows are packed. data_collator: `BalancedCollator()` unless you give one, which
    then gets an empty list where a micro-batch has no row. ValueError before training for what
    would lose, repeat or mix rows or train what is masked: packed datasets, masks of the loss that
    are not in labels, streams, accelerate's dispatch_batches and split_batches, and ranks that
    share a sequence.
    """

    balanced_batches: BalancedBatchSampler

    def __init__(self, *args: Any, balance: Balance, **kwargs: Any) -> None:
        self.balance = balance
        asked = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        super().__init__(*args, **kwargs)
        given = asked.get("data_collator") is not None
        self._chosen_collator = None if given else cast(Any, self).data_collator

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """What the Trainer trains from; prepared by its accelerator."""
        # Also one that was set after the trainer was made.
        is_chosen = self.data_collator is self._chosen_collator
        collator = _collator(None if is_chosen else self.data_collator)
        dataset = _checked(self.train_dataset)
        if hasattr(dataset, "column_names"):  # of others our collator reads what it needs
            if isinstance(collator, BalancedCollator):
                dataset = _read_by_ours(dataset, remove=self.args.remove_unused_columns)
            else:
                dataset = self._remove_unused_columns(dataset, description="training")
        _check_accelerator(self.accelerator, self.get_sp_size())
        args, lengths = self.args, _lengths(dataset)
        num_ranks = args.world_size // (self.get_tp_size() * self.get_cp_size())
        if num_ranks < 1:
            raise ValueError(f"{args.world_size} processes are too few for the trainer's tp and cp")
        batches = BalancedBatchSampler(
            lengths,
            self.balance,
            num_ranks=num_ranks,
            accumulation_steps=args.gradient_accumulation_steps,
            epochs=_epochs(args, self.balance, lengths, num_ranks),
        )
        loader = self.accelerator.prepare(
            DataLoader(
                dataset,
                batch_sampler=batches,
                collate_fn=collator,
                num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory,
                persistent_workers=args.dataloader_persistent_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
            )
        )
        if isinstance(loader.batch_sampler, BatchSamplerShard):
            shard: Any = loader.batch_sampler
            # Where skip_first_batches' loader looks for set_epoch; without, a run that is resumed
            # in a later epoch would train the rows of the first.
            shard.sampler = batches
        self.balanced_batches = batches
        if args.max_steps <= 0:  # else epochs are planned in reserve
            batches.warn_of_empty_epochs()
        return loader

    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """The Trainer's, whose last value, the steps of its schedule, is of equal epochs."""
        theirs = cast(Any, super())
        *values, max_steps = theirs.set_initial_training_values(args, dataloader)
        return (*values, min(max_steps, max(1, self.balanced_batches.num_steps)))


def balanced(trainer: type[T]) -> type[T]:
    """A subclass of a Trainer that takes `balance=` and trains balanced batches."""
    made: Any = type(f"Balanced{trainer.__name__}", (BalancedTrainer, trainer), {})
    return made


def _checked(dataset: Any) -> Any:
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"balancing needs a train_dataset with a length and rows by number, not "
            f"{type(dataset).__name__}; load it without streaming"
        )
    names = getattr(dataset, "column_names", None) or []
    packed = [
        name
        for name in PACKED_COLUMNS
        if name in names and len(dataset) and np.ndim(dataset[0][name])
    ]
    if packed:
        raise ValueError(
            f"train_dataset has {packed[0]}: its rows are packed already, and hold documents that "
            f"cannot be balanced one by one; use packing=False"
        )
    return dataset


def _read_by_ours(dataset: Any, *, remove: bool) -> Any:
    """A `datasets.Dataset` with the columns that our collator reads, all of them unless `remove`.

    The Trainer would remove what the model's forward does not take, and with it a loss mask or the
    mask of padding, unseen. ValueError for the former.
    """
    names: list[str] = dataset.column_names
    masks = [name for name in LOSS_MASKS if name in names]
    if masks and "labels" not in names:
        raise ValueError(
            f"train_dataset has {masks[0]} and no labels, so what it masks would be trained; give "
            f"labels that are {IGNORE} where nothing is trained"
        )
    if not remove or _is_transformed(dataset):
        return dataset
    return dataset.remove_columns([name for name in names if name not in READ])


def _is_transformed(dataset: Any) -> bool:
    """Whether rows are made as they are read, by `set_transform` or `with_transform`."""
    return dataset.format["type"] == "custom"


def _lengths(dataset: Any) -> IntArray:
    """Tokens of each row. Of a `datasets.Dataset` from its offsets, without reading a token."""
    if not hasattr(dataset, "with_format") or _is_transformed(dataset):
        return np.array(list(_lengths_read(dataset)), np.int64)
    arrow: Any = importlib.import_module("pyarrow.compute")  # which datasets are kept with
    table = dataset.with_format("arrow")
    parts = [np.zeros(0, np.int64)]
    for at in range(0, len(dataset), BLOCK):
        part = arrow.list_value_length(table[at : at + BLOCK]["input_ids"])
        if part.null_count:
            raise ValueError(
                f"row {at + part.is_null().to_pylist().index(True)} of train_dataset has null for "
                f"its input_ids; remove such rows"
            )
        parts.append(part.to_numpy())
    return np.concatenate(parts).astype(np.int64)


def _lengths_read(rows: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    for i, row in enumerate(rows):
        if row.get("input_ids") is None:
            raise ValueError(
                f"row {i} of train_dataset has {sorted(row)}, but no input_ids; tokenize it first"
            )
        yield len(row["input_ids"])


def _collator(given: Any) -> Callable[[Any], dict[str, Any]]:
    """The user's; a padding-free one in the place of what trainers choose, which pads."""
    if given is None or isinstance(given, PaddingFreeCollator):
        return BalancedCollator(collator=given or PaddingFreeCollator())
    return given


def _check_accelerator(accelerator: Any, sp: int) -> None:
    given = accelerator.dataloader_config
    if given.dispatch_batches:
        raise ValueError(
            "accelerator_config.dispatch_batches = True: a run that resumes would skip one rank's "
            "share of what was trained; leave it False, every process plans the same batches and "
            "reads its own. In a loop of your own it works where pad_to_multiple_of is s_max"
        )
    if given.split_batches:
        raise ValueError(
            "accelerator_config.split_batches = True cuts rows of a batch apart, and a batch here "
            "is one row of many documents; leave it False"
        )
    if sp > 1:
        raise ValueError(f"sequence parallelism of {sp} deals its own batches; balance without it")


def _epochs(args: Any, balance: Balance, lengths: IntArray, num_ranks: int) -> int:
    """That the Trainer will ask for: of max_steps as many as have so many steps."""
    if args.max_steps <= 0:
        return max(1, ceil(args.num_train_epochs))
    longest = balance.s_max or balance.context_window * 3 // 2
    most = balance.step_tokens or num_ranks * args.gradient_accumulation_steps * longest
    return max(1, ceil(args.max_steps * most / max(1, int(lengths.sum()))))
