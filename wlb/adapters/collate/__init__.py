"""Collators for other training loops: packed or padded batches out of documents."""

from wlb.adapters.collate.boundaries import (
    MAX_MASK_BYTES,
    block_mask,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    position_ids_from_lengths,
)
from wlb.adapters.collate.collators import PaddedCollator, PaddingFreeCollator
from wlb.adapters.collate.flat import (
    FlatBatch,
    FlatOptions,
    flatten,
    flatten_buffer,
    flatten_micro_batch,
)
from wlb.adapters.collate.padded import PaddedBatch, PadOptions, PadTo, Side, pad

__all__ = [
    "MAX_MASK_BYTES",
    "FlatBatch",
    "FlatOptions",
    "PadOptions",
    "PadTo",
    "PaddedBatch",
    "PaddedCollator",
    "PaddingFreeCollator",
    "Side",
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
]
