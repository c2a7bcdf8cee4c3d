"""Derives example lengths like those of FLAN 20K, OrcaMath 20K and Stack 20K.

The paper ("Enhancing Training Efficiency Using Packing with Flash Attention") prints no length of
an example, but its tables hold enough to derive them (`Dataset`). A length is a quantile of a
lognormal, not a random draw: the i-th of n is the (i + 1/2) / n quantile, and the median is solved
for so that the total is right. A data set thus has one list of lengths, and a seed only shuffles
it. The paper's histograms of FLAN and OrcaMath have their modes near 100 and 400 tokens, as here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from wlb.plan import IntArray

MSL = 4096
"""The paper's examples have at most this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Describes a data set by the number, tokens and spread of its examples, from the tables.

    - **Number of examples**: the Rows of padding are 19,961 for FLAN with Mistral's tokenizer and
      20,000 for OrcaMath. FLAN's differ by tokenizer (19,947 to 19,974 of 20,000), so examples over
      the maximum sequence length (msl) of 4,096 tokens were left out. Stack has 312 steps of 64, so
      all 20,000.
    - **Number of tokens**: Time x Tok/s is the same for every method of a table of one GPU: 9.22
      million (FLAN), 7.90 million (OrcaMath), 27.0 million (Stack).
    - **Spread**: a packer that cuts nothing fills rows the worse, the longer the examples are at
      which it ends rows. The steps of random and of sorted packing at rows of 8,192 and 16,384
      therefore tell the spread. Lognormals of sigma 1.0, 0.6 and 1.4 meet them within 1%.
    - **Long examples**: a lognormal of sigma 1.4 that is left out above 4,096 fits Stack 3% worse
      than one that is cut there; since 20,000 of 20,000 examples are left, they must have been cut.

    num_examples, tokens: examples that are trained, and their tokens
    sigma: standard deviation of the lengths' logarithm
    longest: tokens of the longest example, None if there is no limit
    is_cut: whether longer examples are cut at `longest`; else they are left out
    num_left_out: examples that are left out and not in num_examples
    """

    title: str
    num_examples: int
    tokens: int
    sigma: float
    longest: int | None = MSL
    is_cut: bool = False
    num_left_out: int = 0

    def __post_init__(self) -> None:
        if self.num_examples < 1 or self.tokens < self.num_examples:
            raise ValueError(
                f"{self.title}: {self.num_examples} examples of {self.tokens} tokens; give at "
                f"least one example, and one token for each"
            )
        if self.longest is not None and self.tokens >= self.num_examples * self.longest:
            raise ValueError(
                f"{self.title}: {self.tokens} tokens are more than {self.num_examples} examples "
                f"of less than {self.longest} tokens hold"
            )
        if self.sigma <= 0:
            raise ValueError(f"{self.title}: sigma = {self.sigma}; it must be above 0")
        if self.longest is None and (self.is_cut or self.num_left_out):
            raise ValueError(f"{self.title}: nothing is cut or left out without a longest example")

    @property
    def median(self) -> float:
        """Returns the median of the lognormal before cutting or leaving out, given `tokens`."""

        def excess(log_median: float) -> float:
            return float(self._quantiles(math.exp(log_median)).sum()) - self.tokens

        return math.exp(_root(excess))

    def lengths(self) -> IntArray:
        """Returns the tokens of each example, rising, shape [num_examples].

        Their sum is `tokens`, but for rounding.
        """
        return _whole(self._quantiles(self.median))

    def left_out(self) -> IntArray:
        """Returns the tokens of the examples that are left out, shape [num_left_out]."""
        if not self.num_left_out:
            return np.zeros(0, np.int64)
        return _whole(self._between(self.median, self.longest, None, self.num_left_out))

    def uncut(self) -> IntArray:
        """Returns `lengths()` before they were cut, as far as the lognormal knows."""
        return _whole(self._between(self.median, None, None if self.is_cut else self.longest))

    def shuffled(self, seed: int) -> IntArray:
        return np.random.default_rng(seed).permutation(self.lengths())

    def _quantiles(self, median: float) -> np.ndarray:
        if not self.is_cut:
            return self._between(median, None, self.longest)
        longest = np.inf if self.longest is None else self.longest
        return np.minimum(self._between(median, None, None), longest)

    def _between(
        self, median: float, low: int | None, high: int | None, num: int | None = None
    ) -> np.ndarray:
        """Returns the middles of `num` equally likely parts of the lognormal from `low` to
        `high`.
        """
        num = num or self.num_examples
        start = 0.0 if low is None else float(ndtr(math.log(low / median) / self.sigma))
        stop = 1.0 if high is None else float(ndtr(math.log(high / median) / self.sigma))
        share = start + (stop - start) * (np.arange(num) + 0.5) / num
        return median * np.exp(self.sigma * ndtri(share))


def _root(excess: Callable[[float], float]) -> float:
    """Returns a logarithm of tokens where `excess`, which rises, is 0."""
    return float(brentq(excess, math.log(1e-3), math.log(1e9)))  # pyright: ignore[reportArgumentType]


def _whole(lengths: np.ndarray) -> IntArray:
    return np.maximum(1, np.rint(lengths)).astype(np.int64)


FLAN = Dataset(title="FLAN", num_examples=19_961, tokens=9_220_000, sigma=1.0, num_left_out=39)
ORCA_MATH = Dataset(title="OrcaMath", num_examples=20_000, tokens=7_900_000, sigma=0.6)
STACK = Dataset(title="Stack", num_examples=20_000, tokens=27_000_000, sigma=1.4, is_cut=True)
DATASETS = {dataset.title: dataset for dataset in (FLAN, ORCA_MATH, STACK)}
