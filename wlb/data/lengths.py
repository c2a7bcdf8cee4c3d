"""Corpora of which only document lengths are known: given ones, or drawn ones.

They plan, simulate and tune as a token store does. `LengthFamily` mixes, by shares of TOKENS, a
lognormal body, a Pareto tail up to the window, and documents cut at the window. Its defaults
reproduce Table 2 and Figure 12 of WLB-LLM; they are fitted to printed numbers, so other constants
might as well.
Guarantees: equal arguments give equal lengths, in [1, window] for a family, at least 1 from a file.
Cost: 8 bytes a document; some 30 ns to draw one.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from wlb.plan import IntArray, IntLike, UserError, check_at_least
from wlb.plan.arrays import first_true


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthSource:
    """Document lengths (shape [num_documents]) without text; a `Source` of global batches.

    name: for messages. source_id: `Documents.source` of its documents.
    """

    name: str
    lengths: IntArray
    source_id: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", checked_lengths(self.name, self.lengths))

    @property
    def num_documents(self) -> int:
        """Number of documents of the source."""
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())


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


FAMILIES: dict[str, LengthFamily] = {"wlb_paper": LengthFamily()}
"""Named sets of constants."""


def lengths_of_family(
    name: str = "wlb_paper", *, window: int, num_documents: int, seed: int, source_id: int = 0
) -> LengthSource:
    """`num_documents` drawn lengths of a named family for context window `window`."""
    if name not in FAMILIES:
        raise UserError(f"no length family {name!r}; known are {sorted(FAMILIES)}")
    lengths = FAMILIES[name].sample(num_documents, window=window, seed=seed)
    return LengthSource(name=f"{name}({window})", lengths=lengths, source_id=source_id)


def checked_lengths(
    name: str, values: IntLike | list[Any], *, where: Callable[[int], str] = "length {}".format
) -> IntArray:
    """A read-only int64 copy of lengths, whoever gives them; UserError for the first entry that is
    none.

    A length is a whole number of tokens in [1, MOST_LENGTH]: an integer, or a float without a
    fraction that is below `EXACT_FLOATS`. True, None and text are none; files of text have numbers
    as `wlb.plan.numerals.number_of` reads them.

    Args:
        name: Of the source, for messages.
        values: The lengths, shape [n].
        where: Names the place of an entry by its index.
    """
    array = values if isinstance(values, np.ndarray) else np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise UserError(
            f"{name}: lengths are one axis of integers, not {array.dtype} of shape {array.shape}"
        )
    if not isinstance(values, np.ndarray):
        whole = [_whole(name, where, i, value) for i, value in enumerate(values)]
        array = np.array(whole, np.int64)
    elif array.dtype.kind == "f":
        # Floats of 16 bits cannot be compared with the limits.
        array = array.astype(np.promote_types(array.dtype, np.float64))
        is_whole = (array == np.round(array)) & (np.abs(array) < EXACT_FLOATS)
        if (i := first_true(~is_whole)) is not None:
            raise _no_length(name, where(i), array[i].item())
    if not array.size:
        raise UserError(f"{name} has no lengths; the corpus has no document")
    if (i := first_true((array < 1) | (array > MOST_LENGTH))) is not None:
        raise UserError(
            f"{name}: {where(i)} is {array[i]}; a length is at least 1 token and at most "
            f"{MOST_LENGTH}, so leave empty documents out"
        )
    out = array.astype(np.int64)
    out.flags.writeable = False
    return out


MOST_LENGTH = 1 << 62
EXACT_FLOATS = 2.0**53
"""From here on a float may stand for another whole number than its writer meant."""


def _whole(name: str, where: Callable[[int], str], at: int, value: Any) -> int:
    """`value` as an int64; UserError for what is no whole number."""
    if isinstance(value, float | np.floating):
        exact = float(cast("float", value))
        if exact.is_integer() and abs(exact) < EXACT_FLOATS:
            return int(exact)
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = operator.index(value)
        if abs(number) < 1 << 63:
            return number
    raise _no_length(name, where(at), value)


def _no_length(name: str, where: str, value: Any) -> UserError:
    return UserError(
        f"{name}: {where} is {value!r}, not a whole number; give tokens of each document"
    )
