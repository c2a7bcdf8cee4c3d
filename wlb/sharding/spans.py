"""From spans and their ranks to a ShardingPlan: shared by every strategy.

A strategy only assigns tokens to ranks. Here empty spans are left out, neighbours on one rank
merged (each span is a kernel segment), and spans laid out rank-major.
"""

from typing import NamedTuple

import numpy as np

from wlb.plan import (
    IntArray,
    IntLike,
    ShardingPlan,
    UserError,
    check_at_least,
    int_array,
    offsets_of,
)
from wlb.plan.arrays import distinct, first_true


class RankedSpans(NamedTuple):
    """Span i = tokens [start[i], stop[i]) of piece[i], on rank[i]; all of shape [num_spans]."""

    piece: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray


def from_spans(lengths: IntArray, spans: RankedSpans, *, cp: int, strategy: str) -> ShardingPlan:
    """The plan of these spans of pieces of `lengths` tokens.

    Spans of a rank keep their order; neighbours in it that join are merged.
    """
    piece, start, stop, rank = spans
    if rank.size > 1 and (rank[1:] < rank[:-1]).any():
        # NumPy sorts int16 by counting, so ranks are cast to int16 if they fit.
        order = np.argsort(rank.astype(np.int16 if cp < 2**15 else np.int64), kind="stable")
        piece, start, stop, rank = piece[order], start[order], stop[order], rank[order]
    if (filled := stop > start).sum() < start.size:
        piece, start, stop, rank = piece[filled], start[filled], stop[filled], rank[filled]
    joins = np.zeros(start.size, bool)
    joins[1:] = (start[1:] == stop[:-1]) & (piece[1:] == piece[:-1]) & (rank[1:] == rank[:-1])
    first = np.flatnonzero(~joins)
    last = np.append(first[1:], start.size) - 1
    rank = rank[first]
    return ShardingPlan(
        strategy=strategy,
        lengths=lengths,
        piece=piece[first],
        start=start[first],
        stop=stop[last[: first.size]],
        rank_offsets=np.searchsorted(rank, np.arange(cp + 1)),
    )


def cut_sequence(lengths: IntArray, edges: IntArray, rank: IntArray) -> RankedSpans:
    """The spans that chunks of a packed sequence come to.

    lengths: tokens of each piece in the sequence's order, shape [num_pieces]. Chunk i = tokens
    [edges[i], edges[i + 1]) of the sequence, on rank[i]; edges go from 0 to the total, not down.
    """
    offsets = offsets_of(lengths)
    cuts = distinct(np.concatenate([edges, offsets]))
    start, stop = cuts[:-1], cuts[1:]
    owner = rank[np.searchsorted(edges, start, side="right") - 1]
    piece = np.searchsorted(offsets, start, side="right") - 1
    return RankedSpans(piece, start - offsets[piece], stop - offsets[piece], owner)


def checked_lengths(values: IntLike, cp: int) -> IntArray:
    """Lengths of a micro-batch's pieces; UserError for one without tokens, and for cp below 1."""
    lengths = int_array("lengths", values)
    check_at_least("cp", cp, 1)
    if (bad := first_true(lengths < 1)) is not None:
        raise UserError(f"piece {bad} has {lengths[bad]} tokens; it must have at least 1")
    return lengths
