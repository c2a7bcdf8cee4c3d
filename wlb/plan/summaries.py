"""Which summaries of linear layers CP ranks send each other, where a document is cut.

A linear or recurrent layer needs, at the first token of a span, the state of all that is before
it. Each rank computes its spans from a zero state. The summary of a span that is cut says how it
changes a state, and which state it ends with from zero. It goes to the ranks that hold later spans
of the document, which compose the summaries before them, in order. A document on one rank needs
none.
"""

from typing import NamedTuple

import numpy as np

from wlb.plan.arrays import IntArray, offsets_of
from wlb.plan.sharding import ShardingPlan, ranges


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


class RowsOf(NamedTuple):
    """Which rows one rank reads of itself and of others in an all-to-all, and for which span.

    A span finds its rows in a pool: the rank's own rows that anyone reads, then those that arrive,
    ranks in order.
    """

    kept: IntArray  # own rows that are read, by spans here or elsewhere, in order; shape [N]
    sent: IntArray  # rows of `kept` that travel, by receiving rank, shape [M]
    splits: IntArray  # rows that go to each rank, shape [cp]
    received: IntArray  # rows that come from each rank, shape [cp]
    found: IntArray  # of each span, places in the pool, -1 where nothing is; shape [S, columns]


class RankSummaries(NamedTuple):
    """One rank's part of the exchanges that linear layers need in a micro-batch.

    Spans follow each other in the rank's rows. Spans of the plan that do so in their document too
    are one here.
    """

    lengths: IntArray  # tokens of each span, shape [S]
    latest: RowsOf  # rows of the latest tokens before each span, the oldest first
    before: RowsOf  # summaries of all spans of the document before each span, the first one first


def rank_summaries(plan: ShardingPlan, rank: int, *, latest: int) -> RankSummaries:
    """What a rank sends and receives for linear layers.

    Args:
        plan: Spans of the micro-batch on all ranks.
        rank: One of its ranks.
        latest: Tokens before a span that the layer's convolution reads.
    """
    # 1. All spans by rank and row; those that go on where the one before them ends are one.
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

    # 2. The same by document and place.
    order = np.lexsort((start, piece))
    piece, start, of_rank, number, first_row = (
        x[order] for x in (piece, start, of_rank, number, first_row)
    )
    first = np.searchsorted(piece, piece, side="left")
    place = np.arange(piece.size) - first
    readers = _Readers(plan.cp, rank, of_rank, number)

    # 3. Each span reads the summaries of all spans of its document before it.
    reader = np.repeat(np.arange(piece.size), place)
    read = ranges(first, np.arange(piece.size))
    before = readers.rows(reader, place[read], of_rank[read], number[read])

    # 4. And the latest tokens before its first one, which may be in several spans.
    token = start[:, None] - np.arange(latest, 0, -1)
    reader, slot = np.nonzero(token >= 0)
    token = token[reader, slot]
    long = int(plan.lengths.max(initial=0)) + 1
    holder = np.searchsorted(piece * long + start, piece[reader] * long + token, side="right") - 1
    row = first_row[holder] + token - start[holder]
    rows_before = readers.rows(reader, slot, of_rank[holder], row, width=latest)
    return RankSummaries(lengths, rows_before, before)


class _Readers(NamedTuple):
    """Spans that read rows of others, all ranks' together."""

    cp: int
    rank: int  # for which `RowsOf` is made
    of_rank: IntArray  # rank of each span
    number: IntArray  # of each span on its rank

    def rows(
        self,
        reader: IntArray,
        slot: IntArray,
        holder: IntArray,
        row: IntArray,
        *,
        width: int | None = None,
    ) -> RowsOf:
        """Reading i: span reader[i] finds row[i] of rank holder[i] in its column slot[i]."""
        reading = self.of_rank[reader]
        travels = reading != holder
        # A row goes to a rank once, however many of its spans read it.
        most = int(row.max(initial=0)) + 1
        key = (reading * self.cp + holder) * most + row
        moved = np.unique(key[travels])
        to, by = np.divmod(moved // most, self.cp)
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
