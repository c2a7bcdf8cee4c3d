"""Shared parts of the balanced trainers of transformers and TRL: checks, ranks, collator, loader.

`PlannedTrainer` is the base of the mixins `hugging_face.BalancedTrainer`, which may delay rows, and
`trl.BalancedSteps`, which may not.
"""

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
"""Number of dataset rows whose lengths are read in one call."""
PACKED_COLUMNS = ("seq_lengths", "lengths")
"""Columns of document lengths. A list in a row means that the row is packed already."""
READ = ("input_ids", "labels", "attention_mask", "position_ids")
"""Columns that wlb's collator reads. It reads attention_mask only to refuse padded rows."""

OTHER_TASKS = re.compile(
    "For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|MaskedLM"
    "|NextSentencePrediction|PreTraining|RewardModeling|Regression)"
)
"""Suffixes of the transformers classes that do not predict the next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedCollator:
    """A `PaddingFreeCollator` that also accepts an empty micro-batch.

    A micro-batch is empty if fewer rows than micro-batches are left. It becomes one padding token
    without a label. So divide the loss by the labels of all ranks, as the Trainer does, and not by
    the labels of this rank, which may be 0.
    """

    collator: PaddingFreeCollator = PaddingFreeCollator()

    @classmethod
    def of_model(cls, model: Any) -> "BalancedCollator":
        """Return a collator whose batches have every boundary argument that the model accepts.

        Layers other than attention do not read position_ids. They find the documents by cu_seq_lens
        and seq_idx.
        """
        keys = boundary_keys(model)
        return cls(
            collator=PaddingFreeCollator(
                return_flash_attn_kwargs=FLASH_KEYS[0] in keys, return_seq_idx=SEQ_IDX in keys
            )
        )

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the model's arguments for a micro-batch of dataset rows."""
        if features:
            return self.collator(features)
        padding = [[self.collator.pad_token_id]]
        nothing = flatten(padding, labels=[[IGNORE]], options=self.collator)
        return self.collator.batch(nothing)


class PlannedTrainer:
    """Base of the mixins that plan a Trainer's micro-batches; put it before the Trainer.

    Args:
        *args: Of the Trainer.
        check_documents: Whether the first step begins with `check_documents_apart`. Turn it off for
            a model whose forward returns no logits, or that learns of documents in a way that the
            probe cannot imitate, such as a mask made in compute_loss.
        **kwargs: Of the Trainer. A `data_collator` gets an empty list for an empty micro-batch; the
            default is `BalancedCollator.of_model(model)`.
    """

    def __init__(self, *args: Any, check_documents: bool = True, **kwargs: Any) -> None:
        self._is_to_be_checked = check_documents
        super().__init__(*args, **kwargs)
        chosen = cast(Any, self).data_collator
        # A collator given by position is recognised by identity, because subclasses may take *args.
        given = kwargs.get("data_collator") is not None or any(value is chosen for value in args)
        # The Trainer's own default, which pads; `_collator` replaces it.
        self._default_collator = None if given else chosen

    def _collator(self: Any) -> Callable[[Any], dict[str, Any]]:
        """Return the user's collator, or a padding-free one in place of the Trainer's default."""
        # The user may also set a collator after the trainer was made.
        given = None if self.data_collator is self._default_collator else self.data_collator
        if isinstance(given, PaddingFreeCollator):
            return BalancedCollator(collator=given)
        return BalancedCollator.of_model(self.model) if given is None else given

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's step; before the first one, probe whether documents stay apart.

        Raises:
            UserError: The model lets documents of a packed row see each other.
        """
        if self._is_to_be_checked:
            self._is_to_be_checked = False
            with self.compute_loss_context_manager():
                check_documents_apart(model, self._prepare_inputs(inputs))
        return cast(Any, super()).training_step(model, inputs, *args, **kwargs)

    def _rows(self: Any, collator: Any) -> Any:
        """Return the training rows with the columns that the collator reads.

        Raises:
            UserError: The rows are not tokenized documents, or the model is no causal language
                model.
        """
        dataset = checked(self.train_dataset)
        _check_columns(dataset)
        _check_task(self.model)
        # A `datasets.Dataset` would read all its columns. From the rows of other datasets, the
        # collator just takes the keys that it knows.
        if not hasattr(dataset, "column_names"):
            return dataset
        if isinstance(collator, BalancedCollator):
            return read_by_ours(dataset, remove=self.args.remove_unused_columns)
        return self._remove_unused_columns(dataset, description="training")

    def _num_ranks(self: Any, *, cp: int = 1) -> int:
        """Return the number of data-parallel ranks, where `cp` processes share each micro-batch.

        Raises:
            UserError: A setting would undo what is planned for the ranks.
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
        """Return the trainer's DataLoader over planned batches, prepared by its accelerator.

        Args:
            rows: The dataset.
            batches: Sampler of the micro-batches of all ranks.
            collator: Makes a micro-batch out of rows.
        """
        args = self.args
        if not args.dataloader_in_order:
            raise UserError(
                "dataloader_in_order = False lets workers hand over micro-batches in another order "
                "than planned, so that ranks would train different steps at a time; leave it True"
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
            # accelerate's skip_first_batches looks for set_epoch here. Without it, a run that
            # resumes in a later epoch would train the rows of the first epoch.
            shard.sampler = batches
        return loader


def checked(dataset: Any) -> Any:
    """Return the dataset; raise UserError if it is a stream or its rows are packed already."""
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"balancing needs a train_dataset with a length and rows by number, not "
            f"{type(dataset).__name__}; load it without streaming"
        )
    names = getattr(dataset, "column_names", None) or []
    for name in PACKED_COLUMNS:
        if name in names and len(dataset) and np.ndim(dataset[0][name]):
            raise UserError(
                f"train_dataset has the column {name}: its rows are packed already, so their "
                f"documents cannot be balanced one by one; use packing=False"
            )
    return dataset


def read_by_ours(dataset: Any, *, remove: bool) -> Any:
    """Return a `datasets.Dataset` with only the columns that wlb's collator reads, if `remove`.

    The Trainer would silently drop every column that the model's forward does not take, including a
    padding mask or a loss mask. Here they are seen and refused.

    Args:
        dataset: The tokenized dataset.
        remove: The Trainer's `remove_unused_columns`.

    Raises:
        UserError: There is a loss mask but no labels, so that masked tokens would be trained.
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
    """Raise UserError for a `datasets.Dataset` whose rows are not single tokenized documents.

    The datasets of TRL's other trainers (DPO, KTO, rewards, GRPO) are of that kind.
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
    """Raise UserError for a classifier or an encoder, which cannot train packed rows."""
    inner = unwrapped(model)
    name, config = type(inner).__name__, getattr(inner, "config", None)
    problem = None
    if found := OTHER_TASKS.search(name):
        problem = f"it is made for {found[1]}"
    elif getattr(config, "is_encoder_decoder", False):
        problem = "it has an encoder"
    if problem is not None:
        raise UserError(
            f"{name} is no causal language model ({problem}), and only such a model can train on "
            f"balanced rows, which hold many documents; use the library's own trainer for it"
        )


def _is_transformed(dataset: Any) -> bool:
    """Return whether rows are computed on access, by `set_transform` or `with_transform`."""
    return dataset.format["type"] == "custom"


def lengths_of(dataset: Any) -> IntArray:
    """Return the tokens of each row.

    For a `datasets.Dataset` they come from Arrow's offsets, so that no token is read.
    """
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
    """Raise UserError for sequence sharding over ranks that ignores document boundaries."""
    sp, cp = trainer.get_sp_size(), trainer.get_cp_size()
    if sp > 1:
        raise UserError(
            f"sequence parallelism of {sp} distributes its own batches; balance without it"
        )
    if cp > 1:
        raise UserError(
            f"accelerate's cp_size = {cp} removes the mask of attention, so documents of a "
            f"micro-batch would see each other; leave cp_size at 1 and use Balance(cp={cp}) with "
            f"`balanced` of wlb.adapters.hugging_face (the other trainers of wlb have no CP)"
        )


def _check_loss(trainer: Any, num_ranks: int) -> None:
    """Raise UserError for a loss that averages over the tokens of only a part of the step.

    Balanced micro-batches and ranks have different numbers of tokens. A mean over one of them would
    give its tokens more weight if it has fewer.
    """
    args = trainer.args
    if num_ranks > 1 and not args.average_tokens_across_devices:
        raise UserError(
            "average_tokens_across_devices = False divides each rank's loss by the rank's tokens, "
            "and ranks of a balanced step have different numbers of them; set it to True"
        )
    is_scaled, remedy = trainer.loss_is_scaled_for_ga, "divide by the step's, and set it to True"
    why = "loss_is_scaled_for_ga = False says that"
    if is_scaled is None:
        # Decide by the same rule as the Trainer.
        is_scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        why = f"{type(trainer.model).__name__} takes no num_items_in_batch, so"
        remedy = "give compute_loss_func, which divides by the step's"
    accumulated = args.gradient_accumulation_steps
    if not is_scaled and num_ranks * accumulated > 1:
        raise UserError(
            f"{why} the loss of each of a step's {num_ranks} x {accumulated} micro-batches (ranks "
            f"x gradient_accumulation_steps) is a mean over the tokens of that micro-batch, and "
            f"balanced micro-batches have different numbers of them; {remedy}"
        )
