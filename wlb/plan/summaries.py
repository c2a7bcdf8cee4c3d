"""Which summaries of linear layers CP ranks send each other, where a document is cut.

A linear or recurrent layer needs, at the first token of a span, the state of all that is before
it. Each rank computes its spans from a zero state. The summary of a span that is cut says how it
changes a state, and which state it ends with from zero. It goes to the ranks that hold later spans
of the document, which compose the summaries before them, in order. A document on one rank needs
none.
"""

import numpy as np

from wlb.plan.arrays import IntArray
from wlb.plan.sharding import ShardingPlan


def runs_of_spans(plan: ShardingPlan) -> tuple[IntArray, IntArray, IntArray]:
    """Runs of a piece's spans on one rank that follow each other without a gap.

    Returns:
        Piece, number within its piece from the first token on, and rank of each run, by piece and
        place; shape [num_runs] each.
    """
    rank = np.repeat(np.arange(plan.cp), np.diff(plan.rank_offsets))
    used = plan.stop > plan.start
    order = np.lexsort((plan.start[used], plan.piece[used]))
    piece, rank = plan.piece[used][order], rank[used][order]
    begins = np.ones(piece.size, bool)
    begins[1:] = (piece[1:] != piece[:-1]) | (rank[1:] != rank[:-1])
    piece, rank = piece[begins], rank[begins]
    first = np.searchsorted(piece, piece, side="left")
    return piece, np.arange(piece.size) - first, rank


def summaries_made(plan: ShardingPlan) -> IntArray:
    """Summaries that each rank makes: of its runs that a document goes on behind, shape [cp]."""
    piece, _, rank = runs_of_spans(plan)
    goes_on = np.append(piece[1:] == piece[:-1], np.zeros(min(1, piece.size), bool))
    return np.bincount(rank[goes_on], minlength=plan.cp).astype(np.int64)


def summaries_moved(plan: ShardingPlan) -> IntArray:
    """Summaries that rank i receives of rank j, shape [cp, cp]; the diagonal is 0.

    A rank receives the summaries of all runs of a document before its own last one, less those that
    it made itself.
    """
    piece, place, rank = runs_of_spans(plan)
    moved = np.zeros((plan.cp, plan.cp), np.int64)
    if not piece.size:
        return moved
    # The last place of each rank in each piece, -1 where it has none of it.
    last = np.full((int(piece.max()) + 1, plan.cp), -1, np.int64)
    np.maximum.at(last, (piece, rank), place)
    needs = last[piece] > place[:, None]  # [num_runs, cp]: whether a rank reads a run's summary
    needs[np.arange(piece.size), rank] = False
    np.add.at(moved.T, rank, needs.astype(np.int64))
    return moved
