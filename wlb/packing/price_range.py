"""A range of prices: work that is balanced whatever attention costs inside it.

Let a micro-batch hold l of a step's L linear work and a of its A attention work. If attention costs
k times its price, the micro-batch's part of the step is (l + k a) / (L + k A), which only rises or
only falls with k. So what is balanced at both ends of a range is balanced at every price between
them, the forward pass included as far as its prices are those of some k.
Guarantees: equal on all hosts (integer sums and single IEEE operations).
"""

from dataclasses import dataclass

import numpy as np

from wlb.packing.base import PackerOptions
from wlb.plan import IntArray, Pieces, UserError

_UNITS = 2.0**40
"""Sum of the work that `comparable` gives: fine enough for a token of millions of documents, and a
sum of 64 bits is far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRange:
    """Attention may cost low to high times its price, where low <= 1 <= high; 1 and 1: one price.

    The forward pass of the `h100` profile at a window of 128K is k = 0.71 (7B model, TP 8, CP 2).
    """

    low: float = 1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 <= self.high < np.inf:
            raise UserError(
                f"price_range = {self.low}, {self.high}: attention's price may be off by factors "
                f"from above 0 to 1, and from 1 to any finite number; 1, 1 = it is as priced"
            )

    @property
    def is_one_price(self) -> bool:
        """Whether only the price itself counts."""
        return self.low == self.high

    def ends(self, options: PackerOptions, pieces: Pieces, work_ns: IntArray) -> IntArray:
        """Work of each piece at the ends in ns, shape [2, num_pieces]; [1, num_pieces], which is
        `work_ns` (W_a + W_l at price 1, shape [num_pieces]), where there is one price."""
        if self.is_one_price:
            return work_ns[None]
        return np.stack([options.workloads(pieces, factor=k) for k in (self.low, self.high)])


ONE_PRICE = PriceRange()


def comparable(ends: IntArray) -> list[list[int]]:
    """`ends` (shape [num_ends, n], in ns) in units in which each end's sum is about the same, so
    that the larger of a micro-batch's two loads tells how slow it is at its worst price."""
    if len(ends) == 1:
        return [ends[0].tolist()]
    return [
        np.rint(work * (_UNITS / max(1, int(work.sum())))).astype(np.int64).tolist()
        for work in ends
    ]
