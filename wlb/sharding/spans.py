"""From cut positions and their ranks to a ShardingPlan: shared by every strategy.

A strategy only says where the packed sequence is cut and which rank takes each chunk. Here chunks
are cut at piece boundaries, empty ones left out, neighbours on one rank merged (each span is a
kernel segment), and spans laid out rank-major.
"""

import numpy as np

from wlb.plan import IntArray, ShardingPlan, offsets_of


def from_chunks(
    lengths: IntArray,
    edges: IntArray,
    rank: IntArray,
    *,
    cp: int,
    strategy: str,
    is_aligned: bool = False,
) -> ShardingPlan:
    """Chunk i = tokens [edges[i], edges[i + 1]) of the packed sequence, on rank[i].

    lengths: tokens of each piece, shape [num_pieces]. edges: shape [m + 1], from 0 to the total,
    not decreasing. rank: shape [m]. is_aligned: no chunk reaches over the end of a piece.
    """
    offsets = offsets_of(lengths)
    if is_aligned:
        filled = np.flatnonzero(edges[1:] > edges[:-1])
        start, stop, owner = edges[filled], edges[filled + 1], rank[filled]
    else:
        cuts = np.unique(np.concatenate([edges, offsets]))
        start, stop = cuts[:-1], cuts[1:]
        owner = rank[np.searchsorted(edges, start, side="right") - 1]
    piece = np.searchsorted(offsets, start, side="right") - 1
    # int16 where it fits: NumPy sorts that by counting.
    order = np.argsort(owner.astype(np.int16 if cp < 2**15 else np.int64), kind="stable")
    start, stop, owner, piece = start[order], stop[order], owner[order], piece[order]
    joins = np.zeros(start.size, bool)
    joins[1:] = (owner[1:] == owner[:-1]) & (piece[1:] == piece[:-1]) & (start[1:] == stop[:-1])
    first = np.flatnonzero(~joins)
    last = np.append(first[1:], start.size) - 1
    piece, owner = piece[first], owner[first]
    return ShardingPlan(
        strategy=strategy,
        lengths=lengths,
        piece=piece,
        start=start[first] - offsets[piece],
        stop=stop[last[: first.size]] - offsets[piece],
        rank_offsets=np.searchsorted(owner, np.arange(cp + 1)),
        latency_ns=np.zeros(cp, np.int64),
    )


def check_arguments(lengths: IntArray, cp: int) -> None:
    if cp < 1:
        raise ValueError(f"cp = {cp} must be at least 1")
    bad = np.flatnonzero(lengths < 1)
    if bad.size:
        raise ValueError(f"piece {bad[0]} has {lengths[bad[0]]} tokens; it must have at least 1")
