"""Document lengths drawn from a family of distributions, as a corpus of which only they are known.

`LengthFamily` mixes, by shares of TOKENS, a lognormal body, a Pareto tail up to the window, and
documents cut at the window. Its defaults reproduce Table 2 and Figure 12 of WLB-LLM; they are
fitted to printed numbers, so other constants might as well.
Guarantees: equal arguments give equal lengths, in [1, window].
Cost: 8 bytes a document; some 30 ns to draw one.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb.data.batches import LengthSource
from wlb.plan import IntArray, UserError, check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFamily:
    """Lengths as a mixture, relative to the window, so that the shape scales with it.

    body_median, tail_start: in windows. body_sigma: of the logarithm. tail_exponent: of the Pareto
    survival function. The two shares are of tokens; the body has the rest. Body draws above the
    window are drawn again.
    """

    body_median: float = 750 / 131072
    body_sigma: float = 1.4
    tail_start: float = 0.23
    tail_exponent: float = 1.0
    tail_token_share: float = 0.10
    atom_token_share: float = 0.146

    def __post_init__(self) -> None:
        for name in ("body_median", "tail_start"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be in (0, 1) windows")
        for name in ("body_sigma", "tail_exponent"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name)} must be above 0")
        shares = (self.tail_token_share, self.atom_token_share)
        if not (min(shares) >= 0 and sum(shares) <= 1):
            raise UserError(
                f"tail_token_share = {shares[0]} and atom_token_share = {shares[1]} must be at "
                f"least 0 and at most 1 together"
            )

    @property
    def document_shares(self) -> tuple[float, float, float]:
        """Probability that a document is of the body, of the tail, or at the window."""
        shares = (
            1 - self.tail_token_share - self.atom_token_share,
            self.tail_token_share,
            self.atom_token_share,
        )
        means = (self._body_mean(), self._tail_mean(), 1.0)
        weights = [max(0.0, share) / mean for share, mean in zip(shares, means, strict=True)]
        body, tail, atom = (weight / sum(weights) for weight in weights)
        return body, tail, atom

    def sample(self, num_documents: int, *, window: int, seed: int) -> IntArray:
        """`num_documents` lengths in [1, window], in random order."""
        check_at_least("num_documents", num_documents, 1)
        check_at_least("window", window, 2, " tokens")
        rng = np.random.Generator(np.random.PCG64(seed))
        body, tail, _ = self.document_shares
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
        cut = 1 - self.tail_start**self.tail_exponent
        return self.tail_start * (1 - cut * rng.random(count)) ** (-1 / self.tail_exponent)

    def _body_mean(self) -> float:
        z = -math.log(self.body_median) / self.body_sigma
        whole = self.body_median * math.exp(self.body_sigma**2 / 2)
        return whole * _normal_cdf(z - self.body_sigma) / _normal_cdf(z)

    def _tail_mean(self) -> float:
        start, exponent = self.tail_start, self.tail_exponent
        cut = 1 - start**exponent
        if exponent == 1:
            return -start * math.log(start) / cut
        return exponent / (exponent - 1) * (start - start**exponent) / cut


def _normal_cdf(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


DRAWN = "wlb_paper"
"""The family of lengths that are drawn where no documents are given: like the paper's."""
FAMILIES: dict[str, LengthFamily] = {DRAWN: LengthFamily()}
"""Named sets of constants."""


def enough_of_family(name: str = DRAWN, *, window: int, num_tokens: int, seed: int) -> LengthSource:
    """Drawn lengths of a named family with at least about `num_tokens` tokens."""
    some = lengths_of_family(name, window=window, num_documents=4096, seed=0)
    needed = num_tokens * some.num_documents / some.num_tokens
    return lengths_of_family(name, window=window, num_documents=int(1.1 * needed) + 1, seed=seed)


def lengths_of_family(
    name: str = DRAWN, *, window: int, num_documents: int, seed: int, source_id: int = 0
) -> LengthSource:
    """`num_documents` drawn lengths of a named family for context window `window`."""
    if name not in FAMILIES:
        raise UserError(f"no length family {name!r}; known are {sorted(FAMILIES)}")
    lengths = FAMILIES[name].sample(num_documents, window=window, seed=seed)
    return LengthSource(name=f"{name}({window})", lengths=lengths, source_id=source_id)
