"""refine: single documents are moved and swapped until the slowest micro-batch cannot be lowered.

Between the slowest micro-batch and each of the fastest, the ideal exchange moves half of the
difference; documents of about that work are moved, or swapped with the nearest to ideal there. The
exchange with the lowest maximum of the two is made while it lowers it and S_max holds.
Cost: at most `max_rounds` rounds of some 300 exchanges, 0.2 ms each.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

Exchange = tuple[int, int, int, int | None]
"""(new maximum of the two, fast micro-batch, document for it, document that comes back or None)."""
MOST_OTHERS = 8
MOST_SWAPPED = 16
WORTHWHILE = 2e-4
"""An exchange that gains less, in parts of the mean, is the last one."""


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
    sizes = [sum(map(lengths.__getitem__, members)) for members in rows]
    packing = _Packing([list(members) for members in rows], lengths, work, loads, sizes)
    for rounds in range(max_rounds):
        top = int(np.argmax(loads))
        if loads[top] <= good_enough * mean or len(packing.rows[top]) < 2:
            break
        found = packing.best_exchange(top, s_max)
        if found is None or (loads[top] - found[0] < WORTHWHILE * mean and rounds):
            break
        packing.exchange(top, *found[1:])
    return packing.rows


@dataclass(frozen=True, slots=True)
class _Packing:
    """Documents of each micro-batch, with the micro-batches' ns (loads) and tokens (sizes)."""

    rows: list[list[int]]
    lengths: list[int]
    work: list[int]
    loads: list[int]
    sizes: list[int]

    def best_exchange(self, top: int, s_max: int) -> Exchange | None:
        """The exchange with `top`, the slowest, that lowers the maximum most; None if none does."""
        rows, loads, work = self.rows, self.loads, self.work
        best: Exchange | None = None
        lowest = loads[top]
        mine = sorted(rows[top], key=work.__getitem__)
        my_heights = [work[d] for d in mine]
        fastest = sorted((j for j in range(len(rows)) if j != top), key=lambda j: (loads[j], j))
        for j in fastest[:MOST_OTHERS]:
            there = sorted(rows[j], key=work.__getitem__)
            heights = [work[e] for e in there]
            half = (loads[top] - loads[j]) // 2
            at = bisect_left(my_heights, half)
            tried: list[tuple[int, int | None]] = [(d, None) for d in mine[max(0, at - 1) : at + 1]]
            for d in mine[-MOST_SWAPPED:]:
                at = bisect_left(heights, work[d] - half)
                tried += [(d, e) for e in there[max(0, at - 1) : at + 1]]
            for d, e in tried:
                moved = work[d] - (work[e] if e is not None else 0)
                highest = max(loads[top] - moved, loads[j] + moved)
                if highest < lowest:
                    tokens = self.lengths[d] - (self.lengths[e] if e is not None else 0)
                    if self.sizes[j] + tokens <= s_max and self.sizes[top] - tokens <= s_max:
                        lowest, best = highest, (highest, j, d, e)
        return best

    def exchange(self, top: int, j: int, d: int, e: int | None) -> None:
        """Document d goes from micro-batch `top` to j; e, if there is one, comes back."""
        for document, source, target in ((d, top, j), (e, j, top)):
            if document is not None:
                self.rows[source].remove(document)
                self.rows[target].append(document)
                self.loads[source] -= self.work[document]
                self.loads[target] += self.work[document]
                self.sizes[source] -= self.lengths[document]
                self.sizes[target] += self.lengths[document]
