"""Which waiting documents a step of the `bounded` policy takes.

Documents of at least `OUTLIER` of a typical micro-batch's work are decided about one by one, others
by tokens. A choice releases, of the outliers by height, k from position i and all from j on. All
choices are scored with a lower bound on the slowest micro-batch (`_total` has the terms), then the
best few are packed and scored again.
Guarantees: documents at the maximum delay leave, oldest first, as far as the caps allow; equal on
all hosts (single IEEE operations). Cost: O(n log n) and some thousand choices, whatever n is.
"""

from dataclasses import dataclass

import numpy as np

from wlb.cost.flops import FloatArray
from wlb.packing.var_len import place
from wlb.plan import BoolArray, IntArray, offsets_of

OUTLIER = 0.2
"""Work of the smallest outlier, in typical micro-batches."""
CLASS = 0.97
"""Outliers whose work is at least this part of the tallest one of a class are taken for equal: the
oldest of them goes first."""
LEAST = 0.35
"""Global batches that a step takes at least, if that much waits and fits: holding nearly everything
back costs nothing by itself, and steps would alternate between nearly empty and full ones."""
CURVATURE = 0.1
URGENCY = 2.0
NUM_PACKED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a step may take. Tokens; max_delay in steps; price: of a global batch held for a step,
    in typical micro-batch times."""

    num_micro_batches: int
    tokens_per_step: int
    s_max: int
    step_tokens: int
    max_delay: int
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChoices:
    """Outliers [i, i + k) and [j, no) are released; arrays of shape [num_choices]."""

    i: IntArray
    end: IntArray
    j: IntArray

    def released(self, c: int, num: int) -> BoolArray:
        rows = np.zeros(num, bool)
        rows[int(self.i[c]) : int(self.end[c])] = True
        rows[int(self.j[c]) :] = True
        return rows


class WaitingDocuments:
    """All waiting documents in the order of the decision, with the sums that scoring needs.

    Arrays are indexed by position: outliers (by class, oldest first), then ordinary documents by
    descending work. forced: those that must leave now. `order[position]` is the row of the input.
    """

    def __init__(self, length: IntArray, work: IntArray, age: IntArray, limits: StepLimits) -> None:
        self.limits = limits
        total = max(1, int(length.sum()))
        per_micro_batch = limits.tokens_per_step / limits.num_micro_batches
        self.typical = max(1.0, int(work.sum()) / total * per_micro_batch)
        order = np.argsort(-work, kind="stable")
        self.num_outliers = int(np.searchsorted(-work[order], -OUTLIER * self.typical, "right"))
        self.starts = _classes(work[order][: self.num_outliers])
        cls = np.zeros(len(order), np.int64)
        cls[self.starts[1:]] = 1
        cls = np.cumsum(cls)
        cls[self.num_outliers :] = len(order) + np.arange(len(order) - self.num_outliers)
        order = order[np.lexsort((-age[order], cls))]
        self.order, self.length, self.work, self.age = order, length[order], work[order], age[order]
        self.forced = self._forced()
        no = self.num_outliers
        self.sum_work = offsets_of(self.work[:no])
        self.sum_length = offsets_of(self.length[:no])
        self.sum_price = offsets_of(self.length[:no] * (self.age[:no] + 1))
        hold = np.where(self.forced[:no], 1, 0)
        self.sum_forced_work = offsets_of(self.work[:no] * hold)
        self.sum_forced_length = offsets_of(self.length[:no] * hold)
        self.sum_forced_price = offsets_of(self.length[:no] * (self.age[:no] + 1) * hold)
        self.fluid = Fluid(self)

    def _forced(self) -> BoolArray:
        """Documents at the maximum delay, oldest first, as many as both caps allow: one that finds
        no micro-batch would keep its tokens of T from documents that do."""
        rows = np.flatnonzero(self.age >= self.limits.max_delay)
        rows = rows[np.argsort(-self.age[rows], kind="stable")]
        rows = rows[np.cumsum(self.length[rows]) <= self.limits.step_tokens]
        if self._left_over(rows[np.argsort(-self.length[rows], kind="stable")]):
            rows = np.delete(rows, self._left_over(rows))
        forced = np.zeros(len(self.age), bool)
        forced[rows] = True
        return forced

    def _left_over(self, rows: IntArray) -> list[int]:
        """Which of these, by their places, find no micro-batch in this order."""
        lengths, work = self.length[rows].tolist(), self.work[rows].tolist()
        num, s_max = self.limits.num_micro_batches, self.limits.s_max
        return place(lengths, work, num_micro_batches=num, s_max=s_max)[1]


class Fluid:
    """Ordinary documents that need not leave, by descending work; shapes [num + 1] for the sums."""

    def __init__(self, waiting: WaitingDocuments) -> None:
        no = waiting.num_outliers
        self.rows = no + np.flatnonzero(~waiting.forced[no:])
        length, work = waiting.length[self.rows], waiting.work[self.rows]
        self.sum_length, self.sum_work = offsets_of(length), offsets_of(work)
        self.tokens, self.work = int(self.sum_length[-1]), int(self.sum_work[-1])
        price = int((length * (waiting.age[self.rows] + 1)).sum())
        self.price = price / self.tokens if self.tokens else 0.0
        must = no + np.flatnonzero(waiting.forced[no:])
        self.forced_tokens = int(waiting.length[must].sum())
        self.forced_work = int(waiting.work[must].sum())
        density = waiting.typical / waiting.limits.tokens_per_step
        density *= waiting.limits.num_micro_batches
        self.density = self.work / self.tokens if self.tokens else density

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
        enough = np.flatnonzero(self.sum_work[last[:first]] - self.sum_work[:first] >= work)
        if int(self.sum_work[-1] - self.sum_work[first]) >= work:
            return first, len(self.rows)
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
        packed, rows = _packed_score(waiting, choices, c)
        if packed < best_score or best_rows is None:
            best_score, best_rows = packed, rows
    assert best_rows is not None
    out = np.zeros(len(length), bool)
    out[waiting.order[best_rows]] = True
    return out


def _classes(work: IntArray) -> IntArray:
    """First position of each class of nearly equal outliers; `work` descends."""
    starts: list[int] = []
    at = 0
    while at < len(work):
        starts.append(at)
        at = int(np.searchsorted(-work, -CLASS * float(work[at]), "right"))
    return np.array(starts, np.int64)


def _choices(waiting: WaitingDocuments) -> ReleaseChoices:
    """All choices of the form that fit the token cap."""
    no, num = waiting.num_outliers, waiting.limits.num_micro_batches
    starts = np.append(waiting.starts, no)
    most = int(waiting.limits.step_tokens / max(1, int(waiting.length[:no].min(initial=1 << 62))))
    counts = np.arange(min(no, most, 8) + 1)
    if no > 8:
        steps = np.arange(1, 8 * max(1, most // num + 1)) * num // 8
        counts = np.unique(np.concatenate([counts, 2 ** np.arange(4, no.bit_length()), steps]))
    i, k, j = (a.ravel() for a in np.meshgrid(starts, counts, starts, indexing="ij"))
    end = i + k
    # k = 0 is "all from i on" and has j = i; with k > 0 something is held between the two parts.
    keep = np.where(k > 0, (end < j) & (i < no), j == i)
    i, end, j = i[keep], end[keep], j[keep]
    tokens = waiting.sum_length[end] - waiting.sum_length[i] + waiting.sum_length[no]
    tokens -= waiting.sum_length[j]
    extra = waiting.sum_forced_length[i] + waiting.sum_forced_length[j]
    extra -= waiting.sum_forced_length[end]
    taken = tokens + extra + waiting.fluid.forced_tokens
    # With the ordinary documents that may come along; what a step must take, if any choice can.
    fits = taken <= waiting.limits.step_tokens
    possible = np.minimum(taken + waiting.fluid.tokens, waiting.limits.step_tokens)
    least = min(LEAST * waiting.limits.tokens_per_step, int(possible[fits].max()))
    keep = fits & (possible >= max(1.0, least))
    return ReleaseChoices(i=i[keep], end=end[keep], j=j[keep])


def _score(waiting: WaitingDocuments, choices: ReleaseChoices) -> FloatArray:
    """Scores with a lower bound on the slowest micro-batch, shape [num_choices]."""
    limits, fluid, no = waiting.limits, waiting.fluid, waiting.num_outliers
    i, end, j = choices.i, choices.end, choices.j

    def released(total: IntArray, forced: IntArray) -> IntArray:
        always = forced[i] + forced[j] - forced[end]
        return total[end] - total[i] + total[no] - total[j] + always

    tokens = released(waiting.sum_length, waiting.sum_forced_length) + fluid.forced_tokens
    work = released(waiting.sum_work, waiting.sum_forced_work) + fluid.forced_work
    price = waiting.sum_price[no] - released(waiting.sum_price, waiting.sum_forced_price)
    tallest = _tallest(waiting, choices)
    room = np.minimum(limits.step_tokens - tokens, fluid.tokens)
    light_tokens, light_work = fluid.lightest(room)
    heavy_tokens, heavy_work = fluid.heaviest(room)
    # Ordinary documents as heavy as it takes to make the mean as high as the tallest document.
    missing = tallest * limits.num_micro_batches - work
    is_light = light_work >= missing
    taken_work = np.where(is_light, light_work, np.minimum(heavy_work, missing))
    taken = np.where(is_light, light_tokens, heavy_tokens)
    mean = (work + taken_work) / limits.num_micro_batches
    level = np.maximum(np.maximum(tallest, mean), _pigeonhole(waiting, choices))
    level = np.maximum(level, _crowded(waiting, choices, tokens + taken, work + taken_work))
    held = waiting.sum_length[no] - (tokens - fluid.forced_tokens) + fluid.tokens - taken
    price_held = price + (fluid.tokens - taken) * fluid.price
    return _total(waiting, choices, level - mean, price_held, held)


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
    """Work of the tallest released outlier, shape [num_choices]."""
    no = waiting.num_outliers
    if not no:
        return np.zeros(len(choices.i), np.int64)
    height = np.append(_running_max_from(waiting), 0)
    first = np.where(choices.end > choices.i, choices.i, choices.j)
    forced = np.flatnonzero(waiting.forced[:no])
    forced_height = int(waiting.work[forced].max()) if forced.size else 0
    return np.maximum(height[first], forced_height)


def _running_max_from(waiting: WaitingDocuments) -> IntArray:
    """Most work from a position on: classes descend, but inside a class age decides the order."""
    work = waiting.work[: waiting.num_outliers]
    return np.maximum.accumulate(work[::-1])[::-1]


def _pigeonhole(waiting: WaitingDocuments, choices: ReleaseChoices) -> FloatArray:
    """Of N + 1 outliers two share a micro-batch, of 2N + 1 three do: at least the least of them."""
    num, no = waiting.limits.num_micro_batches, waiting.num_outliers
    work = np.append(waiting.work[:no], 0)
    k = choices.end - choices.i

    def at(position: int) -> IntArray:
        row = np.where(position < k, choices.i + position, choices.j + position - k)
        return work[np.minimum(row, no)]

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
    no = waiting.num_outliers
    class_end = np.append(np.append(waiting.starts[1:], no), no)
    first = np.where(choices.end > choices.i, choices.i, choices.j)
    stop = np.where(choices.end > choices.i, choices.end, no)
    cls = np.searchsorted(waiting.starts, first, "right") - 1
    out = np.zeros(len(tokens))
    for end in (np.minimum(stop, first + num), np.minimum(stop, class_end[cls])):
        k = end - first
        top_work = waiting.sum_work[end] - waiting.sum_work[first]
        rest = tokens - (waiting.sum_length[end] - waiting.sum_length[first])
        over = np.maximum(0, rest - (num - k) * s_max)
        # Divided first: tokens times ns would not fit 64 bits.
        on_top = over / np.maximum(1, rest) * (work - top_work)
        is_used = (k > 0) & (k <= num)
        out = np.maximum(out, np.where(is_used, (top_work + on_top) / np.maximum(1, k), 0.0))
    return out


def _shortfall(waiting: WaitingDocuments, choices: ReleaseChoices) -> FloatArray:
    """What a held document that is taller than the mean lacks in company, times its urgency."""
    limits, no = waiting.limits, waiting.num_outliers
    if not no:
        return np.zeros(len(choices.i))
    i, end, j = choices.i, choices.end, choices.j
    first = np.where(i > 0, 0, end)
    is_held = (i > 0) | (j > end)
    height = np.where(is_held, np.append(waiting.work[:no], 0)[first], 0)
    # The company: held outliers, tallest first, up to the token cap; then ordinary documents.
    sums = waiting.sum_length
    held = sums[i] + sums[j] - sums[end]
    cap = np.minimum(held, limits.step_tokens)
    rest = np.maximum(0, cap - sums[i])
    stop = np.searchsorted(sums, sums[end] + rest, "right") - 1
    stop_below = np.searchsorted(sums, np.minimum(cap, sums[i]), "right") - 1
    company = waiting.sum_work[stop_below] + np.maximum(
        0, waiting.sum_work[stop] - waiting.sum_work[end]
    )
    ordinary = np.minimum(limits.step_tokens - cap, limits.tokens_per_step * 6 // 5)
    reached = (company + ordinary * waiting.fluid.density) / limits.num_micro_batches
    lacking = np.maximum(0.0, height - reached) / waiting.typical
    # A class is sorted by age: its first held document is its oldest.
    age = np.append(waiting.age[:no], 0)[first]
    urgency = np.minimum(1.0, (age + 1) / limits.max_delay)
    is_tall = is_held & (height > 1.02 * waiting.typical)
    return np.where(is_tall, URGENCY * urgency * urgency * urgency * lacking, 0.0)


def _packed_score(
    waiting: WaitingDocuments, choices: ReleaseChoices, c: int
) -> tuple[float, IntArray]:
    """(score, positions released) of choice c with its outliers really packed."""
    limits, fluid, no = waiting.limits, waiting.fluid, waiting.num_outliers
    rows = np.flatnonzero(choices.released(c, no) | waiting.forced[:no])
    lengths, work = waiting.length[rows], waiting.work[rows]
    num, s_max = limits.num_micro_batches, limits.s_max
    placed, rest = place(lengths.tolist(), work.tolist(), num_micro_batches=num, s_max=s_max)
    loads = [int(work[members].sum()) for members in placed]
    sizes = [int(lengths[members].sum()) for members in placed]
    room = limits.step_tokens - int(lengths.sum()) - fluid.forced_tokens
    missing = max(loads) * num - sum(loads) - fluid.forced_work
    first, last = fluid.window(min(room, fluid.tokens), missing)
    tokens = int(fluid.sum_length[last] - fluid.sum_length[first])
    ordinary = int(fluid.sum_work[last] - fluid.sum_work[first])
    level = _poured(loads, sizes, tokens + fluid.forced_tokens, ordinary + fluid.forced_work, s_max)
    taken = np.concatenate([rows, no + np.flatnonzero(waiting.forced[no:]), fluid.rows[first:last]])
    if rest or level is None:
        return np.inf, taken
    left = np.ones(len(waiting.length), bool)
    left[taken] = False
    held = waiting.length[left]
    price = int((held * (waiting.age[left] + 1)).sum())
    wait = level - (sum(loads) + ordinary + fluid.forced_work) / num
    one = ReleaseChoices(i=choices.i[[c]], end=choices.end[[c]], j=choices.j[[c]])
    score = _total(
        waiting, one, np.array([wait]), np.array([float(price)]), held.sum(keepdims=True)
    )
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
