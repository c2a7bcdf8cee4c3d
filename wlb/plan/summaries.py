"""Which linear-attention states CP ranks send each other for documents that lie on several ranks.

A linear-attention or recurrent layer needs, at the first token of a span, the state of all tokens
before it. Each rank computes its spans from a zero state. The summary of a span then says how the
span changes any state, and which state it ends with from zero:

    rank 0, span A: summary of A --+--> rank 1, span B: state before B = A from zero
                                   +--> rank 2, span C: state before C = A, then B, from zero
    rank 1, span B: summary of B --+

A rank with later spans of the document composes the summaries before them, in order. A document on
one rank needs no exchange.
"""

from typing import NamedTuple

import numpy as np

from wlb.plan.arrays import IntArray, offsets_of
from wlb.plan.sharding import ShardingPlan, ranges


def runs_of_spans(plan: ShardingPlan) -> tuple[IntArray, IntArray, IntArray]:
    """Join neighbouring spans of a piece on one rank into runs.

    Returns:
        Piece of each run, its number within the piece (from 0, in order of tokens), and its rank;
        shape [num_runs] each, sorted by piece and number.
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
    """Return how many summaries each rank makes: one for each run with a later one; shape [cp]."""
    piece, _, rank = runs_of_spans(plan)
    goes_on = np.append(piece[1:] == piece[:-1], np.zeros(min(1, piece.size), bool))
    return np.bincount(rank[goes_on], minlength=plan.cp).astype(np.int64)


def summaries_moved(plan: ShardingPlan) -> IntArray:
    """Return the summaries that rank i receives from rank j, shape [cp, cp]; the diagonal is zero.

    A rank receives the summaries of all runs of a document before its last run in it, except those
    that it made itself.
    """
    piece, place, rank = runs_of_spans(plan)
    moved = np.zeros((plan.cp, plan.cp), np.int64)
    if not piece.size:
        return moved
    # The number of each rank's last run in each piece; -1 if it has none.
    last = np.full((int(piece.max()) + 1, plan.cp), -1, np.int64)
    np.maximum.at(last, (piece, rank), place)
    needs = last[piece] > place[:, None]  # [num_runs, cp]: whether a rank reads a run's summary
    needs[np.arange(piece.size), rank] = False
    np.add.at(moved.T, rank, needs.astype(np.int64))
    return moved


class RowsOf(NamedTuple):
    """The rows that one rank reads of itself and of others in an all-to-all, and for which span.

    Spans index a pool of rows: first the rank's local rows that any rank reads, then the received
    rows, in the order of the sending ranks.
    """

    kept: IntArray  # local rows that any rank reads, in order; shape [N]
    sent: IntArray  # places in `kept` of the rows to send, by receiving rank; shape [M]
    splits: IntArray  # rows to send to each rank, shape [cp]
    received: IntArray  # rows to receive from each rank, shape [cp]
    # for each span, places in the pool of the rows that it reads; unused places are -1; shape [S,
    # columns]
    found: IntArray


class RankSummaries(NamedTuple):
    """One rank's part of the exchanges that linear-attention layers need in a micro-batch.

    Spans that are neighbours both in the rank's rows and in their document are one span here.
    """

    lengths: IntArray  # tokens of each span, shape [S]
    latest: RowsOf  # rows of the latest tokens before each span, the oldest first
    before: RowsOf  # summaries of all spans of the document before each span, in order


def rank_summaries(plan: ShardingPlan, rank: int, *, latest: int) -> RankSummaries:
    """Return what a rank sends and receives for linear-attention layers.

    Args:
        plan: Spans of the micro-batch on all ranks.
        rank: The rank.
        latest: Tokens before a span that the layer's short convolution reads.
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

    # 4. Each span also reads the latest tokens before its first one. They may lie in several spans.
    token = start[:, None] - np.arange(latest, 0, -1)
    reader, slot = np.nonzero(token >= 0)
    token = token[reader, slot]
    long = int(plan.lengths.max(initial=0)) + 1
    holder = np.searchsorted(piece * long + start, piece[reader] * long + token, side="right") - 1
    row = first_row[holder] + token - start[holder]
    rows_before = readers.rows(reader, slot, of_rank[holder], row, width=latest)
    return RankSummaries(lengths, rows_before, before)


class _Readers(NamedTuple):
    """Spans of all ranks, which read rows of each other."""

    cp: int
    rank: int  # rank for which `RowsOf` is made
    of_rank: IntArray  # rank of each span
    number: IntArray  # number of each span on its rank

    def rows(
        self,
        reader: IntArray,
        slot: IntArray,
        holder: IntArray,
        row: IntArray,
        *,
        width: int | None = None,
    ) -> RowsOf:
        """Return one rank's part of an exchange in which spans read rows.

        All arguments except `width` have one entry for each access of a span to a row.

        Args:
            reader: Span that reads.
            slot: Column of `RowsOf.found` in which the span looks for the row.
            holder: Rank that has the row.
            row: Number of the row on that rank.
            width: Columns of `RowsOf.found`; None means as many as the rank's spans use.
        """
        reading = self.of_rank[reader]
        travels = reading != holder
        # A row is sent to a rank once, however many of its spans read it.
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
