"""Batches out of plans: what one rank feeds to its model."""

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
    "AttentionRows",
    "LabelReader",
    "TokenReader",
    "attention_rows",
    "rank_labels",
    "rank_tokens",
]
