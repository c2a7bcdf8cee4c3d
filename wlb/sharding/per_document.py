"""per_document: 2 * CP symmetric chunks of each document, without padding (Section 5.1).

Rank r takes chunks r and 2*CP-1-r of every document, so ranks get equal tokens and equal attention.
Deviations: a chunk has d // (2 * CP) tokens (e_i in the text lacks the factor); the d mod (2 * CP)
left-over tokens lengthen chunks by one, dealt to the ranks in turn across documents, so that ranks
differ by at most one token. `remainder="one_by_one"` deals them as the paper does, to compare with:
each is a kernel segment that costs a full tile. A short document leaves some chunks empty. Cost:
NumPy passes over num_pieces x 2*CP chunks.
"""

import numpy as np

from wlb.plan import IntArray, IntLike, ShardingPlan, ranges
from wlb.sharding.spans import RankedSpans, checked_lengths, from_spans
from wlb.spec import Remainder


def per_document(
    lengths: IntLike, *, cp: int, remainder: Remainder | str = Remainder.MERGED
) -> ShardingPlan:
    """Shard a micro-batch of pieces of `lengths` (shape [num_pieces], tokens) over `cp` ranks."""
    pieces = checked_lengths(lengths, cp)
    # A single rank gets all tokens, so that none have to be dealt.
    remainder = Remainder(remainder) if cp > 1 else Remainder.MERGED
    start, stop = document_chunks(pieces, cp, grows=remainder == Remainder.MERGED)
    # Spans are ordered by rank, then by piece, with the head chunk before the tail chunk.
    heads_tails = [np.stack([x[:, :cp], x[:, : cp - 1 : -1]], 2) for x in (start, stop)]
    begin, end = (x.transpose(1, 0, 2).ravel() for x in heads_tails)
    piece = np.tile(np.repeat(np.arange(pieces.size), 2), cp)
    rank = np.repeat(np.arange(cp), 2 * pieces.size)
    if remainder == Remainder.ONE_BY_ONE:
        over = pieces % (2 * cp)
        position = ranges(pieces - over, pieces)
        piece = np.concatenate([piece, np.repeat(np.arange(pieces.size), over)])
        begin, end = np.concatenate([begin, position]), np.concatenate([end, position + 1])
        rank = np.concatenate([rank, np.arange(position.size) % cp])
    spans = RankedSpans(piece, begin, end, rank)
    return from_spans(pieces, spans, cp=cp, strategy="per_document")


def document_chunks(lengths: IntArray, cp: int, *, grows: bool = True) -> tuple[IntArray, IntArray]:
    """Start and stop of the 2 * cp chunks of each document, shape [num_pieces, 2 * cp] each.

    grows: left-over tokens lengthen chunks, dealt to the ranks in turn across documents; otherwise
    they are left out (they lie at each document's end). Chunks r and 2 * cp - 1 - r are rank r's.
    """
    base, over = np.divmod(lengths, 2 * cp)
    if not grows:
        stop = base[:, None] * np.arange(1, 2 * cp + 1)
        return stop - base[:, None], stop
    # Left-over tokens are dealt to ranks in turn, from the rank after the one that got the previous
    # document's last. A rank's first such token goes to its head chunk, its second to its tail
    # chunk.
    first = (np.cumsum(over) - over) % cp
    turn = (np.arange(cp) - first[:, None]) % cp
    served = np.concatenate([turn, turn[:, ::-1] + cp], 1)
    sizes = base[:, None] + (served < over[:, None])
    stop = np.cumsum(sizes, 1)
    return stop - sizes, stop
