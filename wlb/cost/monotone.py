"""Tables of prices by length in which a longer piece never costs less than a shorter one.

Computed prices may fall by a few percent as the length grows, because throughput is measured over
whole tiles. So the table stores, for each length, the highest price of this and all shorter
lengths.

Prices of lengths below DENSE tokens are stored one by one. Longer lengths are interpolated between
knots: 512 knots for each doubling of the length up to the longest expected piece, then 4 for each
doubling (error at most 1%).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wlb.plan import FloatArray, IntArray, UserError

DENSE = 4096
"""Lengths below this many tokens have stored prices; prices of longer ones are interpolated."""
_LONGEST = 1 << 26
"""Longest piece that can be priced, in tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class MonotoneTable:
    """Prices by length: stored for each short length, and interpolated for longer ones."""

    dense: IntArray  # prices of lengths 0, 1, 2, ... in ns
    # Rising lengths between which prices are interpolated. The first is the last length of `dense`.
    knots: FloatArray
    knot_prices: FloatArray  # price of each length in `knots`, in ns

    @classmethod
    def of(
        cls, price: Callable[[FloatArray], Sequence[FloatArray]], *, longest: int
    ) -> "list[MonotoneTable]":
        """Tabulate a function of the length that returns one or more prices.

        Args:
            price: Returns one or more arrays of prices in ns, shape [n] each, for lengths of shape
                [n].
            longest: Tokens of the longest expected piece. Longer lengths are interpolated between
                lengths that are far apart.

        Returns:
            One table for each array that `price` returns.
        """
        dense = np.arange(min(DENSE, longest + 1), dtype=np.float64)
        knots = _knots(dense.size - 1, longest)
        prices = price(np.append(dense, knots[1:]))
        return [cls._of(dense.size, knots, np.rint(p)) for p in prices]

    @classmethod
    def _of(cls, num_dense: int, knots: FloatArray, prices: FloatArray) -> "MonotoneTable":
        # A longer piece must not cost less than a shorter one, so take the running maximum.
        rising = np.maximum.accumulate(prices)
        _check_range(rising[num_dense - 1], num_dense - 1)
        tabled = rising[:num_dense].astype(np.int64)
        tabled.flags.writeable = False
        return cls(tabled, knots, rising[num_dense - 1 :])

    def at(self, lengths: FloatArray) -> IntArray:
        """Return the price of each length in whole ns, shape [n]."""
        if not lengths.size or lengths.max() < self.dense.size:
            return self.dense[lengths.astype(np.int64)]
        if lengths.max() > _LONGEST:
            raise UserError(
                f"a piece of {lengths.max():.0f} tokens is too long to be priced; give pieces of "
                f"at most {_LONGEST} tokens"
            )
        dense = self.dense[np.minimum(lengths, self.dense.size - 1).astype(np.int64)]
        # Interpolate between the knots on both sides.
        left = np.maximum(np.searchsorted(self.knots, lengths, side="right") - 1, 0)
        low, high = self.knot_prices[left], self.knot_prices[left + 1]
        weight = (lengths - self.knots[left]) / (self.knots[left + 1] - self.knots[left])
        prices = np.rint(low + weight * (high - low))
        _check_range(prices.max(), lengths.max())
        beyond = prices.astype(np.int64)
        return np.where(lengths < self.dense.size, dense, beyond)


def _check_range(price: float, length: float) -> None:
    # The comparison is negated so that it also refuses NaN.
    if not price < 2.0**63:
        raise UserError(
            f"the cost model predicts {price} ns for a piece of {length:.0f} tokens, but times "
            "must be below 2^63 ns; correct the speeds in the kernel profile"
        )


def _knots(last_dense: int, longest: int) -> FloatArray:
    """Return the rising lengths between which prices are interpolated ("knots"), in tokens.

    They are whole numbers. The last one is above `_LONGEST`, the longest piece that has a price.

    Args:
        last_dense: The first knot: the longest piece whose price is stored, not interpolated.
        longest: Longest expected piece. Above it there are only 4 knots for each doubling.
    """
    # Up to `longest` there are 512 knots for each doubling of the length, then 4.
    octaves = np.ldexp(1.0, np.arange(27))[:, None]
    fine = (last_dense * octaves * (1 + np.arange(512) / 512)).ravel()
    end = max(last_dense, longest)
    coarse = (end * octaves * np.array([1.0, 1.19, 1.41, 1.68])).ravel()
    return np.unique(np.floor(np.concatenate([[last_dense], fine[fine < end], coarse])))
