"""Batches out of plans: what one rank feeds to its model, and collators for other loops."""

from wlb.collate.boundaries import (
    MAX_MASK_BYTES,
    block_mask,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    position_ids_from_lengths,
)
from wlb.collate.collators import PaddedCollator, PaddingFreeCollator
from wlb.collate.flat import (
    FlatBatch,
    FlatOptions,
    flatten,
    flatten_buffer,
    flatten_micro_batch,
)
from wlb.collate.padded import PaddedBatch, PadOptions, PadTo, Side, pad
from wlb.collate.rows import (
    IGNORE,
    AttentionRows,
    LabelReader,
    TokenReader,
    attention_rows,
    rank_labels,
    rank_tokens,
)

__all__ = [
    "IGNORE",
    "MAX_MASK_BYTES",
    "AttentionRows",
    "FlatBatch",
    "FlatOptions",
    "LabelReader",
    "PadOptions",
    "PadTo",
    "PaddedBatch",
    "PaddedCollator",
    "PaddingFreeCollator",
    "Side",
    "TokenReader",
    "attention_rows",
    "block_mask",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids",
    "flatten",
    "flatten_buffer",
    "flatten_micro_batch",
    "lengths_from_cu_seqlens",
    "lengths_from_position_ids",
    "pad",
    "position_ids_from_lengths",
    "rank_labels",
    "rank_tokens",
]
