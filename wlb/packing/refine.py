"""refine: single documents are moved and swapped until the slowest micro-batch cannot be lowered.

Between the slowest micro-batch and each of the fastest, the ideal exchange moves half of the
difference; documents of about that work are moved, or swapped with the nearest to ideal there. The
exchange with the lowest maximum of the two is made while it lowers it and S_max holds. With two
prices a micro-batch's load is the larger of its two, and differences are taken at the price that
makes the slowest one slow.
Cost: at most `max_rounds` rounds of some 300 exchanges, 0.2 ms each.
"""

from bisect import bisect_left
from dataclasses import dataclass

Exchange = tuple[int, int, int, int | None]
"""(new maximum of the two, fast micro-batch, document for it, document that comes back or None)."""

# These three bound the time of a round and the number of rounds. Halved and doubled none changes
# the imbalance of `bounded` by more than 0.0001 (fitted stream, ProLong, library, N = 4).
MOST_OTHERS = 8
"""Fastest micro-batches with which the slowest one tries exchanges."""
MOST_SWAPPED = 16
"""Documents of most work in the slowest micro-batch that are tried for a swap."""
WORTHWHILE = 2e-4
"""An exchange that gains less, in parts of the mean, is the last one."""


def refine(
    rows: list[list[int]],
    lengths: list[int],
    work: list[int],
    *,
    s_max: int,
    second: list[int] | None = None,
    max_rounds: int = 32,
    good_enough: float = 1.0005,
) -> list[list[int]]:
    """`rows[j]` = documents of micro-batch j, improved. lengths, work: tokens and ns by document.

    second: work at another price, in units of the same sum (`prices.comparable`). good_enough: stop
    once slowest / mean is at most that.
    """
    packing = _Packing.of(rows, lengths, [work] if second is None else [work, second])
    mean = max(sum(loads) for loads in packing.loads) / len(rows)
    for rounds in range(max_rounds):
        slowest = packing.slowest
        top = slowest.index(max(slowest))
        if slowest[top] <= good_enough * mean or len(packing.rows[top]) < 2:
            break
        found = packing.best_exchange(top, s_max)
        if found is None or (slowest[top] - found[0] < WORTHWHILE * mean and rounds):
            break
        packing.exchange(top, *found[1:])
    return packing.rows


@dataclass(frozen=True, slots=True)
class _Packing:
    """Documents of each micro-batch, and micro-batches' tokens (sizes).

    works: of each document, by price. loads: of each micro-batch, by price.
    """

    rows: list[list[int]]
    lengths: list[int]
    works: list[list[int]]
    loads: list[list[int]]
    sizes: list[int]

    @classmethod
    def of(cls, rows: list[list[int]], lengths: list[int], works: list[list[int]]) -> "_Packing":
        loads = [[sum(map(work.__getitem__, members)) for members in rows] for work in works]
        sizes = [sum(map(lengths.__getitem__, members)) for members in rows]
        return cls([list(members) for members in rows], lengths, works, loads, sizes)

    @property
    def slowest(self) -> list[int]:
        """Each micro-batch's load at its worst price."""
        return [max(loads) for loads in zip(*self.loads, strict=True)]

    def best_exchange(self, top: int, s_max: int) -> Exchange | None:
        """The exchange with `top`, the slowest, that lowers the maximum most; None if none does."""
        price = max(range(len(self.loads)), key=lambda p: self.loads[p][top])
        rows, loads, work = self.rows, self.loads[price], self.works[price]
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
                highest = self._highest(top, j, d, e)
                if highest < lowest:
                    tokens = self.lengths[d] - (self.lengths[e] if e is not None else 0)
                    if self.sizes[j] + tokens <= s_max and self.sizes[top] - tokens <= s_max:
                        lowest, best = highest, (highest, j, d, e)
        return best

    def _highest(self, top: int, j: int, d: int, e: int | None) -> int:
        """The larger load of micro-batches `top` and j, at any price, after an exchange."""
        highest = 0
        for work, loads in zip(self.works, self.loads, strict=True):
            moved = work[d] - (work[e] if e is not None else 0)
            highest = max(highest, loads[top] - moved, loads[j] + moved)
        return highest

    def exchange(self, top: int, j: int, d: int, e: int | None) -> None:
        """Document d goes from micro-batch `top` to j; e, if there is one, comes back."""
        for document, source, target in ((d, top, j), (e, j, top)):
            if document is not None:
                self.rows[source].remove(document)
                self.rows[target].append(document)
                for work, loads in zip(self.works, self.loads, strict=True):
                    loads[source] -= work[document]
                    loads[target] += work[document]
                self.sizes[source] -= self.lengths[document]
                self.sizes[target] += self.lengths[document]
