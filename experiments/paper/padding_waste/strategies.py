"""Counts the positions that a model computes if a corpus is padded or packed into rows.

A document longer than a row is split into pieces, so that no token is lost. Only
`Strategy.TRUNCATED` drops the rest of a long document, as the article's function does.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from experiments.paper.packing_methods.counting import padded
from wlb.cost import causal_pairs
from wlb.packing import BinMethod, pack_bins
from wlb.plan import Documents, IntArray, split_long

BATCH = 32
"""Documents that batch padding pads to the longest of them.

The article gives no number; its loader takes 4.
"""
QUANTUM = 128
"""Rows of variable length are filled to a multiple of this, which suits FP8 and GEMM tiles."""


class Strategy(StrEnum):
    """Ways to put documents into rows."""

    TRUNCATED = "a row each, cut at the row"
    ROW_EACH = "a row each"
    BATCH_PADDING = f"padded to the longest of {BATCH}"
    SORTED_BATCH_PADDING = f"sorted, padded to the longest of {BATCH}"
    NEXT_FIT = "next fit"
    NEXT_FIT_SORTED = "next fit, shortest first"
    STREAM = "stream cut at row ends"
    FIRST_FIT_DECREASING = "first fit decreasing"
    BEST_FIT_DECREASING = "best fit decreasing"
    VARIABLE_QUANTUM = f"next fit, rows of variable length, filled to {QUANTUM}"
    VARIABLE = "next fit, rows of variable length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Counts of a corpus in rows."""

    rows: int
    tokens: int  # document tokens in all rows
    positions: int  # positions that the model computes, including padding
    # Query-key pairs that causal attention computes. In a padded row they are all pairs of the row;
    # in a packed row only pairs within a piece, where padding at the end counts as a piece.
    pairs: int
    num_split: int  # documents longer than a row
    num_cut: int = 0  # other documents that are in more than one row
    lost: int = 0  # tokens that are in no row

    @property
    def utilisation(self) -> float:
        return self.tokens / self.positions

    @property
    def waste(self) -> float:
        return 1 - self.utilisation


def fill(strategy: Strategy, lengths: IntArray, *, row: int) -> Filled:
    """Counts a corpus in rows under a strategy.

    Args:
        strategy: How documents are put into rows.
        lengths: Tokens of each document, in the order in which they are read, shape [n].
        row: Tokens of a row.
    """
    num_split = int((lengths > row).sum())
    match strategy:
        case Strategy.TRUNCATED:
            truncated = np.minimum(lengths, row)
            made = _row_each(truncated, row, num_split)
            return replace(made, lost=int((lengths - truncated).sum()))
        case Strategy.STREAM:
            return _stream(lengths, row, num_split)
        case _:
            return _of_pieces(strategy, pieces_of(lengths, row), row, num_split)


def pieces_of(lengths: IntArray, row: int) -> IntArray:
    """Splits documents longer than a row every `row` tokens and returns all lengths in order."""
    documents = Documents.from_lengths(lengths)
    return split_long(documents, window=row, long_documents="split").length


def _of_pieces(strategy: Strategy, pieces: IntArray, row: int, num_split: int) -> Filled:
    match strategy:
        case Strategy.ROW_EACH:
            return _row_each(pieces, row, num_split)
        case Strategy.BATCH_PADDING:
            return _batches(pieces, row, num_split)
        case Strategy.SORTED_BATCH_PADDING:
            return _batches(np.sort(pieces), row, num_split)
        case Strategy.NEXT_FIT:
            return _packed(pieces, row, num_split, method=BinMethod.NEXT_FIT)
        case Strategy.NEXT_FIT_SORTED:
            return _packed(np.sort(pieces), row, num_split, method=BinMethod.NEXT_FIT)
        case Strategy.FIRST_FIT_DECREASING:
            return _packed(pieces, row, num_split, method=BinMethod.FIRST_FIT_DECREASING)
        case Strategy.BEST_FIT_DECREASING:
            return _packed(pieces, row, num_split, method=BinMethod.BEST_FIT_DECREASING)
        case Strategy.VARIABLE:
            return _packed(pieces, row, num_split, method=BinMethod.NEXT_FIT, quantum=1)
        case Strategy.VARIABLE_QUANTUM:
            return _packed(pieces, row, num_split, method=BinMethod.NEXT_FIT, quantum=QUANTUM)
        case _:
            raise ValueError(f"{strategy!r} does not take pieces")


def _row_each(pieces: IntArray, row: int, num_split: int) -> Filled:
    return Filled(
        rows=pieces.size,
        tokens=int(pieces.sum()),
        positions=pieces.size * row,
        pairs=pieces.size * row * (row + 1) // 2,
        num_split=num_split,
    )


def _batches(pieces: IntArray, row: int, num_split: int) -> Filled:
    made = padded(pieces, bs=BATCH, msl=row)
    starts = np.arange(0, pieces.size, BATCH)
    widths = np.maximum.reduceat(pieces, starts)
    sizes = np.diff(starts, append=pieces.size)
    return Filled(
        rows=made.rows,
        tokens=made.tokens,
        positions=made.positions,
        pairs=int((causal_pairs(widths, widths) * sizes).sum()),
        num_split=num_split,
    )


def _packed(
    pieces: IntArray, row: int, num_split: int, *, method: BinMethod, quantum: int | None = None
) -> Filled:
    """Counts whole pieces that are packed into rows.

    Args:
        pieces: Tokens of each piece, at most a row.
        row: Tokens of a row.
        num_split: Documents longer than a row.
        method: Bin packing method.
        quantum: Multiple to which each row is filled. None: rows are filled to `row` tokens.
    """
    tokens = pack_bins(pieces, row, method=method).tokens
    width = np.full_like(tokens, row) if quantum is None else -(-tokens // quantum) * quantum
    filler = width - tokens
    return Filled(
        rows=tokens.size,
        tokens=int(tokens.sum()),
        positions=int(width.sum()),
        pairs=int(causal_pairs(pieces, pieces).sum() + causal_pairs(filler, filler).sum()),
        num_split=num_split,
    )


def _stream(lengths: IntArray, row: int, num_split: int) -> Filled:
    """Counts documents that are joined and cut every `row` tokens; the last row is padded."""
    ends = np.cumsum(lengths)
    tokens = int(ends[-1])
    rows = -(-tokens // row)
    edges = np.union1d(np.append(0, ends), np.arange(row, rows * row + 1, row))
    pieces = np.diff(edges)
    is_cut = (ends - lengths) // row != (ends - 1) // row
    return Filled(
        rows=rows,
        tokens=tokens,
        positions=rows * row,
        pairs=int(causal_pairs(pieces, pieces).sum()),
        num_split=num_split,
        num_cut=int((is_cut & (lengths <= row)).sum()),
    )
