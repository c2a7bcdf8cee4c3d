"""per_sequence: 2 * CP symmetric chunks of the packed sequence (Section 3.1; Llama 3's sharding).

Rank r takes chunks r and 2*CP-1-r. Balanced for one document; documents packed together can leave
a rank with much more attention work. Chunks differ by at most one token (the paper pads to a
multiple; here any total works): the first (S mod 2*CP) chunks are longer, so ranks' tokens differ
by at most one. Cost: a few NumPy passes over pieces.
"""

import numpy as np

from wlb.plan import IntArray, IntLike, ShardingPlan, offsets_of
from wlb.sharding.spans import checked_lengths, cut_sequence, from_spans


def per_sequence(lengths: IntLike, *, cp: int) -> ShardingPlan:
    """Shard a micro-batch of pieces of `lengths` (shape [num_pieces], tokens) over `cp` ranks."""
    pieces = checked_lengths(lengths, cp)
    base, extra = divmod(int(pieces.sum()), 2 * cp)
    edges = offsets_of(base + (np.arange(2 * cp) < extra))
    spans = cut_sequence(pieces, edges, head_tail_ranks(cp))
    return from_spans(pieces, spans, cp=cp, strategy="per_sequence")


def head_tail_ranks(cp: int) -> IntArray:
    """Rank of each of 2 * cp chunks: 0, 1, ..., cp-1, cp-1, ..., 1, 0."""
    up = np.arange(cp, dtype=np.int64)
    return np.concatenate([up, up[::-1]])
