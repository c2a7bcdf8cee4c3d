"""Which linear-attention states CP ranks send each other for documents that lie on several ranks.

A linear-attention or recurrent layer needs, at the first token of a span, the state after all
earlier tokens of the document. Each rank first computes its spans from a zero state. The result is
a summary of each span: its final state when it starts from zero, and the linear map that it applies
to any other initial state. A rank with a later span of the document receives the summaries of the
earlier spans and applies them in order to a zero state:

    rank 0, span A: summary of A --+--> rank 1, span B: initial state = A(0)
                                   +--> rank 2, span C: initial state = B(A(0))
    rank 1, span B: summary of B --+

A document that lies on one rank needs no exchange.
"""

from typing import NamedTuple

import numpy as np

from wlb.plan.arrays import IntArray, offsets_of
from wlb.plan.sharding import ShardingPlan, ranges


def runs_of_spans(plan: ShardingPlan) -> tuple[IntArray, IntArray, IntArray]:
    """Join spans of a piece that are consecutive and on the same rank into runs.

    Args:
        plan: How the micro-batch is divided over CP ranks.

    Returns:
        For each run the number of its piece, its number within the piece (from 0, in order of
        tokens), and its rank. The arrays have shape [num_runs], sorted by piece and number.
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
    """Return how many summaries each rank makes, shape [cp].

    Consecutive spans of a piece on one rank form a run (`runs_of_spans`). A rank makes one summary
    for each of its runs, except for the last run of a piece.
    """
    piece, _, rank = runs_of_spans(plan)
    has_later = np.append(piece[1:] == piece[:-1], np.zeros(min(1, piece.size), bool))
    return np.bincount(rank[has_later], minlength=plan.cp).astype(np.int64)


def summaries_moved(plan: ShardingPlan) -> IntArray:
    """Return how many summaries rank i receives from rank j, as an array [i, j] of shape [cp, cp].

    Consecutive spans of a piece on one rank form a run (`runs_of_spans`). If a rank has runs of a
    piece, it receives the summaries of all runs of other ranks that precede its last run. The
    diagonal is zero.
    """
    piece, place, rank = runs_of_spans(plan)
    moved = np.zeros((plan.cp, plan.cp), np.int64)
    if not piece.size:
        return moved
    # For each piece and rank, the number of the rank's last run (consecutive spans) in the piece;
    # -1 if the rank has no run in it.
    last = np.full((int(piece.max()) + 1, plan.cp), -1, np.int64)
    np.maximum.at(last, (piece, rank), place)
    # For each run of spans and each rank: whether the rank reads the run's summary.
    needs = last[piece] > place[:, None]
    needs[np.arange(piece.size), rank] = False
    np.add.at(moved.T, rank, needs.astype(np.int64))
    return moved


class RowsOf(NamedTuple):
    """One rank's part of an all-to-all of rows, and which rows each of the rank's spans reads.

    A row belongs to one token, or is the summary of one span. After the all-to-all, the rank
    concatenates its local rows `kept` and the rows that it received, which are in the order of the
    sending ranks. `found` has indices into this concatenation.
    """

    # indices of the local rows that at least one rank reads, ascending, shape [num_kept]
    kept: IntArray
    # indices into `kept` of the rows to send, sorted by receiving rank, shape [num_sent]
    sent: IntArray
    splits: IntArray  # number of rows to send to each rank, shape [cp]
    received: IntArray  # number of rows to receive from each rank, shape [cp]
    # for each of the rank's S spans, the rows that it reads, shape [S, width]: indices into the
    # concatenation, padded with -1
    found: IntArray


class RankSummaries(NamedTuple):
    """What one rank sends and receives for the linear-attention layers in a micro-batch.

    Spans that are consecutive in the rank's rows and also in their document count as one span here.
    """

    lengths: IntArray  # tokens of each span of the rank, shape [S]
    # exchange of the last few tokens before each span, which the layer's short convolution reads;
    # the earliest token is first
    latest: RowsOf
    # exchange of the summaries of all earlier spans of each span's document, in order of tokens
    before: RowsOf


def rank_summaries(plan: ShardingPlan, rank: int, *, latest: int) -> RankSummaries:
    """Return what a rank sends and receives for the linear-attention layers in a micro-batch.

    Args:
        plan: How the micro-batch is divided over CP ranks.
        rank: Number of the CP rank.
        latest: How many tokens before a span the layer's short convolution reads.
    """
    # 1. List all spans by rank and row, and join those that are neighbours in their document.
    of_rank = np.repeat(np.arange(plan.cp), np.diff(plan.rank_offsets))
    piece, start, stop = plan.piece, plan.start, plan.stop
    begins = np.ones(piece.size, bool)
    begins[1:] = (
        (piece[1:] != piece[:-1]) | (start[1:] != stop[:-1]) | (of_rank[1:] != of_rank[:-1])
    )
    ends = np.append(begins[1:], np.ones(min(1, piece.size), bool))
    piece, of_rank, start, stop = piece[begins], of_rank[begins], start[begins], stop[ends]
    used = stop > start
    piece, of_rank, start, stop = piece[used], of_rank[used], start[used], stop[used]
    size = stop - start
    first_of_rank = np.searchsorted(of_rank, np.arange(plan.cp + 1))
    number = np.arange(size.size) - first_of_rank[of_rank]
    rows = offsets_of(size)
    first_row = rows[:-1] - rows[first_of_rank[of_rank]]
    lengths = size[first_of_rank[rank] : first_of_rank[rank + 1]]

    # 2. Order the same spans by document and token.
    order = np.lexsort((start, piece))
    piece, start, of_rank, number, first_row = (
        x[order] for x in (piece, start, of_rank, number, first_row)
    )
    first = np.searchsorted(piece, piece, side="left")
    place = np.arange(piece.size) - first
    readers = _Readers(plan.cp, rank, of_rank, number)

    # 3. Each span reads the summaries of all earlier spans of its document.
    reader = np.repeat(np.arange(piece.size), place)
    read = ranges(first, np.arange(piece.size))
    before = readers.rows(reader, place[read], of_rank[read], number[read])

    # 4. Each span also reads the rows of the tokens just before its first token, `latest` in
    # number. They may lie in several spans.
    token = start[:, None] - np.arange(latest, 0, -1)
    reader, slot = np.nonzero(token >= 0)
    token = token[reader, slot]
    long = int(plan.lengths.max(initial=0)) + 1
    holder = np.searchsorted(piece * long + start, piece[reader] * long + token, side="right") - 1
    row = first_row[holder] + token - start[holder]
    rows_before = readers.rows(reader, slot, of_rank[holder], row, width=latest)
    return RankSummaries(lengths, rows_before, before)


class _Readers(NamedTuple):
    """All spans of a micro-batch; `rows` finds which rows one rank sends and receives for them."""

    cp: int  # number of CP ranks
    rank: int  # the CP rank whose sent and received rows `rows` finds
    of_rank: IntArray  # rank of each span, shape [num_spans]
    number: IntArray  # number of each span among the spans of its rank, shape [num_spans]

    def rows(
        self,
        reader: IntArray,
        slot: IntArray,
        holder: IntArray,
        row: IntArray,
        *,
        width: int | None = None,
    ) -> RowsOf:
        """Return the rank's part of an all-to-all, given which span reads which row.

        Entry i of the four arrays means that span `reader[i]` reads row `row[i]` of rank
        `holder[i]`.

        Args:
            reader: Number of the span that reads.
            slot: Column of `RowsOf.found` in which the index of the row is stored for the span.
            holder: Rank that has the row.
            row: Number of the row on that rank.
            width: Number of columns of `RowsOf.found`. None means as few as the rank's spans need.
        """
        reading = self.of_rank[reader]
        travels = reading != holder
        # Send a row to a rank only once, even if several of the rank's spans read the row.
        most = int(row.max(initial=0)) + 1
        key = (reading * self.cp + holder) * most + row
        moved = np.unique(key[travels])
        to, by = np.divmod(moved // most, self.cp)
        # `moved` is sorted by receiving rank, sending rank and row.
        splits = np.bincount(to[by == self.rank], minlength=self.cp)
        arrived = moved[to == self.rank]
        received = np.bincount(by[to == self.rank], minlength=self.cp)
        kept = np.unique(row[holder == self.rank])
        sent = np.searchsorted(kept, moved[by == self.rank] % most)
        mine = reading == self.rank
        num_spans = int((self.of_rank == self.rank).sum())
        if width is None:
            width = int(slot[mine].max(initial=-1)) + 1
        found = np.full((num_spans, width), -1, np.int64)
        own = np.searchsorted(kept, row[mine])
        at = np.where(travels[mine], kept.size + np.searchsorted(arrived, key[mine]), own)
        found[self.number[reader[mine]], slot[mine]] = at
        return RowsOf(kept, sent, splits, received, found)
