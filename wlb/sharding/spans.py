"""From spans and their ranks to a ShardingPlan: shared by every strategy.

A strategy only says which tokens go to which rank. Here empty spans are left out, neighbours on one
rank merged (each span is a kernel segment), and spans laid out rank-major.
"""

import numpy as np

from wlb.plan import IntArray, ShardingPlan, UserError, offsets_of


def from_spans(
    lengths: IntArray,
    *,
    piece: IntArray,
    start: IntArray,
    stop: IntArray,
    rank: IntArray,
    cp: int,
    strategy: str,
) -> ShardingPlan:
    """Span i = tokens [start[i], stop[i]) of piece[i], on rank[i]; all of shape [m].

    Spans of a rank keep their order; neighbours in it that join are merged.
    """
    if rank.size > 1 and (rank[1:] < rank[:-1]).any():
        # int16 where it fits: NumPy sorts that by counting.
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


def cut_sequence(
    lengths: IntArray, edges: IntArray, rank: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(piece, start, stop, rank) of the spans that chunks of a packed sequence come to.

    lengths: tokens of each piece in the sequence's order, shape [num_pieces]. Chunk i = tokens
    [edges[i], edges[i + 1]) of the sequence, on rank[i]; edges go from 0 to the total, not down.
    """
    offsets = offsets_of(lengths)
    cuts = np.unique(np.concatenate([edges, offsets]))
    start, stop = cuts[:-1], cuts[1:]
    owner = rank[np.searchsorted(edges, start, side="right") - 1]
    piece = np.searchsorted(offsets, start, side="right") - 1
    return piece, start - offsets[piece], stop - offsets[piece], owner


def check_arguments(lengths: IntArray, cp: int) -> None:
    if cp < 1:
        raise UserError(f"cp = {cp} must be at least 1")
    bad = np.flatnonzero(lengths < 1)
    if bad.size:
        raise UserError(f"piece {bad[0]} has {lengths[bad[0]]} tokens; it must have at least 1")
