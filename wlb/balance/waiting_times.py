"""When ranks wait for each other, and how much work each bin should have (its target).

A bin is one micro-batch of one rank, and a slot is the set of bins that run at the same time. There
are three cases:

- `Slots`: ranks wait for each other after every micro-batch, and any bin may go to any rank.
- `RankSlots`: ranks wait for each other after every micro-batch, and bins stay on their ranks.
- `RankTotals`: ranks wait for each other once in a step. So only the sum of a rank's bins matters.

In the first two cases, all bins of a slot have the same target, so that no rank waits. In the third
case the total work of ranks is compared instead.

Each case computes how long a step takes (`time`), by how much each bin exceeds its target
(`excess`), and which bins exchange units in a round (`pairs`).
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wlb.balance.exchange import SharedBins
from wlb.balance.fill import levels
from wlb.plan import IntArray
from wlb.plan.arrays import FloatArray

NUM_PARTNERS = 6
"""In consecutive rounds a bin exchanges units with this many different bins, before they repeat."""
Pairs = tuple[IntArray, IntArray]
"""Pairs of bins that exchange units: the first and the second bin of each, shape [num_pairs]."""


class WaitingRule(Protocol):
    """When ranks wait for each other. This decides how long a step takes for given bins.

    A bin is one micro-batch of one rank. The argument `loads` is the work of each bin, shape
    [num_bins].
    """

    def time(self, loads: FloatArray) -> float:
        """Return how long a step takes, in the unit of work, given the work of each bin."""
        ...

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Compute how much work each bin should have (its target), given the work it has now."""
        ...

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return the work of each bin minus the work that it should have, shape [num_bins].

        An entry is negative if the bin should get more work.
        """
        ...

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Return the pairs of bins that exchange units in a round.

        The first bin of each pair is one of those with the largest excess.

        Args:
            excess: What `excess` returned, shape [num_bins].
            turn: Index of the round. Pairs differ from round to round.
        """
        ...


@dataclass(slots=True)
class Slots:
    """How long a step takes if ranks wait after every micro-batch, and any bin may go to any rank.

    A bin is one micro-batch of one rank. The bins are sorted by descending work and cut into slots
    of num_ranks bins that run at the same time. No other division of the bins into slots is faster.
    """

    num_ranks: int  # number of data-parallel ranks
    # Work that each bin should have, so that no rank waits; shape [num_bins]. Set by `aim`.
    target: FloatArray = field(init=False)

    def time(self, loads: FloatArray) -> float:
        """Return how long a step takes: the work of each slot's heaviest bin, summed over slots.

        A slot is `num_ranks` bins that run at the same time.

        Args:
            loads: Work of each bin, shape [num_bins].
        """
        return float(np.sort(loads)[::-1][:: self.num_ranks].sum())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Set the work that each bin should have. Bins that run at the same time get the same."""
        order = np.argsort(-loads, kind="stable")
        slots = order.reshape(-1, self.num_ranks)
        self.target = np.empty(loads.size)
        self.target[order] = np.repeat(_level(bins, loads, slots), self.num_ranks)

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return the work of each bin minus its `target`; may be negative. Shape [num_bins]."""
        return loads - self.target

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Return pairs of bins as in `WaitingRule.pairs`. Both bins may be on any ranks."""
        num = excess.size
        order = np.argsort(excess, kind="stable")
        return _partners(order[None], min(num // 2, max(num // self.num_ranks, num // 8)), turn)


@dataclass(slots=True)
class RankSlots:
    """How long a step takes if ranks wait after every micro-batch and bins stay on their ranks.

    A bin is one micro-batch of one rank. Bins r * num to (r + 1) * num - 1 belong to rank r, with
    num bins for each rank, and run in descending order of work.
    """

    num_ranks: int  # number of data-parallel ranks
    # whether a unit (samples that move together) may only move to another bin of its rank
    stay_on_ranks: bool
    # Work that each bin should have, so that no rank waits; shape [num_bins]. Set by `aim`.
    target: FloatArray = field(init=False)

    def time(self, loads: FloatArray) -> float:
        """Return how long a step takes: the sum over micro-batches of the slowest rank's work."""
        return float(np.sort(loads.reshape(self.num_ranks, -1), 1).max(0).sum())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Set the work that each bin should have. Bins that run at the same time get the same."""
        by_rank = loads.reshape(self.num_ranks, -1)
        num = by_rank.shape[1]
        order = np.argsort(-by_rank, 1, kind="stable") + np.arange(self.num_ranks)[:, None] * num
        level = _level(bins, loads, order.T)
        self.target = np.empty(loads.size)
        self.target[order] = level[None]

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return the work of each bin minus its `target`; may be negative. Shape [num_bins]."""
        return loads - self.target

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Return the pairs of bins that exchange units in a round, as in `WaitingRule.pairs`.

        If units must stay on their ranks, both bins of a pair are on the same rank.
        """
        by_rank = excess.reshape(self.num_ranks, -1)
        num = by_rank.shape[1]
        if self.stay_on_ranks:
            order = np.argsort(by_rank, 1, kind="stable") + np.arange(self.num_ranks)[:, None] * num
            return _partners(order, min(num // 2, max(1, num // 4)), turn)
        order = np.argsort(excess, kind="stable")
        return _partners(order[None], min(excess.size // 2, max(num, excess.size // 8)), turn)


@dataclass(slots=True)
class RankTotals:
    """How long a step takes if ranks wait for each other only at its end.

    Then only a rank's total work matters. A bin is one micro-batch of one rank. With num bins for
    each rank, bins r * num to (r + 1) * num - 1 belong to rank r.
    """

    num_ranks: int  # number of data-parallel ranks

    def time(self, loads: FloatArray) -> float:
        """Return how long a step takes: the total work of the slowest rank."""
        return float(loads.reshape(self.num_ranks, -1).sum(1).max())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Do nothing: ranks are compared by their total work, so no bin has a target of its own."""

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return, for each bin, the total work of its rank minus the mean total of all ranks."""
        totals = loads.reshape(self.num_ranks, -1).sum(1)
        return np.repeat(totals - totals.mean(), loads.size // self.num_ranks)

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Pair a bin of each slow rank with a bin of a faster rank.

        Which bins and ranks are paired differs from round to round.

        Args:
            excess: For each bin, the total work of its rank minus the mean total of all ranks.
            turn: Number of the round of exchanges, from 0.
        """
        num = excess.size // self.num_ranks
        ranks = np.argsort(excess[::num], kind="stable")
        top, low = _partners(ranks[None], self.num_ranks // 2, turn)
        return top * num + turn % num, low * num + (turn + turn // num) % num


def _level(bins: SharedBins, loads: FloatArray, slots: IntArray) -> FloatArray:
    """Return for each slot the work that each of its bins should have, shape [num_slots].

    A bin is one micro-batch of one rank, and a slot is the set of bins that run at the same time.
    If every bin has the returned work, no rank waits for another one.

    Args:
        bins: The bins, with their units.
        loads: Work of each bin.
        slots: Indices of the bins that run at the same time, shape [num_slots, num_ranks].
    """
    heaviest = bins.work[bins.members[:, 0]]
    return levels(heaviest[slots].max(1), loads[slots].mean(1))


def _partners(order: IntArray, num: int, turn: int) -> Pairs:
    """Pair the bins (micro-batches) that exceed their target work most with other bins.

    Args:
        order: Indices of bins in one or several groups, shape [num_groups, bins of a group]. Each
            group is sorted by ascending work above target. Both bins of a pair are in one group.
        num: Number of pairs in each group.
        turn: Index of the round. Partners change from round to round.
    """
    top, rest = order[:, ::-1][:, :num], order[:, : order.shape[1] - num]
    start = turn % NUM_PARTNERS * num
    low = np.take(rest, np.arange(start, start + num), axis=1, mode="wrap")
    return top.ravel(), low.ravel()
