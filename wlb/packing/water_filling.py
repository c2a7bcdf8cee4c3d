"""Ordinary documents, taken for a fluid, poured over micro-batches that hold outliers already.

Each token goes where the load at the worst price, as a part of the step, is lowest. A micro-batch
takes tokens as a piecewise linear function of the level, so a sweep over the levels at which one
of these functions bends finds the level at which all tokens are placed.
Guarantees: equal on all hosts (single IEEE operations in a fixed order). Cost: O(N log N).
"""

import numpy as np

from wlb.plan import FloatArray, IntArray


def poured(
    loads: IntArray, sizes: IntArray, tokens: int, work: IntArray, s_max: int
) -> FloatArray | None:
    """Loads at each end of the prices, shape [num_ends, N], once the fluid is levelled over all.

    loads: before, [num_ends, N], ns. sizes: tokens of the micro-batches, [N]. tokens, work: of the
    fluid, work at each end, [num_ends]. None if it does not fit under s_max tokens a micro-batch.
    """
    room = s_max - sizes
    if int(room.sum()) < tokens:
        return None
    step = loads.sum(1) + work
    # An end at which the fluid costs nothing says nothing about where to pour it.
    counts = np.flatnonzero(work > 0)
    if not tokens or not counts.size:
        return loads.astype(float)
    slope = step[counts] / (work[counts] / tokens)
    base = loads[counts] / step[counts, None]
    level = _level_of(base, slope, room, tokens)
    taken = np.clip(((level - base) * slope[:, None]).min(0), 0.0, room)
    return loads + taken * (work / tokens)[:, None]


def _level_of(base: FloatArray, slope: FloatArray, room: IntArray, tokens: int) -> float:
    """The level up to which `tokens` fill micro-batches.

    Up to level x micro-batch j takes the least of (x - base[p, j]) * slope[p] over prices p
    (shapes [num_prices, N], [num_prices]), and at most room[j].
    """
    bends: list[tuple[float, float]] = []
    slopes = slope.tolist()
    for own, most in zip(base.T.tolist(), room.tolist(), strict=True):
        bends += _bends(list(zip(own, slopes, strict=True)), float(most))
    bends.sort()
    level, rate, left = bends[0][0], 0.0, float(tokens)
    for at, change in bends:
        takes = (at - level) * rate
        if takes >= left:
            return level + left / rate
        left, level, rate = left - takes, at, rate + change
    return level


def _bends(lines: list[tuple[float, float]], most: float) -> list[tuple[float, float]]:
    """(level, change of tokens a level) where the least of `lines` (base, slope), between 0 and
    `most` tokens, bends. One line or two."""
    base, slope = max(lines)
    out = [(base, slope)]
    for other, flatter in lines:
        if flatter < slope:
            crossing = (base * slope - other * flatter) / (slope - flatter)
            if (crossing - base) * slope < most:
                out.append((crossing, flatter - slope))
                base, slope = other, flatter
    return [*out, (base + most / slope, -slope)]
