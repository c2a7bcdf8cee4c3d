"""When ranks wait for each other, and what follows for the work that each bin should have.

A bin is one micro-batch of one rank, and a slot is the set of bins that run at the same time. There
are three cases:

- `Slots`: ranks wait for each other after every micro-batch, and any bin may go to any rank.
- `RankSlots`: the same, but every bin has its rank already.
- `RankTotals`: ranks wait for each other once in a step, so only a rank's total counts.

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
"""A bin has this many partners in turn, one in each round, before they repeat."""
Pairs = tuple[IntArray, IntArray]
"""The first and the second bin of each pair, shape [num_pairs] each."""


class WaitingRule(Protocol):
    """When ranks wait for each other. `loads` is the work of each bin, shape [num_bins]."""

    def time(self, loads: FloatArray) -> float:
        """Return how long a step takes."""
        ...

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Compute new targets from the present loads."""
        ...

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return the work of each bin above its target, which may be negative."""
        ...

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Return the bins that exchange units in round `turn`.

        These are the bins with most excess, each with a partner that has less.
        """
        ...


@dataclass(slots=True)
class Slots:
    """Slots are made of num_ranks bins each by descending work, which is optimal for given bins."""

    num_ranks: int  # number of data-parallel ranks
    target: FloatArray = field(init=False)  # work that each bin should have, shape [num_bins]

    def time(self, loads: FloatArray) -> float:
        """Return the sum over slots of the heaviest bin."""
        return float(np.sort(loads)[::-1][:: self.num_ranks].sum())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Set each bin's target to the work that the bins of its slot should have."""
        order = np.argsort(-loads, kind="stable")
        slots = order.reshape(-1, self.num_ranks)
        self.target = np.empty(loads.size)
        self.target[order] = np.repeat(_level(bins, loads, slots), self.num_ranks)

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return the work of each bin above its target."""
        return loads - self.target

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Pair the bins with most excess with bins that have less, on any ranks."""
        num = excess.size
        order = np.argsort(excess, kind="stable")
        return _partners(order[None], min(num // 2, max(num // self.num_ranks, num // 8)), turn)


@dataclass(slots=True)
class RankSlots:
    """Bins r * num to (r + 1) * num - 1 belong to rank r, and run in descending order of work."""

    num_ranks: int  # number of data-parallel ranks
    stay_on_ranks: bool  # whether units must stay on their ranks
    target: FloatArray = field(init=False)  # work that each bin should have, shape [num_bins]

    def time(self, loads: FloatArray) -> float:
        """Return the sum over slots of the slowest rank's bin."""
        return float(np.sort(loads.reshape(self.num_ranks, -1), 1).max(0).sum())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Set each bin's target to the work that the bins of its slot should have."""
        by_rank = loads.reshape(self.num_ranks, -1)
        num = by_rank.shape[1]
        order = np.argsort(-by_rank, 1, kind="stable") + np.arange(self.num_ranks)[:, None] * num
        level = _level(bins, loads, order.T)
        self.target = np.empty(loads.size)
        self.target[order] = level[None]

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return the work of each bin above its target."""
        return loads - self.target

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Pair the bins with most excess with others, on the same rank if units must stay there."""
        by_rank = excess.reshape(self.num_ranks, -1)
        num = by_rank.shape[1]
        if self.stay_on_ranks:
            order = np.argsort(by_rank, 1, kind="stable") + np.arange(self.num_ranks)[:, None] * num
            return _partners(order, min(num // 2, max(1, num // 4)), turn)
        order = np.argsort(excess, kind="stable")
        return _partners(order[None], min(excess.size // 2, max(num, excess.size // 8)), turn)


@dataclass(slots=True)
class RankTotals:
    """Only a rank's total counts. Bins r * num to (r + 1) * num - 1 belong to rank r."""

    num_ranks: int  # number of data-parallel ranks

    def time(self, loads: FloatArray) -> float:
        """Return the total of the slowest rank."""
        return float(loads.reshape(self.num_ranks, -1).sum(1).max())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Do nothing, because the target of every rank is the mean."""

    def excess(self, loads: FloatArray) -> FloatArray:
        """Return, for each bin, how far its rank's total is above the mean."""
        totals = loads.reshape(self.num_ranks, -1).sum(1)
        return np.repeat(totals - totals.mean(), loads.size // self.num_ranks)

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Pair a bin of each slow rank with a bin of a fast rank; other bins in every round."""
        num = excess.size // self.num_ranks
        ranks = np.argsort(excess[::num], kind="stable")
        top, low = _partners(ranks[None], self.num_ranks // 2, turn)
        return top * num + turn % num, low * num + (turn + turn // num) % num


def _level(bins: SharedBins, loads: FloatArray, slots: IntArray) -> FloatArray:
    """Return the work that a bin of each slot should have, shape [num_slots].

    Args:
        bins: The bins.
        loads: Work of each bin.
        slots: Bins of each slot, shape [num_slots, num_ranks].
    """
    heaviest = bins.work[bins.members[:, 0]]
    return levels(heaviest[slots].max(1), loads[slots].mean(1))


def _partners(order: IntArray, num: int, turn: int) -> Pairs:
    """Pair the bins with most excess with others, which change from round to round.

    Args:
        order: Bins by ascending excess, shape [num_rows, n]. Both bins of a pair are of one row.
        num: Number of pairs in each row.
        turn: Number of the round.
    """
    top, rest = order[:, ::-1][:, :num], order[:, : order.shape[1] - num]
    start = turn % NUM_PARTNERS * num
    low = np.take(rest, np.arange(start, start + num), axis=1, mode="wrap")
    return top.ravel(), low.ravel()
