"""fill: units into bins that never hold more tokens than their cap, with work near slot levels.

`levels` says how much work a bin of each slot should have: its R heaviest units need not share a
slot with light ones, so slots may differ, and only ranks within a slot must be equal. `fill` gives
the heaviest unit to the bin furthest below its level that has room; where that strands a unit, best
fit by tokens is tried, which wastes least room. Cost: 1 ms for 768 units, 15 to 40 ms for 8,192.
"""

import heapq
from bisect import bisect_left

import numpy as np

from wlb.plan import IntArray
from wlb.plan.arrays import FloatArray

TRIED = 6
"""Bins with too little room that are passed over before the emptiest one is taken."""


def fewest_bins(tokens: FloatArray, *, num_ranks: int, cap: int) -> int:
    """Micro-batches of a rank that units of these tokens need at least."""
    whole = -(-int(tokens.sum()) // (cap * num_ranks))
    return max(1, whole, -(-int((tokens * 2 > cap).sum()) // num_ranks))


def levels(floor: FloatArray, mean: FloatArray) -> FloatArray:
    """max(floor, mean - x), with the x at which it adds up to what `mean` does, or to floor's sum.

    floor: work that a slot cannot go below, its heaviest unit. mean: work of its bins now.
    """
    total, lower = mean.sum(), 0.0
    out = np.maximum(floor, mean)
    for _ in range(20):
        out = np.maximum(floor, mean - lower)
        above, free = out.sum() - total, int((mean - lower > floor).sum())
        if above < 1 or not free:
            break
        lower += above / free
    return out


def fill(
    work: FloatArray,
    tokens: FloatArray,
    *,
    num_ranks: int,
    num: int,
    cap: int,
    heavy_slots: int | None = None,
) -> IntArray | None:
    """The bin of each unit among num_ranks x num, or None if they were not placed.

    work, tokens: of units, heaviest first. Bins of a slot follow one another. heavy_slots: so many
    may have a level above the others, because of their heaviest unit; default any.
    """
    heaviest = work[::num_ranks][: num if heavy_slots is None else heavy_slots]
    floor = np.zeros(num)
    floor[: heaviest.size] = heaviest
    level = levels(floor, np.full(num, work.sum() / (num_ranks * num)))
    by_work = _most_room(work, tokens, np.repeat(level, num_ranks), cap)
    return best_fit(tokens, num=num_ranks * num, cap=cap) if by_work is None else by_work


def _most_room(
    work: FloatArray, tokens: FloatArray, level: FloatArray, cap: int
) -> IntArray | None:
    """Each unit to the bin that is furthest below its level, then to the one with fewest tokens.

    Both come from heaps whose entries are brought up to date when they reach the top.
    """
    excess, size = [-int(x) for x in level], [0] * level.size
    by_excess = [(e, b) for b, e in enumerate(excess)]
    by_size = [(0, b) for b in range(level.size)]
    heapq.heapify(by_excess)
    out = np.zeros(work.size, np.int64)
    all_tokens = tokens.astype(np.int64).tolist()
    full = cap - min(all_tokens)
    for unit, (length, weight) in enumerate(
        zip(all_tokens, work.astype(np.int64).tolist(), strict=True)
    ):
        target = _lowest_with_room(by_excess, excess, size, cap - length, full)
        if target is None:
            while by_size[0][0] != size[b := by_size[0][1]]:
                heapq.heapreplace(by_size, (size[b], b))
            target = by_size[0][1]
            if size[target] + length > cap:
                return None
        out[unit] = target
        excess[target] += weight
        size[target] += length
    return out


def _lowest_with_room(
    heap: list[tuple[int, int]], excess: list[int], size: list[int], most: int, full: int
) -> int | None:
    """The bin with the lowest excess among the first few; bins that nothing fits leave the heap."""
    aside: list[tuple[int, int]] = []
    found = None
    while heap and len(aside) <= TRIED:
        entry = heap[0]
        if entry[0] != excess[entry[1]]:
            heapq.heapreplace(heap, (excess[entry[1]], entry[1]))
        elif size[entry[1]] <= most:
            found = entry[1]
            break
        else:
            heapq.heappop(heap)
            if size[entry[1]] <= full:
                aside.append(entry)
    for entry in aside:
        heapq.heappush(heap, entry)
    return found


def best_fit(tokens: FloatArray, *, num: int, cap: int) -> IntArray | None:
    """Best fit decreasing: each to the fullest bin that has room; None if `num` are too few."""
    order = np.argsort(-tokens, kind="stable")
    room, ids = list[int](), list[int]()
    out = np.zeros(tokens.size, np.int64)
    opened = 0
    for unit, length in zip(order.tolist(), tokens[order].astype(np.int64).tolist(), strict=True):
        at = bisect_left(room, length)
        if at < len(room):
            left, bin_ = room.pop(at) - length, ids.pop(at)
        elif opened == num:
            return None
        else:
            left, bin_, opened = cap - length, opened, opened + 1
        at = bisect_left(room, left)
        room.insert(at, left)
        ids.insert(at, bin_)
        out[unit] = bin_
    return out


def fill_empty(bin_of: IntArray, work: FloatArray, group: IntArray) -> None:
    """Give each bin without a unit the lightest of the bin with most units, in place.

    group: of each bin; a bin takes from bins of its own group.
    """
    counts = np.bincount(bin_of, minlength=group.size)
    for bin_ in np.flatnonzero(counts == 0).tolist():
        giver = int(np.where(group == group[bin_], counts, -1).argmax())
        units = np.flatnonzero(bin_of == giver)
        unit = units[work[units].argmin()]
        bin_of[unit] = bin_
        counts[giver] -= 1
        counts[bin_] = 1
