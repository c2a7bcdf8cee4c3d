"""A micro-batch as the integer program sees it: chunks of long documents, short ones as a fluid.

Chunks end at a grid and wherever our plan cuts, so that our plan is one of the program's answers.
A chunk's work is what it adds to its document's beginning, so chunks of a document add up to the
whole; segments of a real plan cost more, mostly. Work is that of both passes, in ns.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from wlb.cost import ProfiledWorkload, kernels_ns, waits_ns
from wlb.plan import FloatArray, IntArray, KeyExchange, ShardingPlan
from wlb.plan.exchange import rank_of_span
from wlb.sharding.spans import RankedSpans, from_spans

NUM_CLASSES = 3
PER_SHARE = 4
"""Grid cells of a rank's share of the tokens."""


@dataclass(frozen=True, slots=True)
class Fluid:
    """Short documents of similar density. documents: rows of `lengths`; rates in ns a token."""

    documents: list[int]
    tokens: int
    work: float
    least_rate: float
    most_rate: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Documents of `lengths`, shape [num_documents], to be shared by `cp` ranks.

    linear_ns: of one row. piece, start, stop, work: of chunks, shape [num_chunks], by document and
    start. last: the last chunk of each long document.
    """

    lengths: IntArray
    cp: int
    cost: ProfiledWorkload
    linear_ns: float
    ours: ShardingPlan
    num_long: int = 12
    piece: IntArray = field(init=False)
    start: IntArray = field(init=False)
    stop: IntArray = field(init=False)
    work: FloatArray = field(init=False)
    fluids: tuple[Fluid, ...] = field(init=False)

    def __post_init__(self) -> None:
        order = np.argsort(-self.lengths, kind="stable")
        cell = max(1, int(self.lengths.sum()) // (self.cp * PER_SHARE))
        rows: list[tuple[int, int, int]] = []
        for document in order[: self.num_long].tolist():
            length = int(self.lengths[document])
            mine = self.ours.piece == document
            cuts = {0, length, *range(cell, length, cell), *self.ours.start[mine].tolist()}
            edges = sorted(cuts)
            rows += [(document, a, b) for a, b in pairwise(edges)]
        piece, start, stop = np.array(rows, np.int64).reshape(-1, 3).T
        work = np.maximum(0.0, self._heads(stop) - self._heads(start))
        fluids = self._fluids(order[self.num_long :])
        for name, value in (
            *(("piece", piece), ("start", start), ("stop", stop)),
            *(("work", work), ("fluids", fluids)),
        ):
            object.__setattr__(self, name, value)

    @property
    def sizes(self) -> IntArray:
        """Tokens of each chunk, shape [num_chunks]."""
        return self.stop - self.start

    @property
    def launches_ns(self) -> float:
        """Launches of a rank's attention calls."""
        calls = self.cost.attention_call_ns([1], [1], np.array([0, 1]))
        return float(sum(int(x[0]) for x in calls))

    @property
    def total_ns(self) -> float:
        """Work of all documents."""
        return float(self.work.sum()) + sum(fluid.work for fluid in self.fluids)

    def _heads(self, n: IntArray) -> FloatArray:
        forward, backward = self.cost.segment_times_ns(n, n)
        return (forward + backward).astype(np.float64)

    def _fluids(self, documents: IntArray) -> tuple[Fluid, ...]:
        if not documents.size:
            return ()
        work = self._heads(self.lengths[documents])
        rate = work / self.lengths[documents]
        out: list[Fluid] = []
        by_rate = np.argsort(-rate, kind="stable")
        shares = np.cumsum(self.lengths[documents][by_rate]) / self.lengths[documents].sum()
        of_class = np.minimum((shares * NUM_CLASSES - 1e-9).astype(int), NUM_CLASSES - 1)
        for k in np.unique(of_class).tolist():
            mine = by_rate[of_class == k]
            rows = documents[mine]
            tokens = int(self.lengths[rows].sum())
            least, most = float(rate[mine].min()), float(rate[mine].max())
            out.append(Fluid(rows.tolist(), tokens, float(work[mine].sum()), least, most))
        return tuple(out)

    def plan(self, rank: IntArray, fluid: FloatArray) -> ShardingPlan:
        """Returns the plan of chunks on these ranks, shape [num_chunks], and of short documents.

        fluid: tokens of each class on each rank, shape [num_classes, cp]; documents go whole, from
        long to short, to the rank that lacks most.
        """
        spans = [self.piece.tolist(), self.start.tolist(), self.stop.tolist(), rank.tolist()]
        for one, wanted in zip(self.fluids, fluid, strict=True):
            room = wanted.copy()
            for document in sorted(one.documents, key=lambda i: (-int(self.lengths[i]), i)):
                size, r = int(self.lengths[document]), int(room.argmax())
                room[r] -= size
                for column, value in zip(spans, (document, 0, size, r), strict=True):
                    column.append(value)
        columns = RankedSpans(*(np.array(column, np.int64) for column in spans))
        order = np.lexsort((columns.start, columns.piece, columns.rank))
        ordered = RankedSpans(*(column[order] for column in columns))
        made = from_spans(self.lengths, ordered, cp=self.cp, strategy="solver")
        return replace(made, exchange=KeyExchange.NEEDED)

    def of_ours(self) -> tuple[IntArray, FloatArray]:
        """Returns the rank of each chunk, and each class's tokens on each rank, in our plan."""
        ours, owner = self.ours, rank_of_span(self.ours)
        rank = np.zeros(self.piece.size, np.int64)
        for i in range(self.piece.size):
            of = (ours.piece == self.piece[i]) & (ours.start <= self.start[i])
            rank[i] = owner[of & (ours.stop >= self.stop[i])][0]
        fluid = np.zeros((len(self.fluids), self.cp))
        for k, one in enumerate(self.fluids):
            mine = np.isin(ours.piece, one.documents)
            np.add.at(fluid[k], owner[mine], (ours.stop - ours.start)[mine])
        return rank, fluid

    def time_ns(self, plan: ShardingPlan) -> float:
        """Returns the predicted time of a plan: linear work of the fullest rank, the slowest rank's
        attention in both passes, and what is waited for keys."""
        kernels = kernels_ns([plan], self.cost, cp=self.cp)
        passes = zip(kernels, waits_ns(plan, self.cost), strict=True)
        slowest = sum(float((times[0] + waits).max()) for times, waits in passes)
        return self.linear_ns * int(plan.tokens.max()) + slowest
