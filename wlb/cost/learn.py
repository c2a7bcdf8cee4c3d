"""Learns prices from measured passes: each rank fits its own times, and the ranks vote.

A rank fits each term (attention and linear layers, forward and backward) by medians over its cells,
so that outliers count little, and divides by its own linear layers' forward factor: a rank that is
slower in everything votes like the others. A vote is a count in a bin of a logarithmic scale, so
that votes add up in an all-reduce whose size does not depend on the number of ranks, and the median
vote is the same integer everywhere. `next_prices` follows it by bounded steps.
"""

from dataclasses import dataclass, field
from math import ldexp, log2, sqrt
from typing import NamedTuple

import numpy as np

from wlb.cost.calibrate import LINEAR
from wlb.plan import TERMS, FloatArray, PriceFactors
from wlb.plan.prices import UNIT

RELATIVE = ("attention_forward", "attention_backward", "linear_backward")
"""Terms whose factor over that of linear layers forward is voted on."""
EXTRAS = ("linear_forward_extra_ns", "linear_backward_extra_ns")
SUBJECTS = ("linear_forward", *RELATIVE, *EXTRAS)
"""What is voted on: a row of a ballot each."""
BINS = 1025
_PER_OCTAVE = 64
"""Bins of factors reach from 1/256 to 256, 1.1% each."""
_EXTRA_PER_OCTAVE = 32
"""Bins of ns reach from 1 ns to 4 s, 2.2% each."""
_MOST_CELLS = 256
"""Cells of a term that a line is fitted to: pairs of cells are compared."""
_LEAST_CELLS = 8
_LEAST_SPREAD = 0.1
"""A pair of cells gives a slope if its prices differ by more than this share of the mean price."""
MOST_ERROR = 0.05
"""Largest standard error of a slope, over the slope, with which the line is used."""

COMMON_OFF = 0.25


class RankVote(NamedTuple):
    """A rank's fit. factors: measured over base price, by term. extra_ns: a layer and micro-batch,
    forward and backward."""

    factors: dict[str, float]
    extra_ns: tuple[float, float]


def _no_cells() -> dict[str, list[tuple[float, float]]]:
    return {name: [] for name in TERMS}


@dataclass(slots=True)
class RankCells:
    """A rank's cells (a micro-batch on a stage) since the last vote: base prices beside times.

    Times of linear layers are a layer's, so that stages of different depth fit one line. Cells that
    hold a constant of unknown size (FSDP's collectives) count where there are no others, and only
    for the slope of a line.
    """

    _cells: dict[str, list[tuple[float, float]]] = field(default_factory=_no_cells)
    _shifted: dict[str, list[tuple[float, float]]] = field(default_factory=_no_cells)

    def add(
        self,
        term: str,
        base_ns: float,
        measured_ns: float,
        *,
        layers: int = 1,
        is_shifted: bool = False,
    ) -> None:
        """Add a cell of `layers` layers; one without a price or a time is ignored."""
        if base_ns > 0 and measured_ns > 0:
            cells = self._shifted if is_shifted else self._cells
            cells[term].append((base_ns / layers, measured_ns / layers))

    def clear(self) -> None:
        """Forget the cells."""
        for cells in (*self._cells.values(), *self._shifted.values()):
            cells.clear()

    def vote(self) -> RankVote | None:
        """The fit of all terms; None, which is no vote, where some term cannot be fitted."""
        factors: dict[str, float] = {}
        extra_ns: list[float] = []
        for name in TERMS:
            fit = self._fit(name)
            if fit is None:
                return None
            factors[name], extra = fit
            if name in LINEAR:
                extra_ns.append(extra)
        return RankVote(factors, (extra_ns[0], extra_ns[1]))

    def _fit(self, name: str) -> tuple[float, float] | None:
        """Factor and constant in ns."""
        if not self._cells[name]:
            line = _line(*np.array(self._shifted[name]).T) if self._shifted[name] else None
            return None if line is None else (line.slope, 0.0)
        base, measured = np.array(self._cells[name]).T
        ratio = _weighted_median(measured / base, base)
        line = _line(base, measured) if name in LINEAR else None
        if line is None or abs(line.constant_ns) < 2 * line.error * float(base.mean()):
            return ratio, 0.0  # a constant that may be noise only makes the slope less certain
        return line.slope, max(0.0, line.constant_ns)


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


class _Line(NamedTuple):
    """error: standard error of the slope."""

    slope: float
    constant_ns: float
    error: float


def _line(base: FloatArray, measured: FloatArray) -> _Line | None:
    """The line of measured over base by the median of pairs' slopes (Theil and Sen),
    weighted by distance; None where cells are too few, too alike or too noisy to tell it.

    A constant may be below 0, where the profile prices calls too high.
    """
    if base.size > _MOST_CELLS:
        some = np.linspace(0, base.size - 1, _MOST_CELLS).astype(np.int64)
        base, measured = base[some], measured[some]
    if base.size < _LEAST_CELLS:
        return None
    i, j = np.triu_indices(base.size, 1)
    far = np.abs(base[i] - base[j]) > _LEAST_SPREAD * base.mean()
    i, j = i[far], j[far]
    if i.size < _LEAST_CELLS:
        return None
    apart = base[i] - base[j]
    slope = _weighted_median((measured[i] - measured[j]) / apart, np.abs(apart))
    rest = measured - slope * base
    constant = float(np.median(rest))
    sigma = 1.4826 * float(np.median(np.abs(rest - constant)))
    error = sigma / (float(base.std()) * sqrt(base.size))
    if slope <= 0 or error > MOST_ERROR * slope:
        return None
    return _Line(slope, constant, error)


def ballot(vote: RankVote | None) -> FloatArray:
    """Shape [len(SUBJECTS), BINS]: a 1 in each row; all 0 without a vote."""
    out = np.zeros((len(SUBJECTS), BINS))
    if vote is None:
        return out
    forward = vote.factors["linear_forward"]
    factors = [forward, *(vote.factors[name] / forward for name in RELATIVE)]
    middle = BINS // 2
    at = [middle + round(log2(factor) * _PER_OCTAVE) for factor in factors]
    at += [round(log2(max(1.0, ns)) * _EXTRA_PER_OCTAVE) for ns in vote.extra_ns]
    out[np.arange(len(SUBJECTS)), np.clip(at, 0, BINS - 1)] = 1
    return out


class Measured(NamedTuple):
    """The median of all ranks' votes. num_votes: ranks that voted. linear_forward: measured over
    base price, in millionths. relative: of `RELATIVE`, over linear_forward, in millionths."""

    num_votes: int
    linear_forward: int
    relative: tuple[int, int, int]
    extra_ns: tuple[int, int]

    @property
    def factors(self) -> dict[str, float]:
        """Measured over base price, by term, over that of linear layers forward."""
        relative = (r / UNIT for r in self.relative)
        return {"linear_forward": 1.0, **dict(zip(RELATIVE, relative, strict=True))}


def counted_votes(total: FloatArray) -> Measured | None:
    """The medians of summed ballots, shape [len(SUBJECTS), BINS]; None where nobody voted."""
    counts = np.rint(total).astype(np.int64)
    num_votes = int(counts[0].sum())
    if not num_votes:
        return None
    reached = counts.cumsum(1)
    # Twice the median's bin: the mean of the two in the middle may lie between bins.
    lower = (reached > (num_votes - 1) // 2).argmax(1)
    twice = (lower + (reached > num_votes // 2).argmax(1)).tolist()
    factors = [round(UNIT * _octaves(t - BINS + 1, 2 * _PER_OCTAVE)) for t in twice[:4]]
    extra = [round(_octaves(t, 2 * _EXTRA_PER_OCTAVE)) if t else 0 for t in twice[4:]]
    return Measured(
        num_votes=num_votes,
        linear_forward=factors[0],
        relative=(factors[1], factors[2], factors[3]),
        extra_ns=(extra[0], extra[1]),
    )


def _octaves(steps: int, per_octave: int) -> float:
    """2 ** (steps / per_octave), whose bits are the same on all CPUs, which those of a power need
    not be; per_octave: a power of two."""
    whole, rest = divmod(steps, per_octave)
    root, out = 2.0, 1.0
    while rest:
        root, per_octave = sqrt(root), per_octave // 2
        if rest >= per_octave:
            rest, out = rest - per_octave, out * root
    return ldexp(out, whole)


class LoadPrices(NamedTuple):
    """Loads of experts' ranks in millionths, as in `PriceFactors`. held: the one that plans are
    made with. measured: that of the last steps."""

    held: int
    measured: int


def next_prices(
    now: PriceFactors,
    measured: Measured,
    *,
    threshold: float,
    max_change: float,
    is_first: bool,
    loads: LoadPrices | None = None,
) -> PriceFactors | None:
    """Prices that follow `measured`, or None where those of `now` are good enough.

    Nothing changes unless a term's factor relative to linear layers forward is wrong by more than
    `threshold`. Relative factors then change by at most `max_change` (0.5: to at most 1.5 times and
    at least 1 / 1.5 of what they were). The common factor, on which no plan depends, is
    taken as measured; it alone is a reason for a change if `is_first` and off by `COMMON_OFF`.
    loads: of a model with experts, held to the same threshold and change as a relative factor.
    """
    current = {name: now.relative[name] for name in RELATIVE}
    wanted = {name: measured.factors[name] for name in RELATIVE}
    off = [_apart(wanted[name], current[name]) for name in RELATIVE]
    if loads is not None:
        off.append(_apart(loads.measured, loads.held))
    common_off = _apart(measured.linear_forward, now.linear_forward) if is_first else 0.0
    if max(off) <= threshold and common_off <= COMMON_OFF:
        return None
    common, most = measured.linear_forward, 1 + max_change
    terms = {
        name: max(1, round(common * min(max(wanted[name], old / most), old * most)))
        for name, old in current.items()
    }
    load = now.expert_load
    if loads is not None:
        held = loads.held
        load = max(UNIT, round(min(max(loads.measured, held / most), held * most)))
    forward, backward = measured.extra_ns
    return PriceFactors(
        linear_forward=common,
        **terms,
        linear_forward_extra_ns=forward,
        linear_backward_extra_ns=backward,
        expert_load=load,
    )


def _apart(a: float, b: float) -> float:
    """How far two factors are apart: 0.1 where one is 1.1 times the other."""
    return max(a, b) / min(a, b) - 1
