"""Collators that turn documents into packed or padded batches, for any training loop."""

from wlb.adapters.collate.boundaries import MAX_MASK_BYTES as MAX_MASK_BYTES
from wlb.adapters.collate.boundaries import block_mask as block_mask
from wlb.adapters.collate.boundaries import cu_seqlens_from_lengths as cu_seqlens_from_lengths
from wlb.adapters.collate.boundaries import (
    cu_seqlens_from_position_ids as cu_seqlens_from_position_ids,
)
from wlb.adapters.collate.boundaries import lengths_from_cu_seqlens as lengths_from_cu_seqlens
from wlb.adapters.collate.boundaries import lengths_from_position_ids as lengths_from_position_ids
from wlb.adapters.collate.boundaries import position_ids_from_lengths as position_ids_from_lengths
from wlb.adapters.collate.collators import PaddedCollator as PaddedCollator
from wlb.adapters.collate.collators import PaddingFreeCollator as PaddingFreeCollator
from wlb.adapters.collate.flat import FlatBatch as FlatBatch
from wlb.adapters.collate.flat import FlatOptions as FlatOptions
from wlb.adapters.collate.flat import flatten as flatten
from wlb.adapters.collate.flat import flatten_buffer as flatten_buffer
from wlb.adapters.collate.flat import flatten_micro_batch as flatten_micro_batch
from wlb.adapters.collate.padded import PaddedBatch as PaddedBatch
from wlb.adapters.collate.padded import PadOptions as PadOptions
from wlb.adapters.collate.padded import PadTo as PadTo
from wlb.adapters.collate.padded import Side as Side
from wlb.adapters.collate.padded import pad as pad
