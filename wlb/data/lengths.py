"""Draw document lengths from a distribution, for planning and simulation without a corpus.

`LengthFamily` mixes three kinds of documents: a lognormal body, a Pareto tail that ends at the
context window, and documents that were longer and are cut to exactly the window. Each kind has a
share of the TOKENS, not of the documents.
The default constants are fitted to the numbers printed in Table 2 and Figure 12 of the paper. Other
constants may reproduce these numbers equally well.
Guarantees: equal arguments give equal lengths, all in [1, window].
Cost: 8 bytes of memory and about 30 ns per document.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb.data.batches import LengthSource
from wlb.plan import IntArray, UserError, check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFamily:
    """A distribution of document lengths: a body, a tail, and documents of exactly one window.

    All lengths are fractions of the context window, so one family serves every window.
    """

    # Lognormal body. Draws above one window are rejected and redrawn.
    body_median: float = 750 / 131072  # as a fraction of the window
    body_sigma: float = 1.4  # standard deviation of the logarithm of the length
    # Pareto tail between `tail_start` and one window.
    tail_start: float = 0.23  # shortest tail document, as a fraction of the window
    tail_exponent: float = 1.0  # P(length > x) falls as x ** -tail_exponent
    # Shares of the tokens. The body has the remaining tokens.
    tail_token_share: float = 0.10
    window_token_share: float = 0.146  # tokens in documents of exactly one window

    def __post_init__(self) -> None:
        for name in ("body_median", "tail_start"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(
                    f"{name} = {getattr(self, name)} must be above 0 and below 1, because it is a "
                    f"fraction of the context window"
                )
        for name in ("body_sigma", "tail_exponent"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name)} must be above 0 and finite")
        shares = (self.tail_token_share, self.window_token_share)
        if not (min(shares) >= 0 and sum(shares) <= 1):
            raise UserError(
                f"tail_token_share = {shares[0]} and window_token_share = {shares[1]} must each be "
                f"at least 0, and their sum must be at most 1"
            )

    @property
    def document_shares(self) -> tuple[float, float, float]:
        """Fractions of documents in the body, in the tail, and of exactly one window."""
        shares = (
            1 - self.tail_token_share - self.window_token_share,
            self.tail_token_share,
            self.window_token_share,
        )
        # `shares` are shares of the tokens. A share divided by the mean length of its documents is
        # proportional to the number of documents.
        means = (self._body_mean(), self._tail_mean(), 1.0)
        weights = [max(0.0, share) / mean for share, mean in zip(shares, means, strict=True)]
        body, tail, at_window = (weight / sum(weights) for weight in weights)
        return body, tail, at_window

    def sample(self, num_documents: int, *, window: int, seed: int) -> IntArray:
        """Draw `num_documents` lengths in [1, window] tokens, in random order.

        Args:
            num_documents: Number of lengths to draw, at least 1.
            window: Context window in tokens, at least 2.
            seed: Seed of the random numbers.

        Returns:
            Tokens of each document, shape [num_documents].
        """
        check_at_least("num_documents", num_documents, 1)
        check_at_least("window", window, 2, " tokens")
        rng = np.random.Generator(np.random.PCG64(seed))
        body, tail, _ = self.document_shares
        # Part of each document: 0 = body, 1 = tail, 2 = exactly one window. `out` is initially one
        # window for every document.
        part = np.searchsorted([body, body + tail], rng.random(num_documents), side="right")
        out = np.ones(num_documents)
        out[part == 0] = self._draw_body(rng, int((part == 0).sum()))
        out[part == 1] = self._draw_tail(rng, int((part == 1).sum()))
        return np.clip(np.rint(out * window), 1, window).astype(np.int64)

    def _draw_body(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        mu = math.log(self.body_median)
        out = rng.lognormal(mu, self.body_sigma, count)
        while (over := np.flatnonzero(out > 1)).size:
            out[over] = rng.lognormal(mu, self.body_sigma, over.size)
        return out

    def _draw_tail(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        # Inverse transform sampling of a Pareto distribution that is truncated at one window.
        cut = 1 - self.tail_start**self.tail_exponent
        return self.tail_start * (1 - cut * rng.random(count)) ** (-1 / self.tail_exponent)

    def _body_mean(self) -> float:
        # Mean of a lognormal distribution that is truncated at 1 (one window).
        z = -math.log(self.body_median) / self.body_sigma
        whole = self.body_median * math.exp(self.body_sigma**2 / 2)
        return whole * _normal_cdf(z - self.body_sigma) / _normal_cdf(z)

    def _tail_mean(self) -> float:
        # Mean of a Pareto distribution that is truncated at 1 (one window). The general
        # formula does not hold for exponent 1.
        start, exponent = self.tail_start, self.tail_exponent
        cut = 1 - start**exponent
        if exponent == 1:
            return -start * math.log(start) / cut
        return exponent / (exponent - 1) * (start - start**exponent) / cut


def _normal_cdf(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


DRAWN = "wlb_paper"
"""The default family. It imitates the corpus of the paper, which is not public."""
FAMILIES: dict[str, LengthFamily] = {DRAWN: LengthFamily()}
"""All length families by name."""


def enough_of_family(name: str = DRAWN, *, window: int, num_tokens: int, seed: int) -> LengthSource:
    """Draw as many document lengths of a named family as are needed for `num_tokens` tokens.

    The number is estimated from a sample. The documents usually have about 10% more tokens than
    needed, and seldom fewer.

    Args:
        name: Name of the distribution, a key of `FAMILIES`.
        window: Context window in tokens.
        num_tokens: Tokens that the documents should have together.
        seed: Seed of the random numbers.
    """
    # Estimate the mean length from a small sample, then draw 10% more documents than needed.
    some = lengths_of_family(name, window=window, num_documents=4096, seed=0)
    needed = num_tokens * some.num_documents / some.num_tokens
    return lengths_of_family(name, window=window, num_documents=int(1.1 * needed) + 1, seed=seed)


def lengths_of_family(
    name: str = DRAWN, *, window: int, num_documents: int, seed: int, source_id: int = 0
) -> LengthSource:
    """Draw `num_documents` document lengths of a named family.

    Args:
        name: Name of the distribution, a key of `FAMILIES`.
        window: Context window in tokens, which is also the longest length.
        num_documents: Number of documents to draw.
        seed: Seed of the random numbers.
        source_id: Value of `Documents.source` for these documents.
    """
    if name not in FAMILIES:
        raise UserError(
            f"{name!r} is not a distribution of document lengths; use one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    lengths = FAMILIES[name].sample(num_documents, window=window, seed=seed)
    return LengthSource(name=f"{name}({window})", lengths=lengths, source_id=source_id)
