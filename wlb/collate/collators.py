"""Collators for other people's loops: `collate_fn` of a DataLoader or `data_collator` of a trainer.

`PaddingFreeCollator` is Section 3.4 of "Enhancing Training Efficiency Using Packing with Flash
Attention", with the keys, types and dtypes of transformers' DataCollatorWithFlattening, whose place
it takes. It differs where that one goes wrong: rows that are packed already keep their documents
(`seq_lengths`, as TRL's packing writes them, or restarting `position_ids`), filler is one segment,
padding inside an example is refused. `PaddedCollator` is its counterpart with a row a document.

Both take a list of mappings with `input_ids` (list, NumPy array or CPU tensor of one axis) and, in
all of them or none, `labels` (unshifted, IGNORE where nothing is trained). They hold plain values
only, so workers can pickle them; they touch no device and pin nothing.

On SDPA or eager attention, transformers' models read the boundaries from position_ids, and only in
calls without attention_mask and without a cache: outside its Trainer call them with
`use_cache=False`, in training too, or documents see each other and nothing says so. A model that
never looks (falcon in 5.23) needs `block_mask` of cu_seq_lens_q as attention_mask.
tests/collate/test_families.py has the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wlb.collate.flat import FlatBatch, FlatOptions, flatten
from wlb.collate.padded import PaddedBatch, PadOptions, PadTo, Side, pad
from wlb.collate.rows import IGNORE

Feature = Mapping[str, Any]
Tensors = Literal["pt", "np"]

LENGTH_KEYS = ("seq_lengths", "lengths")
"""Where a packed row keeps its documents' lengths; either, not both."""
LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""What other collators turn into labels; to leave it out would train what should not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingFreeCollator:
    """Examples to one row [1, T]: input_ids, labels, position_ids, all int64.

    return_flash_attn_kwargs: also cu_seq_lens_q and cu_seq_lens_k (one int32 tensor, shape
    [num_segments + 1]), max_length_q and max_length_k (int). return_seq_idx: also seq_idx, int32
    [1, T]. return_shift_labels: also shift_labels, int64 [1, T], labels moved to the token that
    predicts them, as transformers' losses take them beside `labels`. The others: `FlatOptions`.
    """

    return_position_ids: bool = True
    separator_id: int = IGNORE
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    return_shift_labels: bool = False
    position_ids_start: int = 0
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    return_tensors: Tensors = "pt"

    def __post_init__(self) -> None:
        _check_tensors(self.return_tensors)
        _ = self.options
        says = (self.return_position_ids, self.return_flash_attn_kwargs, self.return_seq_idx)
        if not any(says):
            raise ValueError(
                "return_position_ids = False leaves nothing that says where documents begin; set "
                "return_flash_attn_kwargs or return_seq_idx"
            )

    @property
    def options(self) -> FlatOptions:
        return FlatOptions(
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_token_id=self.pad_token_id,
            separator_id=self.separator_id,
            position_ids_start=self.position_ids_start,
            next_labels=self.return_shift_labels,
        )

    def __call__(
        self,
        features: Sequence[Feature],
        return_tensors: Tensors | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        options = self.options
        if separator_id is not None:
            options = replace(options, separator_id=separator_id)
        _check_features(features)
        flat = flatten(
            _column(features, "input_ids"),
            labels=_optional(features, "labels"),
            lengths=_lengths(features),
            position_ids=_optional(features, "position_ids"),
            options=options,
        )
        return self.batch(flat, return_tensors=return_tensors)

    def batch(self, flat: FlatBatch, *, return_tensors: Tensors | None = None) -> dict[str, Any]:
        """The same keys for a batch of `wlb.collate.flat`, as of a plan's micro-batch."""
        out: dict[str, Any] = {"input_ids": flat.input_ids[None], "labels": flat.labels[None]}
        if self.return_position_ids:
            out["position_ids"] = flat.position_ids[None]
        if self.return_shift_labels:
            if flat.next_labels is None:
                raise ValueError(
                    "return_shift_labels needs a batch with next_labels; make it with "
                    "FlatOptions(next_labels=True)"
                )
            out["shift_labels"] = flat.next_labels[None]
        if self.return_seq_idx:
            out["seq_idx"] = flat.seq_idx[None]
        if self.return_flash_attn_kwargs:
            out["cu_seq_lens_q"] = out["cu_seq_lens_k"] = flat.cu_seqlens
            out["max_length_q"] = out["max_length_k"] = flat.max_seqlen
        return _converted(out, return_tensors or self.return_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedCollator:
    """Examples to rows [examples, width]: input_ids, labels, attention_mask, position_ids, int64.

    The options are those of `PadOptions`. An example is one document: packed rows are refused.
    """

    pad_token_id: int
    side: Side = Side.RIGHT
    pad_to: PadTo = PadTo.LONGEST
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_position_ids: bool = True
    return_tensors: Tensors = "pt"

    def __post_init__(self) -> None:
        _check_tensors(self.return_tensors)
        _ = self.options

    @property
    def options(self) -> PadOptions:
        return PadOptions(
            pad_token_id=self.pad_token_id,
            side=self.side,
            pad_to=self.pad_to,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    def __call__(
        self, features: Sequence[Feature], return_tensors: Tensors | None = None
    ) -> dict[str, Any]:
        _check_features(features)
        tokens = _column(features, "input_ids")
        _refuse_packed(features, tokens)
        made = pad(tokens, labels=_optional(features, "labels"), options=self.options)
        return self.batch(made, return_tensors=return_tensors)

    def batch(self, made: PaddedBatch, *, return_tensors: Tensors | None = None) -> dict[str, Any]:
        """The same keys for a batch that `wlb.collate.padded` has made."""
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
        raise ValueError(f"return_tensors = {return_tensors!r} must be 'pt' or 'np'")


def _converted(values: dict[str, Any], return_tensors: Tensors) -> dict[str, Any]:
    """Arrays as tensors on the same memory; an array under two keys becomes one tensor."""
    _check_tensors(return_tensors)
    if return_tensors == "np":
        return values
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "tensors need torch: pip install 'wlb-llm[train]', or return_tensors='np'"
        ) from error
    made: dict[int, torch.Tensor] = {}
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            array: npt.NDArray[Any] = value
            if id(array) not in made:
                made[id(array)] = torch.from_numpy(array)
            values[key] = made[id(array)]
    return values


def _check_features(features: Sequence[Feature]) -> None:
    """ValueError for what a collator would have to guess or to leave out."""
    for i, feature in enumerate(features):
        if "input_ids" not in feature:
            raise ValueError(f"example {i} has {sorted(feature)}, but no input_ids; tokenize first")
        for key in LOSS_MASKS:
            if key in feature:
                raise ValueError(
                    f"example {i} has {key}, which is not read; put {IGNORE} into its labels where "
                    f"nothing is trained, and leave {key} out"
                )
        mask = feature.get("attention_mask")
        if mask is None:
            continue
        seen = np.asarray(mask)
        num_tokens = len(feature["input_ids"])
        if seen.shape != (num_tokens,) or not seen.all():
            raise ValueError(
                f"example {i} has {num_tokens} tokens and an attention_mask of shape {seen.shape} "
                f"with {int(np.count_nonzero(seen))} ones; tokenize without padding, which would "
                f"be trained as part of a document"
            )


def _column(features: Sequence[Feature], key: str) -> list[Any]:
    return [feature[key] for feature in features]


def _optional(features: Sequence[Feature], key: str) -> list[Any] | None:
    """The values of `key`, None if no example has it; ValueError if only some do."""
    has = [feature.get(key) is not None for feature in features]
    if not any(has):
        return None
    if not all(has):
        raise ValueError(
            f"example {has.index(True)} has {key}, example {has.index(False)} has not; give it for "
            f"every example or none"
        )
    return _column(features, key)


def _lengths(features: Sequence[Feature]) -> list[Any] | None:
    given = [key for key in LENGTH_KEYS if _optional(features, key) is not None]
    if len(given) > 1:
        raise ValueError(f"examples have {given[0]} and {given[1]}; give one of them")
    return _column(features, given[0]) if given else None


def _refuse_packed(features: Sequence[Feature], tokens: Sequence[Any]) -> None:
    """ValueError for a row of several documents, by its lengths or its position ids."""
    lengths, positions = _lengths(features), _optional(features, "position_ids")
    for i in range(len(tokens)):
        num = 1 if lengths is None else len(lengths[i])
        if positions is not None:
            num = max(num, int(np.count_nonzero(np.diff(np.asarray(positions[i])) != 1)) + 1)
        if num > 1:
            raise ValueError(
                f"example {i} is a packed row of {num} documents, which an attention mask cannot "
                f"keep apart; use PaddingFreeCollator"
            )
