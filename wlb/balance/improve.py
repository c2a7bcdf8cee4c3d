"""Improves an assignment by exchanging units between bins, while that shortens the step.

A unit is a sample, or samples that must share a micro-batch. A bin is one micro-batch of one rank.
The file also has two records that other files of this folder use: `Units` (what is assigned) and
`Rules` (what an assignment must satisfy).
"""

from dataclasses import dataclass

import numpy as np

from wlb.balance.exchange import SharedBins, redistribute, sums_by
from wlb.balance.waiting_times import WaitingRule
from wlb.plan import IntArray
from wlb.plan.arrays import FloatArray

GOOD_ENOUGH = 1.00002
"""Exchanges end when the time is at most this factor times its lower bound."""
STALE, WORTHWHILE = 10, 1e-4
"""Exchanges end when STALE rounds together shorten the time by less than the share WORTHWHILE."""
CLOSE = 1.001
"""If the time is at most this factor times its lower bound, exchanges continue as long as STALE
rounds together gain a tenth of WORTHWHILE."""
NEARLY = 1.0001
"""If the time is at most this factor times its lower bound, exchanges continue even without gains,
until GOOD_ENOUGH or the last round is reached."""
MOST_PAIRS, MOST_ROUNDS = 7_000, 150
"""Most pairs of bins that exchange units in all rounds together, and most rounds. They limit the
time that exchanges take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an assignment of a mini-batch must satisfy, from the arguments of `balance_step`."""

    num_ranks: int  # number of data-parallel ranks
    cap: int  # most tokens of a micro-batch
    slots_wait: bool  # whether ranks wait for each other after every micro-batch
    multiple: int = 1  # the number of micro-batches of a rank is a multiple of this
    at_least: int = 1  # least number of micro-batches of a rank
    num: int | None = None  # number of micro-batches of a rank; None = as few as fit
    counts: tuple[int, int] | None = None  # fewest and most samples of a rank; None = any number
    name: str = "the step"  # what error messages call the mini-batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """What is assigned as a whole: samples, or atoms (samples that share a micro-batch).

    Units are sorted by descending work. Work, tokens and samples are integers in float64. All
    arrays have shape [num_units].
    """

    work: FloatArray  # predicted work of each unit
    tokens: FloatArray  # tokens of each unit
    samples: FloatArray  # number of samples of each unit
    group: IntArray | None = None  # group of each unit, if the units of a group must share a rank
    rank: IntArray | None = None  # rank of each unit, if units must stay on their ranks

    def select(self, chosen: IntArray) -> "Units":
        """Return the units with these indices. `group` and `rank` of the result are None."""
        return Units(
            work=self.work[chosen], tokens=self.tokens[chosen], samples=self.samples[chosen]
        )

    @property
    def stay_on_ranks(self) -> bool:
        """Whether exchanges must leave each unit on its rank."""
        return self.group is not None or self.rank is not None

    def padded(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return work, tokens and samples, each with a 0 appended.

        `SharedBins` fills up bins with an index that stands for no unit. The 0 is the value at this
        index.
        """
        work, tokens, samples = (np.append(x, 0.0) for x in (self.work, self.tokens, self.samples))
        return work, tokens, samples


def improve(
    units: Units, bin_of: IntArray, rank: IntArray, waiting: WaitingRule, rules: Rules, bound: float
) -> IntArray:
    """Exchange units between bins while that shortens the step.

    A bin is one micro-batch of one rank.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        bin_of: Bin of each unit at the beginning.
        rank: Rank of each bin. Ranks matter only if `rules.counts` limits the samples of a rank.
        waiting: When ranks wait for each other, which decides how long a step takes.
        rules: What the assignment must satisfy.
        bound: Lower bound on the time of the step.

    Returns:
        The bin of each unit in the best assignment that was found.
    """
    bins = SharedBins.of(units.padded(), bin_of, rank)
    loads = bins.work[bins.members].sum(1)
    best, best_members = waiting.time(loads), bins.members
    stale_from, worth, turn, rounds = 0, best, 0, 1
    while turn < rounds and best > bound * GOOD_ENOUGH:
        if turn % 6 == 0:
            waiting.aim(bins, loads)
        excess = waiting.excess(loads)
        top, low = waiting.pairs(excess, turn)
        if not top.size:
            # No exchange is possible, because each rank has a single bin, and units must stay on
            # their ranks.
            break
        rounds = min(MOST_ROUNDS, max(16, MOST_PAIRS // top.size))
        spare = None if rules.counts is None else _spare(bins, rules, top, low)
        before = bins.members
        bins.members = before.copy() if before is best_members else before
        redistribute(bins, top, low, excess=excess, cap=rules.cap, spare=spare, turn=turn)
        loads = bins.work[bins.members].sum(1)
        now = waiting.time(loads)
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
    """Return how many samples each bin may gain and lose in a round, shape [2, num_bins].

    The numbers are such that no rank can get too many or too few samples. What a rank may gain or
    lose is divided over those of its bins that take part in the round.

    Args:
        bins: The bins.
        rules: The permitted numbers of samples of a rank.
        top: First bin of each pair that exchanges units in this round.
        low: Second bin of each pair.
    """
    least, most = rules.counts or (0, 0)
    held = sums_by(bins.rank, bins.samples[bins.members].sum(1))
    busy = np.bincount(bins.rank[np.concatenate([top, low])], minlength=held.size).clip(1)
    return np.stack([(most - held) // busy, (held - least) // busy])[:, bins.rank]
