"""What the balanced trainers of transformers and TRL share: checks, collator and DataLoader.

`PlannedTrainer` is the base class of two mixins. `hugging_face.BalancedTrainer` may delay a row to
a later step; `trl.BalancedSteps` never does.
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
"""Number of dataset rows whose lengths are read in one call, which bounds memory."""
PACKED_COLUMNS = ("seq_lengths", "lengths")
"""Columns that hold document lengths. If they hold lists, the dataset is already packed."""
READ = ("input_ids", "labels", "attention_mask", "position_ids")
"""Dataset columns that wlb's collator reads (attention_mask only to detect padded rows)."""

OTHER_TASKS = re.compile(
    "For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|MaskedLM"
    "|NextSentencePrediction|PreTraining|RewardModeling|Regression)"
)
"""Name suffixes of transformers' model classes that do not predict the next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedCollator:
    """A `PaddingFreeCollator` that also accepts an empty micro-batch.

    A micro-batch is empty if fewer dataset rows than micro-batches are left. It becomes one padding
    token without a label. Therefore divide the loss by the number of labels on all ranks, as the
    Trainer does, and not by the number on this rank, which may be 0.
    """

    collator: PaddingFreeCollator = PaddingFreeCollator()  # used unless the micro-batch is empty

    @classmethod
    def of_model(cls, model: Any) -> "BalancedCollator":
        """Return a collator that passes a model all document boundaries that its forward accepts.

        Layers other than attention (convolutions, recurrent layers) do not read position_ids. They
        find the documents by cu_seq_lens and seq_idx.
        """
        keys = boundary_keys(model)
        return cls(
            collator=PaddingFreeCollator(
                return_flash_attn_kwargs=FLASH_KEYS[0] in keys, return_seq_idx=SEQ_IDX in keys
            )
        )

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the arguments of the model's forward for a micro-batch of dataset rows."""
        if features:
            return self.collator(features)
        padding = [[self.collator.pad_token_id]]
        nothing = flatten(padding, labels=[[IGNORE]], options=self.collator)
        return self.collator.batch(nothing)


class PlannedTrainer:
    """Base class of mixins that plan a Trainer's micro-batches.

    In the bases of a class, list the mixin before the Trainer.

    Args:
        *args: Arguments of the Trainer.
        check_documents: Whether to test before the first step that the model keeps documents apart
            (`check_documents_apart`). Turn it off for a model whose forward returns no logits, or
            that gets document boundaries in a way that the test cannot imitate, such as a mask made
            in compute_loss.
        **kwargs: Arguments of the Trainer. A `data_collator` is called with an empty list for an
            empty micro-batch; the default is `BalancedCollator.of_model(model)`.
    """

    def __init__(self, *args: Any, check_documents: bool = True, **kwargs: Any) -> None:
        self._is_to_be_checked = check_documents
        super().__init__(*args, **kwargs)
        chosen = cast(Any, self).data_collator
        # A positional collator is recognised by identity, because subclasses may have other
        # positional arguments.
        given = kwargs.get("data_collator") is not None or any(value is chosen for value in args)
        # The Trainer's own default collator pads, so remember it: `_collator` replaces it.
        self._default_collator = None if given else chosen

    def _collator(self: Any) -> Callable[[Any], dict[str, Any]]:
        """Return the user's collator, or a padding-free one if the user gave none."""
        # Look for a collator only now, because the user may set it after the trainer was made.
        given = None if self.data_collator is self._default_collator else self.data_collator
        if isinstance(given, PaddingFreeCollator):
            return BalancedCollator(collator=given)
        return BalancedCollator.of_model(self.model) if given is None else given

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's step; before the first step, test that the model keeps documents apart.

        Raises:
            UserError: A document's logits depend on another document of its row.
        """
        if self._is_to_be_checked:
            self._is_to_be_checked = False
            with self.compute_loss_context_manager():
                check_documents_apart(model, self._prepare_inputs(inputs))
        return cast(Any, super()).training_step(model, inputs, *args, **kwargs)

    def _rows(self: Any, collator: Any) -> Any:
        """Return the training dataset with only the columns that the collator reads.

        Raises:
            UserError: The rows are not tokenized documents, or the model is not a causal language
                model.
        """
        dataset = checked(self.train_dataset)
        _check_columns(dataset)
        _check_task(self.model)
        # A `datasets.Dataset` reads all columns of a row, so remove those that nobody needs. In
        # rows of other datasets, the collator ignores unknown keys.
        if not hasattr(dataset, "column_names"):
            return dataset
        if isinstance(collator, BalancedCollator):
            return read_by_ours(dataset, remove=self.args.remove_unused_columns)
        return self._remove_unused_columns(dataset, description="training")

    def _num_ranks(self: Any, *, cp: int = 1) -> int:
        """Return the number of data-parallel ranks: processes / (tensor parallelism x cp).

        Args:
            cp: Number of processes that share each micro-batch.

        Raises:
            UserError: A setting of the Trainer would assign other batches to the ranks, or weigh
                tokens unequally.
        """
        _check_accelerator(self.accelerator)
        _check_sequences(self)
        num_ranks = self.args.world_size // (self.get_tp_size() * cp)
        if num_ranks < 1:
            raise UserError(
                f"{self.args.world_size} processes are too few for tensor parallelism x cp = "
                f"{self.get_tp_size()} x {cp}; start at least {self.get_tp_size() * cp}"
            )
        _check_loss(self, num_ranks)
        return num_ranks

    def _loader(self: Any, rows: Any, batches: Sampler[list[int]], collator: Any) -> Any:
        """Return the trainer's DataLoader over planned batches, prepared by its accelerator.

        Args:
            rows: The dataset.
            batches: Sampler that yields the dataset rows of the micro-batches of all ranks.
            collator: Makes the model's arguments from a list of rows.
        """
        args = self.args
        if not args.dataloader_in_order:
            raise UserError(
                "dataloader_in_order = False lets ranks receive micro-batches in different "
                "orders, so that they would train different steps at the same time; set "
                "dataloader_in_order = True"
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
        # accelerate wraps the sampler only if there are several processes.
        if isinstance(loader.batch_sampler, BatchSamplerShard):
            shard: Any = loader.batch_sampler
            # accelerate's skip_first_batches calls `sampler.set_epoch`. Without this attribute, a
            # run that resumes in a later epoch would train the rows of the first epoch.
            shard.sampler = batches
        return loader


def checked(dataset: Any) -> Any:
    """Return the dataset unchanged; raise UserError if it is streamed or already packed."""
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"train_dataset is a {type(dataset).__name__}, but balancing needs a dataset with a "
            "length and with rows accessible by index; load the dataset without streaming"
        )
    names = getattr(dataset, "column_names", None) or []
    for name in PACKED_COLUMNS:
        if name in names and len(dataset) and np.ndim(dataset[0][name]):
            raise UserError(
                f"train_dataset has the column {name}, so its rows are already packed and their "
                "documents cannot be balanced; set packing=False"
            )
    return dataset


def read_by_ours(dataset: Any, *, remove: bool) -> Any:
    """Remove the columns of a `datasets.Dataset` that wlb's collator does not read.

    The Trainer would silently remove every column that the model's forward does not accept, also a
    loss mask. This function instead refuses a loss mask without labels.

    Args:
        dataset: The tokenized dataset.
        remove: Whether to remove columns (the Trainer's `remove_unused_columns`). With False the
            dataset is only checked.

    Raises:
        UserError: There is a loss mask but there are no labels, so masked tokens would be trained.
    """
    names: list[str] = dataset.column_names
    masks = [name for name in LOSS_MASKS if name in names]
    if masks and "labels" not in names:
        raise UserError(
            f"train_dataset has the column {masks[0]} but no labels, so tokens that this mask "
            f"excludes would be trained; add the column labels, with {IGNORE} at these tokens"
        )
    if not remove or _is_transformed(dataset):
        return dataset
    return dataset.remove_columns([name for name in names if name not in READ])


def _check_columns(dataset: Any) -> None:
    """Raise UserError for a `datasets.Dataset` without the column input_ids.

    The datasets of TRL's DPO, KTO, reward and GRPO trainers have other columns instead.
    """
    names = getattr(dataset, "column_names", None)
    if names is not None and "input_ids" not in names and not _is_transformed(dataset):
        raise UserError(
            f"train_dataset has the columns {', '.join(names)}, but no input_ids, and balanced "
            "training needs one tokenized document in each row. Tokenize the dataset first; "
            "datasets for preference or reward training cannot be balanced, and for GRPOTrainer "
            "use `balanced_grpo` of wlb.adapters.rl.trl"
        )


def _check_task(model: Any) -> None:
    """Raise UserError for a model that is not a causal language model, by its class and config."""
    inner = unwrapped(model)
    name, config = type(inner).__name__, getattr(inner, "config", None)
    problem = None
    if found := OTHER_TASKS.search(name):
        problem = f"it is made for {found[1]}"
    elif getattr(config, "is_encoder_decoder", False):
        problem = "it has an encoder"
    if problem is not None:
        raise UserError(
            f"{name} is not a causal language model ({problem}), but only causal language models "
            "can train on packed rows; use the library's own trainer for this model"
        )


def _is_transformed(dataset: Any) -> bool:
    """Return whether rows are computed on access, by `set_transform` or `with_transform`."""
    return dataset.format["type"] == "custom"


def lengths_of(dataset: Any) -> IntArray:
    """Return the number of tokens of each dataset row, shape [num_rows].

    For a `datasets.Dataset` they are computed from Arrow's offsets, without reading tokens.
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
                f"row {at + part.is_null().to_pylist().index(True)} of train_dataset has "
                "input_ids = null; remove rows without input_ids"
            )
        parts.append(part.to_numpy())
    return np.concatenate(parts).astype(np.int64)


def _lengths_read(rows: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    for i, row in enumerate(rows):
        if row.get("input_ids") is None:
            raise UserError(
                f"row {i} of train_dataset has the keys {sorted(row)}, but no input_ids; tokenize "
                "the dataset first"
            )
        yield len(row["input_ids"])


def _check_accelerator(accelerator: Any) -> None:
    given = accelerator.dataloader_config
    if given.dispatch_batches:
        raise UserError(
            "accelerator_config.dispatch_batches = True would make a resumed run skip a part of "
            "the data; set dispatch_batches = False, so that every process reads its own part"
        )
    if given.split_batches:
        raise UserError(
            "accelerator_config.split_batches = True would divide the rows of a batch over "
            "processes, but a balanced batch is one row of many documents; set split_batches = "
            "False"
        )


def _check_sequences(trainer: Any) -> None:
    """Raise UserError if accelerate divides sequences over ranks without regard to documents."""
    sp, cp = trainer.get_sp_size(), trainer.get_cp_size()
    if sp > 1:
        raise UserError(
            f"sequence parallelism (sp_size = {sp}) distributes batches by its own rule, so they "
            "cannot be balanced; set sp_size = 1"
        )
    if cp > 1:
        raise UserError(
            f"accelerate's cp_size = {cp} removes the attention mask, so documents of a "
            f"micro-batch would see each other; set cp_size = 1 and use Balance(cp={cp}) with "
            "`balanced` of wlb.adapters.hugging_face (no other trainer of wlb supports context "
            "parallelism)"
        )


def _check_loss(trainer: Any, num_ranks: int) -> None:
    """Raise UserError unless the loss is a mean over the tokens of the whole step.

    Balanced micro-batches have different numbers of tokens. If each were averaged by itself, tokens
    of short micro-batches would weigh more.

    Args:
        trainer: The Trainer.
        num_ranks: Data-parallel ranks.
    """
    args = trainer.args
    if num_ranks > 1 and not args.average_tokens_across_devices:
        raise UserError(
            "average_tokens_across_devices = False divides each rank's loss by its own number of "
            "tokens, which differs between ranks of a balanced step; set "
            "average_tokens_across_devices = True"
        )
    is_scaled, remedy = (
        trainer.loss_is_scaled_for_ga,
        (
            "let the loss divide by the tokens of the whole step, and set loss_is_scaled_for_ga = "
            "True"
        ),
    )
    why = "loss_is_scaled_for_ga = False says that"
    if is_scaled is None:
        # If the user did not say it, decide by the same rule as the Trainer.
        is_scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        why = f"{type(trainer.model).__name__} does not accept num_items_in_batch, so"
        remedy = "give a compute_loss_func that divides by the tokens of the whole step"
    accumulated = args.gradient_accumulation_steps
    if not is_scaled and num_ranks * accumulated > 1:
        raise UserError(
            f"{why} the loss of each micro-batch is a mean over its own tokens. Balanced "
            f"micro-batches have different numbers of tokens, so tokens would get unequal weights "
            f"({num_ranks} ranks with gradient_accumulation_steps = {accumulated}); {remedy}"
        )
