"""improve: what is placed, what rules hold, and exchanges until a step is no longer shortened."""

from dataclasses import dataclass

import numpy as np

from wlb.balance.exchange import SharedBins, share, sums_by
from wlb.balance.waiting_times import Waits
from wlb.plan import IntArray
from wlb.plan.arrays import FloatArray

GOOD_ENOUGH = 1.00002
"""Time over the bound at which exchanges end."""
STALE, WORTHWHILE = 10, 1e-4
"""Exchanges end once this many rounds together have gained less than this share of the time."""
CLOSE = 1.001
"""Time over the bound below which a tenth of that gain is worth a round."""
NEARLY = 1.0001
"""Time over the bound below which exchanges go on to GOOD_ENOUGH or the last round."""
MOST_PAIRS, MOST_ROUNDS = 7_000, 150
"""Pairs of bins looked at in all, and rounds, which bound the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an assignment has to keep to; see `balance_step`.

    counts: fewest and most samples of a rank, None where any number will do. name: of the
    mini-batch, for errors.
    """

    num_ranks: int
    cap: int
    slots_wait: bool
    multiple: int = 1
    at_least: int = 1
    num: int | None = None
    counts: tuple[int, int] | None = None
    name: str = "the step"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """What is placed as a whole, heaviest first: float64 whole numbers, shape [num_units].

    group: of each unit, numbered from 0, where the units of a group must meet on one rank.
    rank: of each unit, where they stay on the ranks that have them.
    """

    work: FloatArray
    tokens: FloatArray
    samples: FloatArray
    group: IntArray | None = None
    rank: IntArray | None = None

    def select(self, chosen: IntArray) -> "Units":
        return Units(
            work=self.work[chosen], tokens=self.tokens[chosen], samples=self.samples[chosen]
        )

    @property
    def stay(self) -> bool:
        """Whether exchanges may not take a unit from its rank."""
        return self.group is not None or self.rank is not None

    def padded(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        work, tokens, samples = (np.append(x, 0.0) for x in (self.work, self.tokens, self.samples))
        return work, tokens, samples


def improve(
    units: Units, bin_of: IntArray, rank: IntArray, waits: Waits, rules: Rules, bound: float
) -> IntArray:
    """Exchanges between bins while they shorten the step; the best assignment found."""
    bins = SharedBins.of(units.padded(), bin_of, rank)
    loads = bins.work[bins.members].sum(1)
    best, best_members = waits.time(loads), bins.members
    stale_from, worth, turn, rounds = 0, best, 0, 1
    while turn < rounds and best > bound * GOOD_ENOUGH:
        if turn % 6 == 0:
            waits.aim(bins, loads)
        excess = waits.excess(loads)
        top, low = waits.pairs(excess, turn)
        if not top.size:  # one bin a rank, whose units may not leave it
            break
        rounds = min(MOST_ROUNDS, max(16, MOST_PAIRS // top.size))
        spare = None if rules.counts is None else _spare(bins, rules, top, low)
        before = bins.members
        bins.members = before.copy() if before is best_members else before
        share(bins, top, low, excess=excess, cap=rules.cap, spare=spare, turn=turn)
        loads = bins.work[bins.members].sum(1)
        now = waits.time(loads)
        if now < best:
            best, best_members = now, bins.members
        gain = WORTHWHILE if best > bound * CLOSE else WORTHWHILE / 10
        if best < worth * (1 - gain):
            worth, stale_from = best, turn
        turn += 1
        if turn - stale_from > STALE and best > bound * NEARLY:
            break
    bins.members = best_members
    return bins.bin_of()


def _spare(bins: SharedBins, rules: Rules, top: IntArray, low: IntArray) -> FloatArray:
    """Samples that each bin may gain and lose: what its rank may, divided over the rank's bins of
    this round.
    """
    least, most = rules.counts or (0, 0)
    held = sums_by(bins.rank, bins.samples[bins.members].sum(1))
    busy = np.bincount(bins.rank[np.concatenate([top, low])], minlength=held.size).clip(1)
    return np.stack([(most - held) // busy, (held - least) // busy])[:, bins.rank]
