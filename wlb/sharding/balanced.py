"""Strategy `balanced`: each document is shared by only as many ranks as its work requires.

This strategy is not in the paper. Per-document sharding cuts every document into 2 * CP chunks: at
CP 16 a document of 8K tokens becomes 32 segments of 256 tokens, on which attention kernels are
slow. Here a document is cut into 2 * m chunks for m ranks. m is the smallest number for which a
rank's part of the document has at most a given share of the mean work of a rank:

    a long document on 4 ranks     |0|1|2|3|3|2|1|0|
    a shorter one on 2 ranks       |0|1|1|0|
    a short one on 1 rank          |2|

1. From long to short, each document goes to the m least loaded ranks that have room.
2. Documents that do not fit are cut to fill the ranks, so that all have equally many tokens.

Five shares are tried, and the plan with the best predicted time is taken. Further candidates are:

- the plan of `hybrid`, so that `balanced` is never predicted to be slower than `hybrid`,
- the plans of `by_need`, if the exchange may transfer only the keys that ranks need,
- the plans of `few_cuts`, for models with linear-attention layers.

Cost: a Python loop over documents for each share.
"""

from dataclasses import replace

import numpy as np

from wlb.cost import SummaryPrices, WorkloadModel
from wlb.packing.placement import fits_64_bits, least_loaded, runs_of
from wlb.plan import IntArray, IntLike, ShardingPlan
from wlb.sharding.by_need import by_need, few_cuts
from wlb.sharding.hybrid import hybrid, shares_of
from wlb.sharding.paper import (
    GATHER,
    RankedSpans,
    cheapest,
    checked_lengths,
    document_chunks,
    from_spans,
    head_tail_ranks,
)
from wlb.spec import ExchangeChoice

STRATEGY = "balanced"
SHARES = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""Limits that are tried for the work of a rank's part of one document, as shares of the mean work
of a rank."""

_Span = tuple[int, int, int, int]
"""(piece, start, stop, rank): the rank processes the tokens [start, stop) of the piece."""


def balanced(
    lengths: IntLike, *, cp: int, cost: WorkloadModel, exchange: ExchangeChoice | str = GATHER
) -> ShardingPlan:
    """Return the fastest of many plans in which each document of a micro-batch is on few ranks.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Predicts the times by which plans are compared (`cheapest`).
        exchange: How ranks get each other's keys: "gather", "needed" or "auto".
    """
    pieces = checked_lengths(lengths, cp)
    best = hybrid(pieces, cp=cp, cost=cost, exchange=exchange)
    if cp > 1 and pieces.size:
        order = np.argsort(-pieces, kind="stable")
        plans = [_assigned(pieces, order, cp, cost, share) for share in SHARES]
        if isinstance(cost, SummaryPrices) and cost.summary_ns:
            plans += few_cuts(pieces, cp=cp, cost=cost)
        if exchange != GATHER:
            plans = [*by_need(pieces, cp=cp, cost=cost), *plans]
        # Of equally fast plans the first is taken. With an all-gather, prefer the plan of `hybrid`.
        # Otherwise prefer the other plans, which transfer fewer rows.
        plans = [best, *plans] if exchange == GATHER else [*plans, best]
        best = cheapest(plans, cost, exchange=exchange)
    return replace(best, strategy=STRATEGY)


def _assigned(
    pieces: IntArray, order: IntArray, cp: int, cost: WorkloadModel, share: float
) -> ShardingPlan:
    """Make a plan in which each document is cut into parts of limited work.

    Args:
        pieces: Tokens of each document, shape [num_pieces].
        order: Indices of the documents by descending length.
        cp: Number of CP ranks.
        cost: Predicts the times of attention.
        share: Most work that a rank may have of one document, as a share of the mean work of a
            rank.
    """
    ordered = pieces[order]
    # Predicted times are interpolated in a table, where a longer document may be predicted to be
    # one percent faster than a shorter one. Raise its work to the maximum over shorter documents,
    # so that the documents that all ranks share are the first ones in `order`.
    work = np.maximum.accumulate(_both(cost, ordered, ordered)[::-1])[::-1]
    mean = max(1.0, float(work.sum()) * share / cp)
    num_ranks = np.clip(np.ceil(work / mean), 1, cp).astype(np.int64)
    num_over_all = int(np.searchsorted(-num_ranks, -cp, side="right"))
    assigned = _AssignedDocuments(ordered, cp, cost)
    assigned.over_all(num_over_all)
    for m in range(cp - 1, 1, -1):
        assigned.over_some(np.flatnonzero(num_ranks[num_over_all:] == m) + num_over_all, m)
    assigned.whole(np.flatnonzero(num_ranks[num_over_all:] == 1) + num_over_all, work)
    assigned.fill()
    spans = RankedSpans(*np.array(assigned.spans, np.int64).T)
    return from_spans(pieces, spans._replace(piece=order[spans.piece]), cp=cp, strategy=STRATEGY)


def _both(cost: WorkloadModel, q: IntArray, kv: IntArray) -> IntArray:
    """Return the forward plus backward attention time of each segment in ns, shape [n].

    Args:
        cost: Predicts the times.
        q: Number of queries of each segment, shape [n].
        kv: Number of keys of each segment, shape [n].
    """
    forward, backward = cost.segment_times_ns(q, kv)
    return forward + backward


class _AssignedDocuments:
    """Collects the spans of documents as they are assigned to ranks.

    Args:
        ordered: Tokens of each document, in descending order. The methods name documents by their
            position in this order.
        cp: Number of CP ranks.
        cost: Predicts the times of attention.
    """

    def __init__(self, ordered: IntArray, cp: int, cost: WorkloadModel) -> None:
        self.ordered, self.cp, self.cost = ordered, cp, cost
        self.spans: list[_Span] = []
        self.load = [0] * cp  # predicted time of each rank so far, in ns
        # Tokens that each rank may still take.
        self.room = shares_of(int(ordered.sum()), np.zeros(cp, np.int64)).tolist()
        # Documents that did not fit, because too few ranks had room. `fill` cuts them.
        self.left: list[int] = []

    def over_all(self, num: int) -> None:
        """Assign the first `num` documents to all ranks, as `per_document` does."""
        start, stop, load = self._chunks(self.ordered[:num], self.cp)
        ranks = head_tail_ranks(self.cp)
        for i in range(num):
            self._add(i, start[i], stop[i], ranks.tolist())
        held = np.zeros(self.cp, np.int64)
        np.add.at(held, np.tile(ranks, num), (stop - start).ravel())
        # Each rank may still take its share of the micro-batch minus what it has now.
        self.room = (shares_of(int(self.ordered.sum()), held) - held).tolist()
        self.load = load.sum(0).tolist()

    def over_some(self, who: IntArray, num_ranks: int) -> None:
        """Cut each document of `who` among the `num_ranks` least loaded ranks with room for a part.

        Args:
            who: The documents to assign.
            num_ranks: Number of ranks over which each document is cut.
        """
        start, stop, load = self._chunks(self.ordered[who], num_ranks)
        tokens = (stop - start)[:, :num_ranks] + (stop - start)[:, : num_ranks - 1 : -1]
        for i, document in enumerate(who.tolist()):
            most = int(tokens[i].max())
            fits = [r for r in range(self.cp) if self.room[r] >= most]
            if len(fits) < num_ranks:
                self.left.append(document)
                continue
            chosen = sorted(fits, key=lambda r: (self.load[r], r))[:num_ranks]
            self._add(document, start[i], stop[i], chosen + chosen[::-1])
            for r, part, size in zip(chosen, load[i].tolist(), tokens[i].tolist(), strict=True):
                self.load[r] += part
                self.room[r] -= size

    def whole(self, who: IntArray, work: IntArray) -> None:
        """Assign each document of `who` whole to the least loaded rank that has room for it.

        Args:
            who: The documents to assign.
            work: Predicted time of each document of the micro-batch in ns, shape [num_pieces].
        """
        columns = (self.ordered[who].tolist(), work[who].tolist())
        at = 0
        for first, stop in (*runs_of(*columns, num_bins=self.cp), (len(who), 0)):
            for i in range(at, first):
                self._whole(int(who[i]), columns[0][i], columns[1][i])
            at = first
            if stop:
                at += self._equal(who[first:stop].tolist(), columns[0][first], columns[1][first])

    def _whole(self, document: int, size: int, time_ns: int) -> None:
        """Assign a document whole to the least loaded rank with room for its tokens.

        Args:
            document: The document.
            size: Tokens of the document.
            time_ns: Predicted time of the document.
        """
        with_room = [r for r in range(self.cp) if self.room[r] >= size]
        if not with_room:
            self.left.append(document)
            return
        best = min(with_room, key=self.load.__getitem__)
        self.spans.append((document, 0, size, best))
        self.load[best] += time_ns
        self.room[best] -= size

    def _equal(self, documents: list[int], size: int, time_ns: int) -> int:
        """Assign equal documents to ranks, each whole, until one does not fit on any rank.

        The result is the same as calling `_whole` for each document.

        Args:
            documents: Indices of the documents.
            size: Tokens of each document.
            time_ns: Predicted time of each document.

        Returns:
            The number of documents that were assigned.
        """
        if not fits_64_bits(self.load, time_ns, len(documents)):
            return 0
        room = [tokens // size for tokens in self.room]
        target = least_loaded(self.load, time_ns, len(documents), room=room)
        self.spans += [
            (document, 0, size, r) for document, r in zip(documents, target.tolist(), strict=False)
        ]
        for r, count in enumerate(np.bincount(target, minlength=self.cp).tolist()):
            self.load[r] += count * time_ns
            self.room[r] -= count * size
        return target.size

    def fill(self) -> None:
        """Cut the documents that fit on no rank, and give the parts to the ranks with most room."""
        for document in self.left:
            at, size = 0, int(self.ordered[document])
            while at < size:
                rank = max(range(self.cp), key=lambda r: self.room[r])
                taken = min(size - at, self.room[rank])
                self.spans.append((document, at, at + taken, rank))
                self.room[rank] -= taken
                at += taken

    def _add(self, document: int, start: IntArray, stop: IntArray, ranks: list[int]) -> None:
        for a, b, rank in zip(start.tolist(), stop.tolist(), ranks, strict=True):
            self.spans.append((document, a, b, rank))

    def _chunks(self, lengths: IntArray, num_ranks: int) -> tuple[IntArray, IntArray, IntArray]:
        """Cut documents into two chunks for each of `num_ranks` ranks, and predict their times.

        Args:
            lengths: Tokens of each document, shape [n].
            num_ranks: Number of ranks over which each document is cut.

        Returns:
            Start and stop of the chunks, shape [n, 2 * num_ranks], and the predicted time of each
            rank's part of each document in ns, shape [n, num_ranks].
        """
        start, stop = document_chunks(lengths, num_ranks)
        both = _both(self.cost, (stop - start).ravel(), stop.ravel())
        times = both.reshape(start.shape)
        return start, stop, times[:, :num_ranks] + times[:, : num_ranks - 1 : -1]
