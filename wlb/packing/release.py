"""Which waiting documents a step of the `bounded` policy takes.

Documents of at least `OUTLIER` of a typical micro-batch's work (outliers) are decided about one by
one, all others (ordinary documents) by their tokens. A choice releases outliers by height: [first,
end) and all from `tail` on. All choices are scored with a lower bound on the slowest micro-batch
(`_total` has the terms), then the best few are packed and scored again.
Guarantees: documents at the maximum delay leave, oldest first, as far as the caps allow; equal on
all hosts (single IEEE operations). Cost: O(n log n) and some thousand choices, whatever n is.
"""

from dataclasses import dataclass

import numpy as np

from wlb.cost.flops import FloatArray
from wlb.packing.var_len import place
from wlb.plan import BoolArray, IntArray, IntLike, offsets_of

OUTLIER = 0.2
"""Work of the smallest outlier, in typical micro-batches."""
CLASS = 0.97
"""Outliers down to this part of the tallest one's work form a class; its oldest one goes first."""
LEAST = 0.35
"""Global batches that a step takes at least, if that much waits and fits: holding nearly everything
back costs nothing by itself, and steps would alternate between nearly empty and full ones."""
CURVATURE = 0.1
URGENCY = 2.0
NUM_PACKED = 8


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
    sums, forced_sums: running sums over outliers (over those that must leave) of tokens, work, and
    tokens times their delay if they miss this step too; shape [3, num_outliers + 1].
    """

    def __init__(self, length: IntArray, work: IntArray, age: IntArray, limits: StepLimits) -> None:
        self.limits = limits
        total = max(1, int(length.sum()))
        per_micro_batch = limits.tokens_per_step / limits.num_micro_batches
        self.typical = max(1.0, int(work.sum()) / total * per_micro_batch)
        order = np.argsort(-work, kind="stable")
        num = int(np.searchsorted(-work[order], -OUTLIER * self.typical, "right"))
        self.class_starts = _class_starts(work[order][:num])
        rank = np.arange(len(order))
        rank[:num] = np.searchsorted(self.class_starts, rank[:num], "right") - 1
        order = order[np.lexsort((-age[order], rank))]
        self.order, self.length, self.work, self.age = order, length[order], work[order], age[order]
        self.forced = self._forced()
        self.num_outliers = num
        tokens = self.length[:num]
        summed = np.stack([tokens, self.work[:num], tokens * (self.age[:num] + 1)])
        self.sums = np.stack([offsets_of(x) for x in summed])
        self.forced_sums = np.stack([offsets_of(x) for x in summed * self.forced[:num]])
        self.ordinary = OrdinaryDocuments(self)

    def _forced(self) -> BoolArray:
        """Documents at the maximum delay, oldest first, as many as both caps allow: one that finds
        no micro-batch would keep its tokens of T from documents that do."""
        rows = np.flatnonzero(self.age >= self.limits.max_delay)
        rows = rows[np.argsort(-self.age[rows], kind="stable")]
        rows = rows[np.cumsum(self.length[rows]) <= self.limits.step_tokens]
        if self.place(rows[np.argsort(-self.length[rows], kind="stable")])[1]:
            rows = np.delete(rows, self.place(rows)[1])
        forced = np.zeros(len(self.age), bool)
        forced[rows] = True
        return forced

    def place(self, rows: IntArray) -> tuple[list[list[int]], list[int]]:
        """Algorithm 1's placement of these, in this order: indices of `rows`, as `place`."""
        lengths, work = self.length[rows].tolist(), self.work[rows].tolist()
        num, s_max = self.limits.num_micro_batches, self.limits.s_max
        return place(lengths, work, num_micro_batches=num, s_max=s_max)


class OrdinaryDocuments:
    """Ordinary documents, by descending work; rows: those that need not leave now.

    sum_length, sum_work: running sums over `rows`, whose totals are tokens and work. price: mean
    delay of a token if all miss this step too. forced_rows, forced_tokens, forced_work: those that
    must leave. density: ns a token.
    """

    def __init__(self, waiting: WaitingDocuments) -> None:
        num, limits = waiting.num_outliers, waiting.limits
        self.rows = num + np.flatnonzero(~waiting.forced[num:])
        length, work = waiting.length[self.rows], waiting.work[self.rows]
        self.sum_length, self.sum_work = offsets_of(length), offsets_of(work)
        self.tokens, self.work = int(self.sum_length[-1]), int(self.sum_work[-1])
        price = int((length * (waiting.age[self.rows] + 1)).sum())
        self.price = price / self.tokens if self.tokens else 0.0
        self.forced_rows = num + np.flatnonzero(waiting.forced[num:])
        self.forced_tokens = int(waiting.length[self.forced_rows].sum())
        self.forced_work = int(waiting.work[self.forced_rows].sum())
        typical = waiting.typical / limits.tokens_per_step * limits.num_micro_batches
        self.density = self.work / self.tokens if self.tokens else typical

    def lightest(self, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """(tokens, work) of the documents of least work, at most `tokens` (shape [n]): [n] each."""
        first = np.searchsorted(self.sum_length, self.tokens - tokens, "left")
        return self.tokens - self.sum_length[first], self.work - self.sum_work[first]

    def heaviest(self, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """(tokens, work) of the documents of most work, at most `tokens` (shape [n]): [n] each."""
        last = np.searchsorted(self.sum_length, tokens, "right") - 1
        return self.sum_length[last], self.sum_work[last]

    def window(self, tokens: int, work: int) -> tuple[int, int]:
        """[first, last) of at most `tokens` tokens: the lightest with at least `work` of work."""
        last = np.searchsorted(self.sum_length, self.sum_length + tokens, "right") - 1
        first = int(np.searchsorted(self.sum_length, self.tokens - tokens, "left"))
        if self.work - int(self.sum_work[first]) >= work:
            return first, len(self.rows)
        enough = np.flatnonzero(self.sum_work[last[:first]] - self.sum_work[:first] >= work)
        first = int(enough[-1]) if enough.size else 0
        return first, int(last[first])


def choose(length: IntArray, work: IntArray, age: IntArray, limits: StepLimits) -> BoolArray:
    """Which of the waiting documents (shapes [n], n >= 1) the next step takes: shape [n]."""
    waiting = WaitingDocuments(length, work, age, limits)
    choices = _choices(waiting)
    score = _score(waiting, choices)
    best_score, best_rows = np.inf, None
    for c in np.argsort(score, kind="stable")[:NUM_PACKED].tolist():
        if not score[c] < best_score:
            break
        packed, rows = _packed_score(waiting, choices.at([c]))
        if packed < best_score or best_rows is None:
            best_score, best_rows = packed, rows
    assert best_rows is not None
    out = np.zeros(len(length), bool)
    out[waiting.order[best_rows]] = True
    return out


def _class_starts(work: IntArray) -> IntArray:
    """First position of each class of nearly equal outliers; `work` descends."""
    starts: list[int] = []
    at = 0
    while at < len(work):
        starts.append(at)
        at = int(np.searchsorted(-work, -CLASS * float(work[at]), "right"))
    return np.array(starts, np.int64)


def _choices(waiting: WaitingDocuments) -> ReleaseChoices:
    """All choices that fit the token cap; `first` and `tail` are at the start of a class."""
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    starts = np.append(waiting.class_starts, num_outliers)
    shortest = int(waiting.length[:num_outliers].min(initial=1 << 62))
    most = int(limits.step_tokens / max(1, shortest))
    counts = np.arange(min(num_outliers, most, 8) + 1)
    if num_outliers > 8:
        steps = np.arange(1, 8 * max(1, most // num + 1)) * num // 8
        powers = 2 ** np.arange(4, num_outliers.bit_length())
        counts = np.unique(np.concatenate([counts, powers, steps]))
    first, count, tail = (a.ravel() for a in np.meshgrid(starts, counts, starts, indexing="ij"))
    end = first + count
    # A count of 0 means all from `first` on, with tail = first. Otherwise the choice holds
    # something back between its two parts.
    is_one = np.where(count > 0, (end < tail) & (first < num_outliers), tail == first)
    choices = ReleaseChoices(first=first, end=end, tail=tail).at(is_one)
    taken = choices.released(waiting.sums[0]) + choices.held(waiting.forced_sums[0])
    taken += waiting.ordinary.forced_tokens
    # With the ordinary documents that may come along; what a step must take, if any choice can.
    fits = taken <= limits.step_tokens
    possible = np.minimum(taken + waiting.ordinary.tokens, limits.step_tokens)
    least = min(LEAST * limits.tokens_per_step, int(possible[fits].max()))
    return choices.at(fits & (possible >= max(1.0, least)))


def _score(waiting: WaitingDocuments, choices: ReleaseChoices) -> FloatArray:
    """Scores with a lower bound on the slowest micro-batch, shape [num_choices]."""
    limits, ordinary = waiting.limits, waiting.ordinary
    released = choices.released(waiting.sums) + choices.held(waiting.forced_sums)
    held, _, price = waiting.sums[:, -1:] - released
    tokens, work = released[0] + ordinary.forced_tokens, released[1] + ordinary.forced_work
    tallest = _tallest(waiting, choices)
    room = np.minimum(limits.step_tokens - tokens, ordinary.tokens)
    light_tokens, light_work = ordinary.lightest(room)
    heavy_tokens, heavy_work = ordinary.heaviest(room)
    # Ordinary documents as heavy as it takes to make the mean as high as the tallest document.
    missing = tallest * limits.num_micro_batches - work
    is_light = light_work >= missing
    taken_work = np.where(is_light, light_work, np.minimum(heavy_work, missing))
    taken = np.where(is_light, light_tokens, heavy_tokens)
    mean = (work + taken_work) / limits.num_micro_batches
    level = np.maximum(np.maximum(tallest, mean), _pigeonhole(waiting, choices))
    level = np.maximum(level, _crowded(waiting, choices, tokens + taken, work + taken_work))
    left = ordinary.tokens - taken
    price_held = price + left * ordinary.price
    return _total(waiting, choices, level - mean, price_held, held + left)


def _total(
    waiting: WaitingDocuments,
    choices: ReleaseChoices,
    wait: FloatArray,
    price_held: FloatArray,
    held: IntArray,
) -> FloatArray:
    """The score in typical micro-batches' time; wait and the result have shape [num_choices].

    x + x^2 / CURVATURE, x = slowest micro-batch - mean: the square makes one step of 1.10 dearer
    than ten of 1.01. price * (held tokens * (1 + age) + B^2 / (2 * (T - 1))): delay, with B all
    held tokens and T - 1 what a step can catch up. `_shortfall`: tall documents collect company in
    time; without it a rare one leaves alone at its last moment. Tokens in global batches.
    """
    limits = waiting.limits
    x = wait / waiting.typical
    batch = float(limits.tokens_per_step)
    backlog = held / batch
    spare = (limits.step_tokens - limits.tokens_per_step) / batch
    delay = price_held / batch + backlog * backlog / (2 * spare)
    return x + x * x / CURVATURE + limits.price * delay + _shortfall(waiting, choices)


def _tallest(waiting: WaitingDocuments, choices: ReleaseChoices) -> IntArray:
    """Work of the tallest released outlier, shape [num_choices]; 0 if none is released."""
    work = waiting.work[: waiting.num_outliers]
    # Classes descend, but inside a class age decides the order: the most from a position on.
    highest = np.append(np.maximum.accumulate(work[::-1])[::-1], 0)
    forced = int(work[waiting.forced[: work.size]].max(initial=0))
    return np.maximum(highest[choices.tallest], forced)


def _pigeonhole(waiting: WaitingDocuments, choices: ReleaseChoices) -> FloatArray:
    """Of N + 1 outliers two share a micro-batch, of 2N + 1 three do: at least the least of them."""
    num, num_outliers = waiting.limits.num_micro_batches, waiting.num_outliers
    work = np.append(waiting.work[:num_outliers], 0)
    count = choices.end - choices.first

    def at(n: int) -> IntArray:
        """Work of the n-th outlier that each choice releases; 0 if it releases fewer."""
        row = np.where(n < count, choices.first + n, choices.tail + n - count)
        return work[np.minimum(row, num_outliers)]

    two = np.where(at(num) > 0, at(num) + at(num - 1), 0)
    three = np.where(at(2 * num) > 0, at(2 * num) + at(2 * num - 1) + at(2 * num - 2), 0)
    # Inside a class age decides the order, so the least of them may be that much less.
    return CLASS * np.maximum(two, three)


def _crowded(
    waiting: WaitingDocuments, choices: ReleaseChoices, tokens: IntArray, work: IntArray
) -> FloatArray:
    """The first k documents have a micro-batch each; what does not fit the other N - k under S_max
    comes on top of them. With k once the tallest class, once as many as there are micro-batches."""
    num, s_max = waiting.limits.num_micro_batches, waiting.limits.s_max
    num_outliers, starts = waiting.num_outliers, waiting.class_starts
    class_end = np.append(starts[1:], [num_outliers, num_outliers])
    first = choices.tallest
    stop = np.where(choices.end > choices.first, choices.end, num_outliers)
    height_class = np.searchsorted(starts, first, "right") - 1
    out = np.zeros(len(tokens))
    for end in (np.minimum(stop, first + num), np.minimum(stop, class_end[height_class])):
        k = end - first
        top_tokens, top_work = waiting.sums[:2, end] - waiting.sums[:2, first]
        rest = tokens - top_tokens
        over = np.maximum(0, rest - (num - k) * s_max)
        # Divided first: tokens times ns would not fit 64 bits.
        on_top = over / np.maximum(1, rest) * (work - top_work)
        is_used = (k > 0) & (k <= num)
        out = np.maximum(out, np.where(is_used, (top_work + on_top) / np.maximum(1, k), 0.0))
    return out


def _shortfall(waiting: WaitingDocuments, choices: ReleaseChoices) -> FloatArray:
    """Work that a held document above the mean still lacks as company, times its urgency."""
    limits, num_outliers = waiting.limits, waiting.num_outliers
    first, end, tail = choices.first, choices.end, choices.tail
    tallest_held = np.where(first > 0, 0, end)
    is_held = (first > 0) | (tail > end)
    work = np.append(waiting.work[:num_outliers], 0)
    height = np.where(is_held, work[tallest_held], 0)
    # The company: held outliers, tallest first, up to the token cap; then ordinary documents.
    tokens: IntArray = waiting.sums[0]
    sum_work: IntArray = waiting.sums[1]
    cap = np.minimum(choices.held(tokens), limits.step_tokens)
    rest = np.maximum(0, cap - tokens[first])
    stop = np.searchsorted(tokens, tokens[end] + rest, "right") - 1
    stop_below = np.searchsorted(tokens, np.minimum(cap, tokens[first]), "right") - 1
    company = sum_work[stop_below] + np.maximum(0, sum_work[stop] - sum_work[end])
    fill = np.minimum(limits.step_tokens - cap, limits.tokens_per_step * 6 // 5)
    reached = (company + fill * waiting.ordinary.density) / limits.num_micro_batches
    lacking = np.maximum(0.0, height - reached) / waiting.typical
    # A class is sorted by age: its first held document is its oldest.
    age = np.append(waiting.age[:num_outliers], 0)[tallest_held]
    urgency = np.minimum(1.0, (age + 1) / limits.max_delay)
    is_tall = is_held & (height > 1.02 * waiting.typical)
    return np.where(is_tall, URGENCY * urgency * urgency * urgency * lacking, 0.0)


def _packed_score(waiting: WaitingDocuments, choice: ReleaseChoices) -> tuple[float, IntArray]:
    """(score, positions released) of a single choice with its outliers really packed."""
    limits, ordinary, num_outliers = waiting.limits, waiting.ordinary, waiting.num_outliers
    released = waiting.forced[:num_outliers].copy()
    released[int(choice.first[0]) : int(choice.end[0])] = True
    released[int(choice.tail[0]) :] = True
    rows = np.flatnonzero(released)
    lengths, work = waiting.length[rows], waiting.work[rows]
    placed, rest = waiting.place(rows)
    loads = [int(work[members].sum()) for members in placed]
    sizes = [int(lengths[members].sum()) for members in placed]
    room = limits.step_tokens - int(lengths.sum()) - ordinary.forced_tokens
    missing = max(loads) * limits.num_micro_batches - sum(loads) - ordinary.forced_work
    first, last = ordinary.window(min(room, ordinary.tokens), missing)
    tokens = int(ordinary.sum_length[last] - ordinary.sum_length[first]) + ordinary.forced_tokens
    fluid = int(ordinary.sum_work[last] - ordinary.sum_work[first]) + ordinary.forced_work
    level = _poured(loads, sizes, tokens, fluid, limits.s_max)
    taken = np.concatenate([rows, ordinary.forced_rows, ordinary.rows[first:last]])
    if rest or level is None:
        return np.inf, taken
    held = np.delete(waiting.length, taken)
    price = (held * (np.delete(waiting.age, taken) + 1)).sum(keepdims=True)
    wait = np.array([level - (sum(loads) + fluid) / limits.num_micro_batches])
    score = _total(waiting, choice, wait, price.astype(float), held.sum(keepdims=True))
    return float(score[0]), taken


def _poured(loads: list[int], sizes: list[int], tokens: int, work: int, s_max: int) -> float | None:
    """The slowest micro-batch once ordinary documents, taken for a fluid, are levelled over all.

    None if they do not fit under s_max tokens a micro-batch.
    """
    highest = float(max(loads))
    if not tokens:
        return highest
    if sum(s_max - size for size in sizes) < tokens:
        return None
    if not work:
        return highest
    density = work / tokens
    room = [(s_max - size) * density for size in sizes]
    events = sorted(
        [(float(a), 1) for a in loads] + [(a + r, -1) for a, r in zip(loads, room, strict=True)]
    )
    level, rising, left = events[0][0], 0, float(work)
    for at, change in events:
        need = (at - level) * rising
        if need >= left:
            return max(highest, level + left / rising)
        left, level, rising = left - need, at, rising + change
    return max(highest, level)
