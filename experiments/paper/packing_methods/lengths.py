"""Derives example lengths like those of FLAN 20K, OrcaMath 20K and Stack 20K.

The paper ("Enhancing Training Efficiency Using Packing with Flash Attention") prints no lengths of
examples, but its tables have enough numbers to derive them (`Dataset`).

Lengths are not random draws but quantiles of a lognormal: the i-th of n is the (i + 1/2) / n
quantile. The median is solved for, so that the total is right. So a data set has one list of
lengths, and a seed only shuffles it. As in the paper's histograms, the modes of FLAN and OrcaMath
are near 100 and 400 tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from wlb.plan import IntArray

MSL = 4096
"""Maximum sequence length: tokens of the longest example in the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set whose lengths follow a lognormal, with parameters derived from the paper's tables.

    - **Number of examples**: with padding, a row is an example. The tables have 19,961 rows for
      FLAN with Mistral's tokenizer and 20,000 for OrcaMath. FLAN's number depends on the tokenizer
      (19,947 to 19,974 of 20,000), so examples longer than 4,096 tokens were left out. Stack has
      312 steps of 64 examples, which are all 20,000.
    - **Number of tokens**: Time x Tok/s is the same for all methods of a table: 9.22 million
      (FLAN), 7.90 million (OrcaMath) and 27.0 million (Stack).
    - **Spread**: a packer that cuts nothing leaves more of a row empty if examples are longer. So
      the steps of random and sorted packing, in rows of 8,192 and 16,384 tokens, determine the
      spread. Lognormals of sigma 1.0, 0.6 and 1.4 reproduce them within 1%.
    - **Long examples**: Stack still has all 20,000 examples, so long ones must have been cut and
      not left out. This also fits its steps 3% better.
    """

    title: str
    num_examples: int  # examples that are trained
    tokens: int  # tokens of these examples
    sigma: float  # standard deviation of the logarithm of lengths
    longest: int | None = MSL  # tokens of the longest example; None if there is no limit
    is_cut: bool = False  # whether longer examples are cut at `longest`, instead of left out
    num_left_out: int = 0  # examples that were left out; `num_examples` does not count them

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
        """Returns the median of the lognormal for which the trained examples have `tokens` tokens.

        It is the median before examples are cut or left out.
        """

        def excess(log_median: float) -> float:
            return float(self._quantiles(math.exp(log_median)).sum()) - self.tokens

        return math.exp(_root(excess))

    def lengths(self) -> IntArray:
        """Returns the tokens of each example in rising order, shape [num_examples].

        Apart from rounding, their sum is `tokens`.
        """
        return _whole(self._quantiles(self.median))

    def left_out(self) -> IntArray:
        """Returns the tokens of the examples that are left out, shape [num_left_out]."""
        if not self.num_left_out:
            return np.zeros(0, np.int64)
        return _whole(self._between(self.median, self.longest, None, self.num_left_out))

    def uncut(self) -> IntArray:
        """Returns the lengths that the examples had before they were cut, by the lognormal."""
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
        """Returns quantiles of the lognormal between two lengths.

        Args:
            median: Median of the lognormal.
            low: Lower end of the range. None: 0.
            high: Upper end of the range. None: no upper end.
            num: Number of quantiles, the middles of equally likely parts. Defaults to num_examples.
        """
        num = num or self.num_examples
        start = 0.0 if low is None else float(ndtr(math.log(low / median) / self.sigma))
        stop = 1.0 if high is None else float(ndtr(math.log(high / median) / self.sigma))
        share = start + (stop - start) * (np.arange(num) + 0.5) / num
        return median * np.exp(self.sigma * ndtri(share))


def _root(excess: Callable[[float], float]) -> float:
    """Returns the logarithm of tokens at which the increasing function `excess` is 0."""
    return float(brentq(excess, math.log(1e-3), math.log(1e9)))  # pyright: ignore[reportArgumentType]


def _whole(lengths: np.ndarray) -> IntArray:
    return np.maximum(1, np.rint(lengths)).astype(np.int64)


FLAN = Dataset(title="FLAN", num_examples=19_961, tokens=9_220_000, sigma=1.0, num_left_out=39)
ORCA_MATH = Dataset(title="OrcaMath", num_examples=20_000, tokens=7_900_000, sigma=0.6)
STACK = Dataset(title="Stack", num_examples=20_000, tokens=27_000_000, sigma=1.4, is_cut=True)
DATASETS = {dataset.title: dataset for dataset in (FLAN, ORCA_MATH, STACK)}
