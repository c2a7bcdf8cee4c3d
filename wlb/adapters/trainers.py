"""What balanced trainers of transformers and TRL share: their rows, ranks, collator and loader."""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from wlb.adapters.versions import require

require("transformers>=5.23", "accelerate>=1.15")

import numpy as np
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader, Sampler

from wlb.adapters.boundary_keys import FLASH_KEYS, SEQ_IDX, boundary_keys, unwrapped
from wlb.adapters.collate import PaddingFreeCollator, flatten
from wlb.adapters.collate.collators import LOSS_MASKS
from wlb.adapters.probe import check_documents_apart
from wlb.plan import IGNORE, IntArray, UserError

BLOCK = 1 << 16
"""Rows whose lengths are read at once."""
PACKED_COLUMNS = ("seq_lengths", "lengths")
"""Columns that hold a list per row if rows are packed documents."""
READ = ("input_ids", "labels", "attention_mask", "position_ids")
"""Columns that our collator reads; attention_mask only to refuse padding."""

OTHER_TASKS = re.compile(
    "For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|MaskedLM"
    "|NextSentencePrediction|PreTraining|RewardModeling|Regression)"
)
"""Ends of transformers' names of classes that compute no next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedCollator:
    """`PaddingFreeCollator` that turns an empty micro-batch into one padding token.

    A micro-batch is empty if fewer rows than micro-batches are left. As it has no label, divide the
    loss by the labels of all ranks, as the Trainer does, not by this rank's.
    """

    collator: PaddingFreeCollator = PaddingFreeCollator()

    @classmethod
    def of_model(cls, model: Any) -> "BalancedCollator":
        """One whose batches say in all ways that the model's forward takes where documents begin:
        layers without attention read cu_seq_lens and seq_idx, and no position_ids.
        """
        keys = boundary_keys(model)
        return cls(
            collator=PaddingFreeCollator(
                return_flash_attn_kwargs=FLASH_KEYS[0] in keys, return_seq_idx=SEQ_IDX in keys
            )
        )

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if features:
            return self.collator(features)
        padding = [[self.collator.pad_token_id]]
        nothing = flatten(padding, labels=[[IGNORE]], options=self.collator)
        return self.collator.batch(nothing)


class PlannedTrainer:
    """A mixin left of a Trainer, for mixins that plan its micro-batches: a DataLoader over them.

    data_collator: default `BalancedCollator.of_model(model)`; yours gets an empty list for an empty
    micro-batch. check_documents: whether the first step begins with `check_documents_apart`. Leave
    it out for a model that is told of documents in a way the probe has not, such as a mask that
    compute_loss makes, or whose forward returns no logits.
    """

    def __init__(self, *args: Any, check_documents: bool = True, **kwargs: Any) -> None:
        self._is_to_be_checked = check_documents
        super().__init__(*args, **kwargs)
        chosen = cast(Any, self).data_collator
        # By position it is known by itself: subclasses may take *args.
        given = kwargs.get("data_collator") is not None or any(value is chosen for value in args)
        self._chosen_collator = None if given else chosen

    def _collator(self: Any) -> Callable[[Any], dict[str, Any]]:
        """The user's collator, or a padding-free one instead of the trainer's, which pads."""
        # The user may also have set a collator after the trainer was made.
        given = None if self.data_collator is self._chosen_collator else self.data_collator
        if isinstance(given, PaddingFreeCollator):
            return BalancedCollator(collator=given)
        return BalancedCollator.of_model(self.model) if given is None else given

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's step. Before the first, a UserError for a model that lets documents of a
        packed row see each other.
        """
        if self._is_to_be_checked:
            self._is_to_be_checked = False
            with self.compute_loss_context_manager():
                check_documents_apart(model, self._prepare_inputs(inputs))
        return cast(Any, super()).training_step(model, inputs, *args, **kwargs)

    def _rows(self: Any, collator: Any) -> Any:
        """The training rows, with the columns that the collator reads; UserError for rows or a
        model that no causal language model trains.
        """
        dataset = checked(self.train_dataset)
        _check_columns(dataset)
        _check_task(self.model)
        # Only `datasets.Dataset` needs this; from other datasets the collator takes the keys that
        # it reads.
        if not hasattr(dataset, "column_names"):
            return dataset
        if isinstance(collator, BalancedCollator):
            return read_by_ours(dataset, remove=self.args.remove_unused_columns)
        return self._remove_unused_columns(dataset, description="training")

    def _num_ranks(self: Any, *, cp: int = 1) -> int:
        """Ranks that get micro-batches of their own, if cp processes share each; UserError for
        settings that would undo what was planned for them.
        """
        _check_accelerator(self.accelerator)
        _check_sequences(self)
        num_ranks = self.args.world_size // (self.get_tp_size() * cp)
        if num_ranks < 1:
            raise UserError(
                f"{self.args.world_size} processes are too few for the trainer's tp and cp"
            )
        _check_loss(self, num_ranks)
        return num_ranks

    def _loader(self: Any, rows: Any, batches: Sampler[list[int]], collator: Any) -> Any:
        """The trainer's DataLoader over planned batches, prepared by its accelerator."""
        args = self.args
        if not args.dataloader_in_order:
            raise UserError(
                "dataloader_in_order = False lets workers hand over micro-batches in another order "
                "than planned, so that ranks would train those of different steps; leave it True"
            )
        loader = self.accelerator.prepare(
            DataLoader(
                rows,
                batch_sampler=batches,
                collate_fn=collator,
                num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory,
                persistent_workers=args.dataloader_persistent_workers,
                multiprocessing_context=args.dataloader_multiprocessing_context,
                prefetch_factor=args.dataloader_prefetch_factor,
            )
        )
        # On one process, accelerate leaves the batches as they are.
        if isinstance(loader.batch_sampler, BatchSamplerShard):
            shard: Any = loader.batch_sampler
            # skip_first_batches looks for set_epoch here. Without it, a run that resumes in a later
            # epoch would train the rows of the first epoch.
            shard.sampler = batches
        return loader


def checked(dataset: Any) -> Any:
    """The dataset; UserError for a stream, or for rows that are packed already."""
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"balancing needs a train_dataset with a length and rows by number, not "
            f"{type(dataset).__name__}; load it without streaming"
        )
    names = getattr(dataset, "column_names", None) or []
    for name in PACKED_COLUMNS:
        if name in names and len(dataset) and np.ndim(dataset[0][name]):
            raise UserError(
                f"train_dataset has {name}: its rows are packed already, and hold documents that "
                f"cannot be balanced one by one; use packing=False"
            )
    return dataset


def read_by_ours(dataset: Any, *, remove: bool) -> Any:
    """A `datasets.Dataset` with only the columns that our collator reads, if `remove`.

    The Trainer would silently remove all that the model's forward does not take, e.g. a padding
    mask or a loss mask; a loss mask without labels is a UserError.
    """
    names: list[str] = dataset.column_names
    masks = [name for name in LOSS_MASKS if name in names]
    if masks and "labels" not in names:
        raise UserError(
            f"train_dataset has {masks[0]} and no labels, so masked tokens would be trained; give "
            f"labels that are {IGNORE} where nothing is trained"
        )
    if not remove or _is_transformed(dataset):
        return dataset
    return dataset.remove_columns([name for name in names if name not in READ])


def _check_columns(dataset: Any) -> None:
    """UserError for a `datasets.Dataset` that is not tokenized to a row of tokens, as those of
    TRL's other trainers (DPO, KTO, rewards, GRPO) are.
    """
    names = getattr(dataset, "column_names", None)
    if names is not None and "input_ids" not in names and not _is_transformed(dataset):
        raise UserError(
            f"train_dataset has the columns {', '.join(names)}, and no input_ids: balanced steps "
            f"train rows of tokens, one document each, as SFT does. Tokenize it first; preference "
            f"and reward trainers have no such rows, for GRPOTrainer take `balanced_grpo` of "
            f"wlb.adapters.trl"
        )


def _check_task(model: Any) -> None:
    """UserError for a model that gives a document one answer, or reads it in both directions."""
    inner = unwrapped(model)
    name, config = type(inner).__name__, getattr(inner, "config", None)
    problem = None
    if found := OTHER_TASKS.search(name):
        problem = f"it is made for {found[1]}"
    elif getattr(config, "is_encoder_decoder", False):
        problem = "it has an encoder"
    if problem is not None:
        raise UserError(
            f"{name} is no causal language model ({problem}), and many documents in one row, which "
            f"balanced steps make, train only those; use the library's own trainer for it"
        )


def _is_transformed(dataset: Any) -> bool:
    """Whether rows are computed when read, by `set_transform` or `with_transform`."""
    return dataset.format["type"] == "custom"


def lengths_of(dataset: Any) -> IntArray:
    """Tokens of each row; for a `datasets.Dataset` from its offsets, without reading tokens."""
    if not hasattr(dataset, "with_format") or _is_transformed(dataset):
        return np.array(list(_lengths_read(dataset)), np.int64)
    # pyarrow is a dependency of datasets.
    arrow: Any = importlib.import_module("pyarrow.compute")
    table = dataset.with_format("arrow")
    parts = [np.zeros(0, np.int64)]
    for at in range(0, len(dataset), BLOCK):
        part = arrow.list_value_length(table[at : at + BLOCK]["input_ids"])
        if part.null_count:
            raise UserError(
                f"row {at + part.is_null().to_pylist().index(True)} of train_dataset has null for "
                f"its input_ids; remove such rows"
            )
        parts.append(part.to_numpy())
    return np.concatenate(parts).astype(np.int64)


def _lengths_read(rows: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    for i, row in enumerate(rows):
        if row.get("input_ids") is None:
            raise UserError(
                f"row {i} of train_dataset has {sorted(row)}, but no input_ids; tokenize it first"
            )
        yield len(row["input_ids"])


def _check_accelerator(accelerator: Any) -> None:
    given = accelerator.dataloader_config
    if given.dispatch_batches:
        raise UserError(
            "accelerator_config.dispatch_batches = True: a run that resumes would skip one rank's "
            "share of what was trained; leave it False, every process plans the same batches and "
            "reads its own. In a loop of your own it works where pad_to_multiple_of is s_max"
        )
    if given.split_batches:
        raise UserError(
            "accelerator_config.split_batches = True cuts rows of a batch apart, and a batch here "
            "is one row of many documents; leave it False"
        )


def _check_sequences(trainer: Any) -> None:
    """UserError for ranks that share sequences in ways that do not know documents."""
    sp, cp = trainer.get_sp_size(), trainer.get_cp_size()
    if sp > 1:
        raise UserError(f"sequence parallelism of {sp} deals its own batches; balance without it")
    if cp > 1:
        raise UserError(
            f"accelerate's cp_size = {cp} takes the mask out of attention, so documents of a "
            f"micro-batch would see each other; leave cp_size at 1, use Balance(cp={cp}), with "
            f"`balanced` of wlb.adapters.hugging_face: no other trainer here has CP"
        )


def _check_loss(trainer: Any, num_ranks: int) -> None:
    """UserError for a loss that is a mean over the tokens of less than a step, which weigh more
    where they are fewer: planned micro-batches and ranks hold different numbers of them.
    """
    args = trainer.args
    if num_ranks > 1 and not args.average_tokens_across_devices:
        raise UserError(
            "average_tokens_across_devices = False divides each rank's loss by its own tokens, and "
            "ranks of a balanced step hold different numbers of them; set it to True"
        )
    is_scaled, remedy = trainer.loss_is_scaled_for_ga, "divide by the step's, and set it to True"
    why = "loss_is_scaled_for_ga = False says that"
    if is_scaled is None:  # the Trainer's own rule
        is_scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        why = f"{type(trainer.model).__name__} takes no num_items_in_batch, so"
        remedy = "give compute_loss_func, which divides by the step's"
    accumulated = args.gradient_accumulation_steps
    if not is_scaled and num_ranks * accumulated > 1:
        raise UserError(
            f"{why} the loss of each of a step's {num_ranks} x {accumulated} micro-batches (ranks "
            f"x gradient_accumulation_steps) is a mean over its own tokens, and balanced ones hold "
            f"different numbers of them; {remedy}"
        )
