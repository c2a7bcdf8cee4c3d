"""refine: single documents moved and swapped until the slowest micro-batch can not be lowered.

Of the slowest micro-batch, each document is tried against each other micro-batch: moved there, or
swapped with the document there whose work is nearest to the ideal exchange. The exchange that
leaves the lowest maximum of the two is made, as long as it lowers it and S_max holds.

Guarantees: the slowest micro-batch never gets slower, and no micro-batch grows beyond S_max.
Cost: at most `max_rounds` rounds of O(documents of the slowest x N log n).
"""

from bisect import bisect_left

import numpy as np

Exchange = tuple[int, int, int, int | None]


def refine(
    rows: list[list[int]],
    lengths: list[int],
    work: list[int],
    *,
    s_max: int,
    max_rounds: int = 32,
    good_enough: float = 1.0005,
) -> list[list[int]]:
    """`rows[j]` = documents of micro-batch j, improved. lengths, work: tokens and ns by document.

    good_enough: stop once slowest / mean is at most that.
    """
    loads = [sum(map(work.__getitem__, members)) for members in rows]
    mean = sum(loads) / len(loads)
    if max(loads) <= good_enough * mean:
        return rows
    rows = [list(members) for members in rows]
    sizes = [sum(map(lengths.__getitem__, members)) for members in rows]
    for _ in range(max_rounds):
        top = int(np.argmax(loads))
        if loads[top] <= good_enough * mean or len(rows[top]) < 2:
            break
        found = _best_exchange(rows, loads, sizes, lengths, work, top, s_max)
        if found is None:
            break
        d, j, _, e = found
        _apply(rows, loads, sizes, lengths, work, top, j, d, e)
    return rows


def _best_exchange(
    rows: list[list[int]],
    loads: list[int],
    sizes: list[int],
    lengths: list[int],
    work: list[int],
    top: int,
    s_max: int,
) -> Exchange | None:
    """(document, micro-batch, new maximum of the two, document back or None), or None."""
    best: Exchange | None = None
    lowest = loads[top]
    order = sorted((j for j in range(len(rows)) if j != top), key=lambda j: (loads[j], j))
    for j in order[:8]:
        there = sorted(rows[j], key=lambda e: work[e])
        heights = [work[e] for e in there]
        for d in rows[top]:
            # The best exchange moves half of the difference.
            ideal = work[d] - (loads[top] - loads[j]) // 2
            at = bisect_left(heights, ideal)
            for e in (None, *there[max(0, at - 1) : at + 1]):
                moved = work[d] - (work[e] if e is not None else 0)
                tokens = lengths[d] - (lengths[e] if e is not None else 0)
                if sizes[j] + tokens > s_max or sizes[top] - tokens > s_max:
                    continue
                highest = max(loads[top] - moved, loads[j] + moved)
                if highest < lowest:
                    lowest, best = highest, (d, j, highest, e)
    return best


def _apply(
    rows: list[list[int]],
    loads: list[int],
    sizes: list[int],
    lengths: list[int],
    work: list[int],
    top: int,
    j: int,
    d: int,
    e: int | None,
) -> None:
    rows[top].remove(d)
    rows[j].append(d)
    moved, tokens = work[d], lengths[d]
    if e is not None:
        rows[j].remove(e)
        rows[top].append(e)
        moved, tokens = moved - work[e], tokens - lengths[e]
    loads[top] -= moved
    loads[j] += moved
    sizes[top] -= tokens
    sizes[j] += tokens
