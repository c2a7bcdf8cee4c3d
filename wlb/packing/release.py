"""Which waiting documents a step of the `bounded` policy takes.

A choice releases outliers (`waiting`) by height: [first, end) and all from `tail` on. All choices
are scored with a lower bound on the slowest micro-batch at either end of the range of prices
(`_wait` and `_delay` have the terms), then the best few are packed and scored again.
Guarantees: documents at the maximum delay leave, oldest first, as far as the caps allow; equal on
all hosts (single IEEE operations). Cost: O(n log n) and some thousand choices, whatever n is.
"""

import numpy as np

from wlb.packing.waiting import CLASS, ReleaseChoices, StepLimits, WaitingDocuments
from wlb.packing.water_filling import poured
from wlb.plan import BoolArray, FloatArray, IntArray

LEAST = 0.35
"""Global batches that a step takes at least, if that much waits and fits: holding nearly everything
back costs nothing by itself, and steps would alternate between nearly empty and full ones."""
CURVATURE = 0.1
URGENCY = 2.0
NUM_PACKED = 8


def choose(
    length: IntArray,
    work: IntArray,
    age: IntArray,
    limits: StepLimits,
    *,
    ends: IntArray | None = None,
) -> BoolArray:
    """Which of the waiting documents (shapes [n], n >= 1) the next step takes: shape [n].

    ends: their work at the ends of the range of prices, shape [num_ends, n]; None = `work` alone.
    """
    ends = work[None] if ends is None else ends
    waiting = WaitingDocuments(length, work, age, limits, ends=ends)
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
    # possible: with the ordinary documents that still fit. least: what a step has to take, unless
    # no choice can.
    fits = taken <= limits.step_tokens
    possible = np.minimum(taken + waiting.ordinary.tokens, limits.step_tokens)
    least = min(LEAST * limits.tokens_per_step, int(possible[fits].max()))
    return choices.at(fits & (possible >= max(1.0, least)))


def _score(waiting: WaitingDocuments, choices: ReleaseChoices) -> FloatArray:
    """Scores with a lower bound on the slowest micro-batch, shape [num_choices]."""
    limits, ordinary = waiting.limits, waiting.ordinary
    num = limits.num_micro_batches
    released = choices.released(waiting.sums) + choices.held(waiting.forced_sums)
    held, _, price = (waiting.sums[:, -1:] - released)[:3]
    tokens, work = released[0] + ordinary.forced_tokens, released[1] + ordinary.forced_work
    room = np.minimum(limits.step_tokens - tokens, ordinary.tokens)
    light_tokens, light_work, light_ends = ordinary.lightest(room)
    heavy_tokens, heavy_work, heavy_ends = ordinary.heaviest(room)
    # Take ordinary documents heavy enough to raise the mean to the tallest document's work.
    missing = _tallest(waiting, choices, waiting.work) * num - work
    is_light = light_work >= missing
    part = np.minimum(1.0, np.maximum(0, missing) / np.maximum(1, heavy_work))
    taken = np.where(is_light, light_tokens, heavy_tokens)
    fluid = np.where(is_light, light_ends, heavy_ends * part)
    at_ends = released[3:] + ordinary.forced_ends
    mean = (at_ends + fluid) / num
    level = mean.copy()
    for row, x in enumerate(waiting.ends):
        for bound in (_tallest(waiting, choices, x), _pigeonhole(waiting, choices, x)):
            level[row] = np.maximum(level[row], bound)
    left = ordinary.tokens - taken
    if len(level) == 1:
        crowded = _crowded(waiting, choices, tokens + taken, num * mean[0])
        wait = _wait(waiting, np.maximum(level, crowded) - mean)
    else:
        wait = _skewed(waiting, choices, level, mean, fluid)
    return wait + _delay(waiting, choices, price + left * ordinary.price, held + left)


def _wait(waiting: WaitingDocuments, ends: FloatArray) -> FloatArray:
    """What waiting for the slowest micro-batch costs, in typical micro-batches' time: [n].

    ends: slowest micro-batch - mean at each end of the prices, shape [num_ends, n]. x + x^2 /
    CURVATURE at the worse end: the square makes one step of 1.10 dearer than ten of 1.01.
    """
    x = (ends / waiting.typical_ends).max(0)
    return x + x * x / CURVATURE


def _delay(
    waiting: WaitingDocuments, choices: ReleaseChoices, price_held: FloatArray, held: IntArray
) -> FloatArray:
    """What holding back costs, in typical micro-batches' time, shape [num_choices].

    price * (held tokens * (1 + age) + B^2 / (2 * (T - 1))): delay, with B all held tokens and T - 1
    what a step can catch up. `_shortfall`: tall documents collect company in time; without it a
    rare one leaves alone at its last moment. Tokens in global batches.
    """
    limits = waiting.limits
    batch = float(limits.tokens_per_step)
    backlog = held / batch
    spare = (limits.step_tokens - limits.tokens_per_step) / batch
    delay = price_held / batch + backlog * backlog / (2 * spare)
    return limits.price * delay + _shortfall(waiting, choices)


def _skewed(
    waiting: WaitingDocuments,
    choices: ReleaseChoices,
    level: FloatArray,
    mean: FloatArray,
    fluid: FloatArray,
) -> FloatArray:
    """`_wait`, with what no share of tokens can level at both ends of the prices: [num_choices].

    The k tallest documents have a micro-batch each. With few ordinary documents beside them these
    are the slowest where attention is dear, and with many where it is cheap. Of the shares that
    make their micro-batches average at one end, and of none, the best counts. level, mean, fluid
    (work of ordinary documents): shape [num_ends, num_choices].
    """
    num, start = waiting.limits.num_micro_batches, choices.tallest
    end = _class_end(waiting, choices)
    k = end - start
    top = (waiting.sums[:, end] - waiting.sums[:, start])[3:]
    shares = [np.zeros(len(k))]
    for row in range(len(level)):
        share = (k * mean[row] - top[row]) / np.maximum(1.0, fluid[row])
        shares.append(np.clip(share, 0.0, 1.0))
    best = np.full(len(k), np.inf)
    for share in shares:
        work = top + share * fluid
        others = np.where(k < num, (mean * num - work) / np.maximum(1, num - k), 0.0)
        highest = np.maximum(level, np.maximum(work / np.maximum(1, k), others))
        best = np.minimum(best, _wait(waiting, highest - mean))
    return np.where(k > 0, best, _wait(waiting, level - mean))


def _class_end(waiting: WaitingDocuments, choices: ReleaseChoices) -> IntArray:
    """End of the released outliers of the tallest one's class, at most N of them."""
    num, num_outliers, starts = (
        waiting.limits.num_micro_batches,
        waiting.num_outliers,
        waiting.class_starts,
    )
    class_end = np.append(starts[1:], [num_outliers, num_outliers])
    first = choices.tallest
    stop = np.where(choices.end > choices.first, choices.end, num_outliers)
    height_class = np.searchsorted(starts, first, "right") - 1
    return np.minimum(np.minimum(stop, class_end[height_class]), first + num)


def _tallest(waiting: WaitingDocuments, choices: ReleaseChoices, work: IntArray) -> IntArray:
    """Work (of all documents at some price) of the tallest released outlier, shape [num_choices];
    0 if none is released."""
    work = work[: waiting.num_outliers]
    # Inside a class documents are sorted by age, so take the most work from each position on.
    highest = np.append(np.maximum.accumulate(work[::-1])[::-1], 0)
    forced = int(work[waiting.forced[: work.size]].max(initial=0))
    return np.maximum(highest[choices.tallest], forced)


def _pigeonhole(waiting: WaitingDocuments, choices: ReleaseChoices, work: IntArray) -> FloatArray:
    """Lower bound: of N + 1 outliers at least two share a micro-batch, of 2N + 1 three."""
    num, num_outliers = waiting.limits.num_micro_batches, waiting.num_outliers
    work = np.append(work[:num_outliers], 0)
    count = choices.end - choices.first

    def at(n: int) -> IntArray:
        """Work of the n-th outlier that each choice releases; 0 if it releases fewer."""
        row = np.where(n < count, choices.first + n, choices.tail + n - count)
        return work[np.minimum(row, num_outliers)]

    two = np.where(at(num) > 0, at(num) + at(num - 1), 0)
    three = np.where(at(2 * num) > 0, at(2 * num) + at(2 * num - 1) + at(2 * num - 2), 0)
    # Inside a class documents are sorted by age, so the lightest may be lighter by this factor.
    return CLASS * np.maximum(two, three)


def _crowded(
    waiting: WaitingDocuments, choices: ReleaseChoices, tokens: IntArray, work: FloatArray
) -> FloatArray:
    """The first k documents have a micro-batch each; what does not fit the other N - k under S_max
    comes on top of them. With k once the tallest class, once as many as there are micro-batches.
    tokens, work: of each choice's step."""
    num, s_max = waiting.limits.num_micro_batches, waiting.limits.s_max
    num_outliers, first = waiting.num_outliers, choices.tallest
    stop = np.where(choices.end > choices.first, choices.end, num_outliers)
    out = np.zeros(len(tokens))
    for end in (np.minimum(stop, first + num), _class_end(waiting, choices)):
        k = end - first
        top = waiting.sums[:, end] - waiting.sums[:, first]
        top_tokens, top_work = top[:2]
        rest = tokens - top_tokens
        over = np.maximum(0, rest - (num - k) * s_max)
        # Divided first: tokens times ns would not fit 64 bits.
        on_top = over / np.maximum(1, rest) * (work - top_work)
        out = np.maximum(out, np.where(k > 0, (top_work + on_top) / np.maximum(1, k), 0.0))
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
    lengths, num = waiting.length[rows], limits.num_micro_batches
    placed, rest = waiting.place(rows)
    index = np.concatenate([np.array(members, np.int64) for members in placed])
    micro_batch = np.repeat(np.arange(num), [len(members) for members in placed])
    values = [lengths, waiting.work[rows], *waiting.ends[:, rows]]
    sizes, loads, *ends = (_sums(x[index], micro_batch, num) for x in values)
    room = limits.step_tokens - int(lengths.sum()) - ordinary.forced_tokens
    missing = int(loads.max()) * num - int(loads.sum()) - ordinary.forced_work
    first, last = ordinary.window(min(room, ordinary.tokens), missing)
    tokens = int(ordinary.sum_length[last] - ordinary.sum_length[first]) + ordinary.forced_tokens
    fluid = ordinary.sum_ends[:, last] - ordinary.sum_ends[:, first] + ordinary.forced_ends[:, 0]
    taken = np.concatenate([rows, ordinary.forced_rows, ordinary.rows[first:last]])
    level = poured(np.stack(ends), sizes, tokens, fluid, limits.s_max)
    if rest or level is None:
        return np.inf, taken
    held = np.delete(waiting.length, taken)
    price = (held * (np.delete(waiting.age, taken) + 1)).sum(keepdims=True)
    mean = (np.stack(ends).sum(1) + fluid) / num
    wait = _wait(waiting, (level.max(1) - mean)[:, None])
    score = wait + _delay(waiting, choice, price.astype(float), held.sum(keepdims=True))
    return float(score[0]), taken


def _sums(values: IntArray, group: IntArray, num_groups: int) -> IntArray:
    """Sum of the values of each group, in integers."""
    out = np.zeros(num_groups, np.int64)
    np.add.at(out, group, values)
    return out
