"""A price by length that never falls, tabled once and looked up after that.

Tile-quantised work over measured throughput is not quite monotone in length: inside a tile
throughput may grow a little faster than work (dips of a few percent at most). Packing needs a
longer piece to cost no less, so the price of a length is the greatest price of any length up to it.
That is exact for every length of the dense part; beyond it for knots about 2^(1/4) apart, and
linear between them (at most 1 % above a quadratic price, tile steps apart).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wlb.cost.flops import FloatArray
from wlb.plan import IntArray

_LONGEST = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class MonotoneTable:
    """Prices of lengths 0, 1, ... (dense), then of `knots`; the first knot is the last of these."""

    dense: IntArray
    knots: FloatArray
    knot_prices: FloatArray

    @classmethod
    def of(cls, price: Callable[[FloatArray], FloatArray], *, num_dense: int) -> "MonotoneTable":
        """Tables `price` (lengths [n] to prices [n]), rounded to integers, at every length below
        `num_dense` and on the knots."""
        lengths = np.arange(num_dense, dtype=np.float64)
        dense = np.maximum.accumulate(np.rint(price(lengths)))
        octaves = np.ldexp(1.0, np.arange(27))[:, None] * np.array([1.0, 1.19, 1.41, 1.68])
        knots = np.unique(np.floor((num_dense - 1) * octaves))
        prices = np.maximum.accumulate(np.append(dense[-1], np.rint(price(knots[1:]))))
        tabled = dense.astype(np.int64)
        tabled.flags.writeable = False
        return cls(tabled, knots, prices)

    def at(self, lengths: FloatArray) -> IntArray:
        if not lengths.size or lengths.max() < self.dense.size:
            return self.dense[lengths.astype(np.int64)]
        if lengths.max() > _LONGEST:
            raise ValueError(
                f"cannot price a piece of {lengths.max():.0f} tokens, above {_LONGEST}"
            )
        dense = self.dense[np.minimum(lengths, self.dense.size - 1).astype(np.int64)]
        left = np.maximum(np.searchsorted(self.knots, lengths, side="right") - 1, 0)
        low, high = self.knot_prices[left], self.knot_prices[left + 1]
        weight = (lengths - self.knots[left]) / (self.knots[left + 1] - self.knots[left])
        beyond = np.rint(low + weight * (high - low)).astype(np.int64)
        return np.where(lengths < self.dense.size, dense, beyond)
