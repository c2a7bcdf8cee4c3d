"""Collators to use as `collate_fn` of a DataLoader or `data_collator` of a trainer.

`PaddingFreeCollator` joins examples to one row without padding (Section 3.4 of "Enhancing Training
Efficiency Using Packing with Flash Attention"). It can replace transformers'
DataCollatorWithFlattening, because its batches have the same keys, types and dtypes.
`PaddedCollator` makes one padded row of each example.

An example is a mapping with `input_ids` and, optionally, unshifted `labels`; either all examples
have labels or none has. Call models with `use_cache=False`: with a cache, transformers ignores
position_ids, so tokens would attend to other documents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wlb.adapters.collate.boundaries import document_lengths
from wlb.adapters.collate.flat import FlatBatch, FlatOptions, flatten
from wlb.adapters.collate.padded import PaddedBatch, PadOptions, pad
from wlb.parallel.rows import IGNORE
from wlb.plan import UserError

Feature = Mapping[str, Any]
Tensors = Literal["pt", "np"]

LENGTH_KEYS = ("seq_lengths", "lengths")
"""Keys for the document lengths of an example that is a packed row; it may have one of the two."""
LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Keys of loss masks, which other libraries' collators convert to labels.

Examples with such a key raise UserError, because ignoring it would train masked tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingFreeCollator(FlatOptions):
    """Collator that concatenates examples to one row without padding.

    The batch has input_ids, labels and position_ids, each int64 [1, T], and the keys that the
    fields below add.
    """

    return_position_ids: bool = True  # whether the batch has position_ids
    # Whether the batch has document offsets for FlashAttention: cu_seq_lens_q and cu_seq_lens_k
    # (the same int32 tensor [num_segments + 1]), max_length_q and max_length_k (int).
    return_flash_attn_kwargs: bool = False
    # Whether the batch has seq_idx: for each token the index of its document, int32 [1, T].
    return_seq_idx: bool = False
    # Whether the batch has shift_labels, int64 [1, T], in which each token's label is the next
    # token. Models of transformers then do not shift labels themselves.
    return_shift_labels: bool = False
    return_tensors: Tensors = "pt"  # "pt" for torch tensors, "np" for arrays
    # Fields of `FlatOptions` that the caller cannot set: `next_labels` follows
    # `return_shift_labels`, and transformers expects int64.
    next_labels: bool = field(init=False, default=False, repr=False)
    dtype: npt.DTypeLike = field(init=False, default=np.int64, repr=False)

    def __post_init__(self) -> None:
        # `super()` without arguments does not work in a dataclass with slots.
        FlatOptions.__post_init__(self)
        _check_tensors(self.return_tensors)
        object.__setattr__(self, "next_labels", self.return_shift_labels)
        if not (self.return_position_ids or self.return_flash_attn_kwargs or self.return_seq_idx):
            raise UserError(
                "the batch would not say where documents begin, because return_position_ids, "
                "return_flash_attn_kwargs and return_seq_idx are all False; set one of them to True"
            )

    def __call__(
        self,
        features: Sequence[Feature],
        return_tensors: Tensors | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        """Return the batch of these examples.

        Args:
            features: The examples.
            return_tensors: Kind of the tensors. None means that of the field `return_tensors`.
            separator_id: Label of the first token of each document. None means the value of the
                field `separator_id`.
        """
        options = self if separator_id is None else replace(self, separator_id=separator_id)
        columns = _columns(features)
        flat = flatten(columns.pop("input_ids"), **columns, options=options)
        return self.batch(flat, return_tensors=return_tensors)

    def batch(self, flat: FlatBatch, *, return_tensors: Tensors | None = None) -> dict[str, Any]:
        """Convert concatenated documents to the dictionary that the collator returns.

        Args:
            flat: The documents, for example from `flatten_micro_batch`.
            return_tensors: Kind of the tensors. None means that of the field `return_tensors`.
        """
        out: dict[str, Any] = {"input_ids": flat.input_ids[None], "labels": flat.labels[None]}
        if self.return_position_ids:
            out["position_ids"] = flat.position_ids[None]
        if self.return_shift_labels:
            if flat.next_labels is None:
                raise UserError(
                    "return_shift_labels = True needs a FlatBatch with next_labels; make the "
                    "FlatBatch with FlatOptions(next_labels=True)"
                )
            out["shift_labels"] = flat.next_labels[None]
        if self.return_seq_idx:
            out["seq_idx"] = flat.seq_idx[None]
        if self.return_flash_attn_kwargs:
            out["cu_seq_lens_q"] = out["cu_seq_lens_k"] = flat.cu_seqlens
            out["max_length_q"] = out["max_length_k"] = flat.max_seqlen
        return _converted(out, return_tensors or self.return_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedCollator(PadOptions):
    """Collator that pads every example to a row of its own.

    The batch has input_ids, labels, attention_mask and position_ids, each int64 [examples, width].
    An example must be one document; a packed row raises UserError.
    """

    return_position_ids: bool = True  # whether the batch has position_ids
    return_tensors: Tensors = "pt"  # "pt" for torch tensors, "np" for arrays

    def __post_init__(self) -> None:
        PadOptions.__post_init__(self)
        _check_tensors(self.return_tensors)

    def __call__(
        self, features: Sequence[Feature], return_tensors: Tensors | None = None
    ) -> dict[str, Any]:
        """Return the batch of these examples.

        Args:
            features: The examples.
            return_tensors: Kind of the tensors. None means that of the field `return_tensors`.
        """
        columns = _columns(features)
        _refuse_packed(columns)
        made = pad(columns["input_ids"], labels=columns.get("labels"), options=self)
        return self.batch(made, return_tensors=return_tensors)

    def batch(self, made: PaddedBatch, *, return_tensors: Tensors | None = None) -> dict[str, Any]:
        """Convert padded rows to the dictionary that the collator returns.

        Args:
            made: The padded rows.
            return_tensors: Kind of the tensors. None means that of the field `return_tensors`.
        """
        out: dict[str, Any] = {
            "input_ids": made.input_ids,
            "labels": made.labels,
            "attention_mask": made.attention_mask,
        }
        if self.return_position_ids:
            out["position_ids"] = made.position_ids
        return _converted(out, return_tensors or self.return_tensors)


def _check_tensors(return_tensors: str) -> None:
    if return_tensors not in ("pt", "np"):
        raise UserError(f"return_tensors = {return_tensors!r} must be 'pt' or 'np'")


def _converted(values: dict[str, Any], return_tensors: Tensors) -> dict[str, Any]:
    """Convert NumPy arrays to torch tensors that share their memory.

    If two keys have the same array, they get the same tensor.

    Args:
        values: Arrays and other values by key; other values are not changed.
        return_tensors: "np" returns the arrays as they are.
    """
    _check_tensors(return_tensors)
    if return_tensors == "np":
        return values
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "return_tensors = 'pt' needs torch, which cannot be imported; run pip install "
            "'wlb-llm[train]', or set return_tensors = 'np' to get NumPy arrays"
        ) from error
    arrays = {id(value): value for value in values.values() if isinstance(value, np.ndarray)}
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return {name: tensors.get(id(value), value) for name, value in values.items()}


def _columns(features: Sequence[Feature]) -> dict[str, list[Any]]:
    """Return the examples' values by key: input_ids, and labels, lengths and position_ids if given.

    Other keys are ignored, except two that raise UserError: an attention_mask that contains a zero,
    and any loss mask.
    """
    present: set[str] = set().union(*features)
    out = {"input_ids": _column(features, "input_ids")}
    for key in LOSS_MASKS:
        if key in present:
            raise UserError(
                f"the examples have the key {key}, which this collator does not read; set labels "
                f"to {IGNORE} at tokens that are not trained, and remove {key}"
            )
    if "attention_mask" in present:
        _check_attention_masks(features)
    for key in ("labels", "position_ids", *LENGTH_KEYS):
        if key in present and any(feature.get(key) is not None for feature in features):
            name = "lengths" if key in LENGTH_KEYS else key
            if name in out:
                raise UserError(
                    f"examples have {' and '.join(LENGTH_KEYS)}, but both mean document lengths; "
                    "give only one of the two"
                )
            out[name] = _column(features, key)
    return out


def _column(features: Sequence[Feature], key: str) -> list[Any]:
    """Return each example's value of `key`; raise UserError if an example has none."""
    out = [feature.get(key) for feature in features]
    for i, value in enumerate(out):
        if value is None:
            raise UserError(
                f"example {i} has the keys {sorted(features[i])}, but no {key}; give every "
                f"example a value for {key}"
            )
    return out


def _check_attention_masks(features: Sequence[Feature]) -> None:
    """Raise UserError if an example's attention_mask says that it is padded."""
    for i, feature in enumerate(features):
        num_tokens = len(feature["input_ids"])
        mask = feature.get("attention_mask")
        seen = np.ones(num_tokens) if mask is None else np.asarray(mask)
        if seen.shape != (num_tokens,) or not seen.all():
            raise UserError(
                f"example {i} has {num_tokens} tokens, but its attention_mask has shape "
                f"{seen.shape} and {int(np.count_nonzero(seen))} ones; tokenize without padding, "
                "because padding would be trained as part of the document"
            )


def _refuse_packed(columns: Mapping[str, list[Any]]) -> None:
    """Raise UserError if an example consists of several documents.

    Args:
        columns: The examples' values by key. Only document lengths and position ids are read.
    """
    for i in range(len(columns["input_ids"])):
        num = 1
        if "lengths" in columns:
            lengths = document_lengths(columns["lengths"][i], f"lengths of example {i}: ")
            num, num_tokens = lengths.size, len(columns["input_ids"][i])
            if int(lengths.sum()) != num_tokens:
                raise UserError(
                    f"example {i} has {num_tokens} tokens, but its documents' lengths "
                    f"{lengths.tolist()} add up to {int(lengths.sum())}; correct the lengths"
                )
        if "position_ids" in columns:
            ids = np.asarray(columns["position_ids"][i])
            num = max(num, int(np.count_nonzero(np.diff(ids) != 1)) + 1)
        if num > 1:
            raise UserError(
                f"example {i} is a packed row of {num} documents, but an attention mask of shape "
                "[examples, width] cannot keep documents apart; use PaddingFreeCollator"
            )
