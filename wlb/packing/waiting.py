"""All waiting documents, in the order and with the sums from which `release` decides.

Documents of at least `OUTLIER` of a typical micro-batch's work are outliers, which are decided
about one by one; all others (ordinary documents) by their tokens.
"""

from dataclasses import dataclass

import numpy as np

from wlb.packing.price_range import comparable
from wlb.packing.var_len import place
from wlb.plan import BoolArray, FloatArray, IntArray, IntLike, offsets_of

OUTLIER = 0.2
"""Work of the smallest outlier, in typical micro-batches."""
CLASS = 0.97
"""Outliers down to this part of the tallest one's work form a class; its oldest one goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step. Tokens; max_delay in steps; price: of a global batch held for a step,
    in typical micro-batch times."""

    num_micro_batches: int
    tokens_per_step: int
    s_max: int
    step_tokens: int
    max_delay: int
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChoices:
    """Outliers [first, end) and those from `tail` on are released; arrays of [num_choices].

    Of the running sums of a value over the outliers (shape [..., num_outliers + 1]) `released` and
    `held` make each choice's sums, shape [..., num_choices].
    """

    first: IntArray
    end: IntArray
    tail: IntArray

    @property
    def tallest(self) -> IntArray:
        """Position of the first outlier that is released; num_outliers if none is."""
        return np.where(self.end > self.first, self.first, self.tail)

    def released(self, running: IntArray) -> IntArray:
        before_tail = running[..., self.end] - running[..., self.first]
        return before_tail + running[..., -1:] - running[..., self.tail]

    def held(self, running: IntArray) -> IntArray:
        return running[..., self.first] + running[..., self.tail] - running[..., self.end]

    def at(self, index: IntLike | BoolArray) -> "ReleaseChoices":
        return ReleaseChoices(first=self.first[index], end=self.end[index], tail=self.tail[index])


class WaitingDocuments:
    """All waiting documents in the order of the decision, with the sums that scoring needs.

    Arrays are indexed by position: outliers (by class, oldest first), then ordinary documents by
    descending work. forced: those that must leave now. `order[position]` is the row of the input.
    ends: work at the ends of the range of prices, shape [num_ends, num_documents]. typical,
    typical_ends (shape [num_ends, 1]): work of a typical micro-batch.
    sums, forced_sums: running sums over outliers (over those that must leave) of tokens, work, and
    tokens times their delay if they miss this step too, then of work at each end; shape
    [3 + num_ends, num_outliers + 1].
    """

    def __init__(
        self, length: IntArray, work: IntArray, age: IntArray, limits: StepLimits, *, ends: IntArray
    ) -> None:
        self.limits = limits
        total = max(1, int(length.sum()))
        per_micro_batch = limits.tokens_per_step / limits.num_micro_batches
        self.typical = max(1.0, int(work.sum()) / total * per_micro_batch)
        of_ends = [max(1.0, int(x.sum()) / total * per_micro_batch) for x in ends]
        self.typical_ends: FloatArray = np.array(of_ends)[:, None]
        order = np.argsort(-work, kind="stable")
        num = int(np.searchsorted(-work[order], -OUTLIER * self.typical, "right"))
        self.class_starts = _class_starts(work[order][:num])
        rank = np.arange(len(order))
        rank[:num] = np.searchsorted(self.class_starts, rank[:num], "right") - 1
        order = order[np.lexsort((-age[order], rank))]
        self.order, self.length, self.work, self.age = order, length[order], work[order], age[order]
        self.ends = ends[:, order]
        self.forced = self._forced()
        self.num_outliers = num
        tokens = self.length[:num]
        delayed = tokens * (self.age[:num] + 1)
        summed = np.stack([tokens, self.work[:num], delayed, *self.ends[:, :num]])
        self.sums = np.stack([offsets_of(x) for x in summed])
        self.forced_sums = np.stack([offsets_of(x) for x in summed * self.forced[:num]])
        self.ordinary = OrdinaryDocuments(self)

    def _forced(self) -> BoolArray:
        """Documents at the maximum delay, oldest first, as many as both caps allow: one that finds
        no micro-batch would keep its tokens of T from documents that do."""
        rows = np.flatnonzero(self.age >= self.limits.max_delay)
        rows = rows[np.argsort(-self.age[rows], kind="stable")]
        rows = rows[fitting(self.length[rows], self.limits.step_tokens)]
        if self.place(rows[np.argsort(-self.length[rows], kind="stable")])[1]:
            rows = np.delete(rows, self.place(rows)[1])
        forced = np.zeros(len(self.age), bool)
        forced[rows] = True
        return forced

    def place(self, rows: IntArray) -> tuple[list[list[int]], list[int]]:
        """Algorithm 1's placement of these, in this order: indices of `rows`, as `place`."""
        ends = comparable(self.ends[:, rows])
        num, s_max = self.limits.num_micro_batches, self.limits.s_max
        lengths = self.length[rows].tolist()
        return place(lengths, ends[0], second=ends[-1], num_micro_batches=num, s_max=s_max)


class OrdinaryDocuments:
    """Ordinary documents, by descending work; rows: those that need not leave now.

    sum_length, sum_work, sum_ends ([num_ends, n]): running sums over `rows`; the first two end in
    tokens and work. price: mean delay of a token if all miss this step too. forced_rows,
    forced_tokens, forced_work, forced_ends ([num_ends, 1]): those that must leave. density: ns a
    token.
    """

    def __init__(self, waiting: WaitingDocuments) -> None:
        num, limits = waiting.num_outliers, waiting.limits
        self.rows = num + np.flatnonzero(~waiting.forced[num:])
        length, work = waiting.length[self.rows], waiting.work[self.rows]
        self.sum_length, self.sum_work = offsets_of(length), offsets_of(work)
        self.sum_ends = np.stack([offsets_of(x) for x in waiting.ends[:, self.rows]])
        self.tokens, self.work = int(self.sum_length[-1]), int(self.sum_work[-1])
        price = int((length * (waiting.age[self.rows] + 1)).sum())
        self.price = price / self.tokens if self.tokens else 0.0
        self.forced_rows = num + np.flatnonzero(waiting.forced[num:])
        self.forced_tokens = int(waiting.length[self.forced_rows].sum())
        self.forced_work = int(waiting.work[self.forced_rows].sum())
        self.forced_ends = waiting.ends[:, self.forced_rows].sum(1, keepdims=True)
        typical = waiting.typical / limits.tokens_per_step * limits.num_micro_batches
        self.density = self.work / self.tokens if self.tokens else typical

    def lightest(self, tokens: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(tokens, work, work at the ends) of the documents of least work, at most `tokens` (shape
        [n]): [n], [n] and [num_ends, n]."""
        first = np.searchsorted(self.sum_length, self.tokens - tokens, "left")
        at_ends = self.sum_ends[:, -1:] - self.sum_ends[:, first]
        return self.tokens - self.sum_length[first], self.work - self.sum_work[first], at_ends

    def heaviest(self, tokens: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The same of the documents of most work."""
        last = np.searchsorted(self.sum_length, tokens, "right") - 1
        return self.sum_length[last], self.sum_work[last], self.sum_ends[:, last]

    def window(self, tokens: int, work: int) -> tuple[int, int]:
        """[first, last) of at most `tokens` tokens: the lightest with at least `work` of work."""
        last = np.searchsorted(self.sum_length, self.sum_length + tokens, "right") - 1
        first = int(np.searchsorted(self.sum_length, self.tokens - tokens, "left"))
        if self.work - int(self.sum_work[first]) >= work:
            return first, len(self.rows)
        enough = np.flatnonzero(self.sum_work[last[:first]] - self.sum_work[:first] >= work)
        first = int(enough[-1]) if enough.size else 0
        return first, int(last[first])


def fitting(length: IntArray, tokens: int) -> IntArray:
    """Positions, ascending, of the documents (lengths of shape [n]) that fit `tokens` together when
    each in turn is taken if it still fits."""
    out: list[IntArray] = []
    rows = np.flatnonzero(length <= tokens)
    while rows.size:
        sums = np.cumsum(length[rows])
        num = int(np.searchsorted(sums, tokens, "right"))
        out.append(rows[:num])
        tokens -= int(sums[num - 1])
        rows = rows[num:]
        rows = rows[length[rows] <= tokens]
    return np.concatenate([np.zeros(0, np.int64), *out])


def _class_starts(work: IntArray) -> IntArray:
    """First position of each class of nearly equal outliers; `work` descends."""
    starts: list[int] = []
    at = 0
    while at < len(work):
        starts.append(at)
        at = int(np.searchsorted(-work, -CLASS * float(work[at]), "right"))
    return np.array(starts, np.int64)
