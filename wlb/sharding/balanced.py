"""balanced: each document over as many ranks as its work requires; ours, beyond the paper.

Per-document sharding cuts every document into 2 * CP chunks: at CP 16 one of 8K tokens becomes 32
segments of 256 rows. Here the fewest ranks m share it whose parts stay below a share of a rank's
mean work, in 2 * m symmetric chunks. From long to short, each goes to the m least loaded ranks with
room; documents that do not fit are cut to fill the ranks, so that all have equally many tokens.
Five shares are tried and hybrid's plan competes, so balanced is never predicted slower; by need
those of `by_need` as well, and with linear layers those that cut few documents (`few_cuts`). Cost:
a Python loop over documents for each share.
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
"""Limits tried for the work of one part of a document, relative to a rank's mean work."""

_Span = tuple[int, int, int, int]
"""(piece, start, stop, rank)"""


def balanced(
    lengths: IntLike, *, cp: int, cost: WorkloadModel, exchange: ExchangeChoice | str = GATHER
) -> ShardingPlan:
    """Shard a micro-batch of pieces of `lengths` (shape [num_pieces], tokens) over `cp` ranks.
    exchange: how keys will be exchanged, of which the price takes account (`cheapest`).
    """
    pieces = checked_lengths(lengths, cp)
    best = hybrid(pieces, cp=cp, cost=cost, exchange=exchange)
    if cp > 1 and pieces.size:
        order = np.argsort(-pieces, kind="stable")
        plans = [_dealt(pieces, order, cp, cost, share) for share in SHARES]
        if isinstance(cost, SummaryPrices) and cost.summary_ns:
            plans += few_cuts(pieces, cp=cp, cost=cost)
        if exchange != GATHER:
            plans = [*by_need(pieces, cp=cp, cost=cost), *plans]
        # In ties hybrid's plan is taken of an all-gather, and the others by need.
        plans = [best, *plans] if exchange == GATHER else [*plans, best]
        best = cheapest(plans, cost, exchange=exchange)
    return replace(best, strategy=STRATEGY)


def _dealt(
    pieces: IntArray, order: IntArray, cp: int, cost: WorkloadModel, share: float
) -> ShardingPlan:
    """Deal documents in `order` (descending length), in parts of at most `share` of the mean
    work.
    """
    ordered = pieces[order]
    # A longer document may be predicted a percent faster than a shorter one at a cell boundary of
    # the kernel's table. Its work is raised to that of all shorter documents, because the documents
    # that all ranks share have to be the first ones in `order`.
    work = np.maximum.accumulate(_both(cost, ordered, ordered)[::-1])[::-1]
    mean = max(1.0, float(work.sum()) * share / cp)
    num_ranks = np.clip(np.ceil(work / mean), 1, cp).astype(np.int64)
    num_over_all = int(np.searchsorted(-num_ranks, -cp, side="right"))
    dealt = _DealtDocuments(ordered, cp, cost)
    dealt.over_all(num_over_all)
    for m in range(cp - 1, 1, -1):
        dealt.over_some(np.flatnonzero(num_ranks[num_over_all:] == m) + num_over_all, m)
    dealt.whole(np.flatnonzero(num_ranks[num_over_all:] == 1) + num_over_all, work)
    dealt.fill()
    spans = RankedSpans(*np.array(dealt.spans, np.int64).T)
    return from_spans(pieces, spans._replace(piece=order[spans.piece]), cp=cp, strategy=STRATEGY)


def _both(cost: WorkloadModel, q: IntArray, kv: IntArray) -> IntArray:
    """Forward plus backward time of each segment, shape [n]."""
    forward, backward = cost.segment_times_ns(q, kv)
    return forward + backward


class _DealtDocuments:
    """Spans of the documents dealt so far, and each rank's load (predicted ns) and room (tokens).

    left: documents for which no rank had room in the parts that their work requires.
    """

    def __init__(self, ordered: IntArray, cp: int, cost: WorkloadModel) -> None:
        self.ordered, self.cp, self.cost = ordered, cp, cost
        self.spans: list[_Span] = []
        self.load = [0] * cp
        self.room = shares_of(int(ordered.sum()), np.zeros(cp, np.int64)).tolist()
        self.left: list[int] = []

    def over_all(self, num: int) -> None:
        """The first `num` documents per document; sets which ranks get the odd tokens."""
        start, stop, load = self._chunks(self.ordered[:num], self.cp)
        ranks = head_tail_ranks(self.cp)
        for i in range(num):
            self._add(i, start[i], stop[i], ranks.tolist())
        held = np.zeros(self.cp, np.int64)
        np.add.at(held, np.tile(ranks, num), (stop - start).ravel())
        self.room = (shares_of(int(self.ordered.sum()), held) - held).tolist()
        self.load = load.sum(0).tolist()

    def over_some(self, who: IntArray, num_ranks: int) -> None:
        """Documents `who`, each over the `num_ranks` least loaded ranks with room for a part."""
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
        """Documents `who`, each on the least loaded rank with room for it."""
        columns = (self.ordered[who].tolist(), work[who].tolist())
        at = 0
        for first, stop in (*runs_of(*columns, num_bins=self.cp), (len(who), 0)):
            for i in range(at, first):
                self._whole(int(who[i]), columns[0][i], columns[1][i])
            at = first
            if stop:
                at += self._equal(who[first:stop].tolist(), columns[0][first], columns[1][first])

    def _whole(self, document: int, size: int, part: int) -> None:
        """A document on the least loaded rank with room for it."""
        with_room = [r for r in range(self.cp) if self.room[r] >= size]
        if not with_room:
            self.left.append(document)
            return
        best = min(with_room, key=self.load.__getitem__)
        self.spans.append((document, 0, size, best))
        self.load[best] += part
        self.room[best] -= size

    def _equal(self, documents: list[int], size: int, part: int) -> int:
        """Documents of equal size and work as by `_whole`, as many as find room; their number."""
        if not fits_64_bits(self.load, part, len(documents)):
            return 0
        room = [tokens // size for tokens in self.room]
        target = least_loaded(self.load, part, len(documents), room=room)
        self.spans += [
            (document, 0, size, r) for document, r in zip(documents, target.tolist(), strict=False)
        ]
        for r, count in enumerate(np.bincount(target, minlength=self.cp).tolist()):
            self.load[r] += count * part
            self.room[r] -= count * size
        return target.size

    def fill(self) -> None:
        """Cut the documents in `left` so that they fill the ranks with most room first."""
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
        """Chunks of documents over `num_ranks`, and each rank's predicted ns of each document."""
        start, stop = document_chunks(lengths, num_ranks)
        both = _both(self.cost, (stop - start).ravel(), stop.ravel())
        times = both.reshape(start.shape)
        return start, stop, times[:, :num_ranks] + times[:, : num_ranks - 1 : -1]
