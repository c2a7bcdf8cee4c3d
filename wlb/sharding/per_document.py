"""per_document: 2 * CP symmetric chunks of each document, without padding (Section 5.1).

Rank r takes chunks r and 2*CP-1-r of every document, so ranks get equal tokens and equal attention
work. Deviations from the paper:
- e_i lacks a factor 2*CP in the text; a document of d tokens has 2*CP chunks of d // (2*CP) tokens
  and d mod (2*CP) tokens over.
- Tokens over are not dealt one by one (each would be a kernel segment that costs a full tile): they
  make chunks one token longer, still contiguous. Which rank gets them goes round from document to
  document, so that over the micro-batch ranks differ by at most one token whatever the lengths; the
  paper's claim that their sum divides by 2*CP does not hold for variable-length micro-batches.
- A document shorter than 2*CP tokens leaves some chunks empty.

Cost: NumPy passes over num_pieces x 2*CP chunks.
"""

import numpy as np

from wlb.plan import IntLike, ShardingPlan, int_array, offsets_of
from wlb.sharding.per_sequence import head_tail_ranks
from wlb.sharding.spans import check_arguments, from_chunks

STRATEGY = "per_document"


def per_document(lengths: IntLike, *, cp: int) -> ShardingPlan:
    """Shard a micro-batch of pieces of `lengths` (shape [num_pieces], tokens) over `cp` ranks."""
    pieces = int_array("lengths", lengths)
    check_arguments(pieces, cp)
    ranks = head_tail_ranks(cp)
    base, over = np.divmod(pieces, 2 * cp)
    # 1. The turn of each rank: tokens over are dealt round the ranks, going on where the document
    #    before stopped. turn[i, r] = how many ranks are served before r in document i.
    first = (np.cumsum(over) - over) % cp
    turn = (np.arange(cp) - first[:, None]) % cp
    # 2. A rank's first extra token goes to its head chunk, its second to its tail chunk.
    served = turn[:, ranks] + np.where(np.arange(2 * cp) < cp, 0, cp)
    sizes = base[:, None] + (served < over[:, None])
    # 3. Chunks of all documents, one after the other.
    edges = offsets_of(sizes.ravel())
    owners = np.tile(ranks, pieces.size)
    return from_chunks(pieces, edges, owners, cp=cp, strategy=STRATEGY, is_aligned=True)
