"""What waits for what, and so how far each bin is from where it should be.

`Slots`: ranks meet in every micro-batch, and any bin may go to any rank. `RankSlots`: the same with
a rank for every bin. `RankTotals`: ranks meet once in a step. Each says how long a step takes
(`time`), by how much a bin exceeds its target (`excess`) and which bins share units in a round.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wlb.balance.exchange import SharedBins
from wlb.balance.fill import levels
from wlb.plan import IntArray
from wlb.plan.arrays import FloatArray

KEPT = 6
"""Rounds for which targets are kept, and partners of a bin before it meets them again."""
Pairs = tuple[IntArray, IntArray]


class Waits(Protocol):
    """What waits for what; loads are of all bins, float64 whole numbers."""

    def time(self, loads: FloatArray) -> float:
        """How long a step takes."""
        ...

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        """Set the targets anew."""
        ...

    def excess(self, loads: FloatArray) -> FloatArray:
        """Work of each bin above its target."""
        ...

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        """Bins that share units in this round: those furthest over, and a partner for each."""
        ...


@dataclass(slots=True)
class Slots:
    """Bins in descending order are slots of num_ranks bins each: the best slots there are."""

    num_ranks: int
    target: FloatArray = field(init=False)

    def time(self, loads: FloatArray) -> float:
        return float(np.sort(loads)[::-1][:: self.num_ranks].sum())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        order = np.argsort(-loads, kind="stable")
        slots = order.reshape(-1, self.num_ranks)
        self.target = np.empty(loads.size)
        self.target[order] = np.repeat(_level(bins, loads, slots), self.num_ranks)

    def excess(self, loads: FloatArray) -> FloatArray:
        return loads - self.target

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        num = excess.size
        order = np.argsort(excess, kind="stable")
        return _partners(order[None], min(num // 2, max(num // self.num_ranks, num // 8)), turn)


@dataclass(slots=True)
class RankSlots:
    """Each rank's bins in descending order are its micro-batches; bin r * num + m is rank r's.

    stay: units may not leave their rank.
    """

    num_ranks: int
    stay: bool
    target: FloatArray = field(init=False)

    def time(self, loads: FloatArray) -> float:
        return float(np.sort(loads.reshape(self.num_ranks, -1), 1).max(0).sum())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        by_rank = loads.reshape(self.num_ranks, -1)
        num = by_rank.shape[1]
        order = np.argsort(-by_rank, 1, kind="stable") + np.arange(self.num_ranks)[:, None] * num
        level = _level(bins, loads, order.T)
        self.target = np.empty(loads.size)
        self.target[order] = level[None]

    def excess(self, loads: FloatArray) -> FloatArray:
        return loads - self.target

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        by_rank = excess.reshape(self.num_ranks, -1)
        num = by_rank.shape[1]
        if self.stay:
            order = np.argsort(by_rank, 1, kind="stable") + np.arange(self.num_ranks)[:, None] * num
            return _partners(order, min(num // 2, max(1, num // 4)), turn)
        order = np.argsort(excess, kind="stable")
        return _partners(order[None], min(excess.size // 2, max(num, excess.size // 8)), turn)


@dataclass(slots=True)
class RankTotals:
    """Only a rank's work in the whole step counts; bin r * num + m is rank r's."""

    num_ranks: int

    def time(self, loads: FloatArray) -> float:
        return float(loads.reshape(self.num_ranks, -1).sum(1).max())

    def aim(self, bins: SharedBins, loads: FloatArray) -> None:
        pass

    def excess(self, loads: FloatArray) -> FloatArray:
        totals = loads.reshape(self.num_ranks, -1).sum(1)
        return np.repeat(totals - totals.mean(), loads.size // self.num_ranks)

    def pairs(self, excess: FloatArray, turn: int) -> Pairs:
        num = excess.size // self.num_ranks
        ranks = np.argsort(excess[::num], kind="stable")
        top, low = _partners(ranks[None], self.num_ranks // 2, turn)
        return top * num + turn % num, low * num + (turn + turn // num) % num


def _level(bins: SharedBins, loads: FloatArray, slots: IntArray) -> FloatArray:
    """Targets of slots; slots: bins of each, shape [num_slots, num_ranks]."""
    heaviest = bins.work[bins.members[:, 0]]
    return levels(heaviest[slots].max(1), loads[slots].mean(1))


def _partners(order: IntArray, num: int, turn: int) -> Pairs:
    """The last `num` of each row of `order`, and others of its row, further on in every turn."""
    top, rest = order[:, ::-1][:, :num], order[:, : order.shape[1] - num]
    start = turn % KEPT * num
    low = np.take(rest, np.arange(start, start + num), axis=1, mode="wrap")
    return top.ravel(), low.ravel()
