"""Compares each arm with its baseline, and estimates the noise.

Differences are taken between runs of the same seed, which start with the same weights and read
documents in the same order. The noise is estimated from all runs at once (`leftover`). Confidence
intervals are Student's t. `joint_factor` says how much wider they must be to hold for all
comparisons at once.

Steps of different policies end at different numbers of tokens. So a loss at a given number of
tokens is interpolated between two evaluations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from experiments.paper.fig16.arms import ARMS, BASELINE, Arm
from experiments.paper.fig16.bookkeeping import Bookkeeping
from experiments.paper.fig16.outcome import Result
from wlb.plan import FloatArray

CONFIDENCE = 0.95
NO_DELAY = "hold-0"
Measure = Callable[[Result], float]
"""A number of a run, such as its held-out loss at the end."""


def final(result: Result) -> float:
    """Returns the held-out loss after the whole epoch."""
    return result.final


def train_loss(result: Result) -> float:
    return result.train_loss


def long_loss(result: Result) -> float:
    """Returns the held-out loss on documents of at least a window; NaN if there are none."""
    last = result.class_losses[-1] if result.class_losses else None
    return float("nan") if last is None else last


def loss_at(tokens: float) -> Measure:
    """Returns the measure of the held-out loss after `tokens` trained tokens."""

    def measure(result: Result) -> float:
        at, loss = zip(*result.curve, strict=True)
        return float(np.interp(tokens, at, loss))

    return measure


def cut_share(book: Bookkeeping) -> float:
    """Returns the share of documents trained in more than one piece."""
    return book.summary.cut_documents / book.summary.num_documents


@dataclass(frozen=True)
class Group:
    """Runs of an arm, and runs of its baseline with the same seeds."""

    arm: Arm
    beside: str  # name of the baseline
    seeds: tuple[int, ...]
    results: tuple[Result, ...]  # the arm's runs, by seed
    books: tuple[Bookkeeping, ...]  # counts of the arm's packing, by seed
    baseline: tuple[Result, ...]  # the baseline's runs, by seed

    @property
    def is_baseline(self) -> bool:
        return self.arm.name == self.beside

    def values(self, measure: Measure) -> FloatArray:
        """Returns the measure of each run, shape [seeds]."""
        return np.array([measure(result) for result in self.results], np.float64)

    def differences(self, measure: Measure) -> FloatArray:
        """Returns the measure of each run minus that of its baseline, shape [seeds]."""
        theirs = np.array([measure(result) for result in self.baseline], np.float64)
        return self.values(measure) - theirs

    def book(self, of: Callable[[Bookkeeping], float]) -> float:
        """Returns the mean over seeds of a number in the counts."""
        return float(np.mean([of(book) for book in self.books]))

    @cached_property
    def class_weights(self) -> FloatArray:
        """Returns the weight of labels by class of document length, as a mean over seeds."""
        return np.mean([book.class_weights for book in self.books], axis=0)

    def class_differences(self) -> FloatArray:
        """Returns held-out losses by class of document length, minus the baseline's.

        Returns:
            Differences, shape [seeds, classes]. NaN for classes without documents.
        """

        def losses(results: Sequence[Result]) -> FloatArray:
            return np.array([[np.nan if x is None else x for x in r.class_losses] for r in results])

        return losses(self.results) - losses(self.baseline)


def baseline_of(arm: Arm) -> str:
    """Returns the baseline of an arm: no delay for forced delays, Plain-4D for all others."""
    return NO_DELAY if arm.group == "delay" else BASELINE


def groups_of(
    results: Mapping[tuple[str, int], Result], books: Mapping[tuple[str, int], Bookkeeping] | None
) -> list[Group]:
    """Groups runs by arm, in the study's order.

    Only seeds of which the arm and its baseline both have a run are used. Arms without such seeds
    are left out.

    Args:
        results: Results by name of the arm and seed.
        books: Counts by name of the packing and seed. None: groups have no counts.
    """
    out: list[Group] = []
    for arm in ARMS:
        base = baseline_of(arm)
        seeds = [s for name, s in results if name == arm.name and (base, s) in results]
        if seeds:
            out.append(
                Group(
                    arm=arm,
                    beside=base,
                    seeds=tuple(seeds),
                    results=tuple(results[arm.name, s] for s in seeds),
                    books=tuple(books[arm.packing, s] for s in seeds if books is not None),
                    baseline=tuple(results[base, s] for s in seeds),
                )
            )
    return out


def against(groups: Sequence[Group], name: str) -> list[Group]:
    """Returns groups that compare arms with arm `name` instead of their baseline.

    Forced delays are left out, and so are seeds that `name` has not run.
    """
    theirs = {
        s: r for g in groups if g.arm.name == name for s, r in zip(g.seeds, g.results, strict=True)
    }
    out: list[Group] = []
    for g in groups:
        rows = [i for i, seed in enumerate(g.seeds) if seed in theirs]
        if g.arm.group == "delay" or g.arm.name in (name, BASELINE) or not rows:
            continue
        out.append(
            Group(
                arm=g.arm,
                beside=name,
                seeds=tuple(g.seeds[i] for i in rows),
                results=tuple(g.results[i] for i in rows),
                books=tuple(g.books[i] for i in rows),
                baseline=tuple(theirs[g.seeds[i]] for i in rows),
            )
        )
    return out


def leftover(groups: Sequence[Group], measure: Measure) -> tuple[float, int]:
    """Estimates the noise: the standard deviation that neither arm nor seed explains.

    The loss of a run is modelled as an effect of its arm plus an effect of its seed plus noise (a
    randomised block design), fitted by least squares over all runs. All arms share the variance of
    the noise, so even arms with one seed have an interval.

    Returns:
        Standard deviation and degrees of freedom, or (NaN, 0) if no two arms share two seeds.
    """
    cells: dict[tuple[str, int], float] = {}
    for g in groups:
        for seed, mine, theirs in zip(g.seeds, g.results, g.baseline, strict=True):
            cells |= {(g.arm.name, seed): measure(mine), (g.beside, seed): measure(theirs)}
    factors = list(dict.fromkeys(part for cell in cells for part in cell))
    design = np.array([[part in cell for part in factors] for cell in cells], np.float64)
    freedom = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    if not freedom:
        return float("nan"), 0
    losses = np.array(list(cells.values()))
    rest = losses - design @ np.linalg.lstsq(design, losses)[0]
    return float(np.sqrt(rest @ rest / freedom)), freedom


def band(groups: Sequence[Group], group: Group, measure: Measure) -> float:
    """Returns the half width of the confidence interval of a group's mean difference.

    Differences smaller than this are noise. The result is NaN if the noise cannot be estimated.
    """
    deviation, freedom = leftover(groups, measure)
    if not freedom:
        return float("nan")
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    return t * deviation * float(np.sqrt(2 / len(group.results)))


def joint_factor(groups: Sequence[Group], measure: Measure) -> float:
    """Returns the factor by which intervals must be wider to hold for all groups at once.

    It is the Bonferroni correction, or NaN if there are no intervals.
    """
    freedom = leftover(groups, measure)[1]
    count = sum(not g.is_baseline for g in groups)
    if not freedom or not count:
        return float("nan")
    one, each = (1 + CONFIDENCE) / 2, 1 - (1 - CONFIDENCE) / 2 / count
    return float(stats.t.ppf(each, freedom) / stats.t.ppf(one, freedom))


def verdict(groups: Sequence[Group], group: Group, measure: Measure) -> str:
    """Returns whether a group is "worse" or "better" than its baseline, or differs by "noise".

    Returns "one seed" if the noise cannot be estimated.
    """
    width, mean = band(groups, group, measure), float(group.differences(measure).mean())
    if not np.isfinite(width):
        return "one seed"
    if abs(mean) <= width:
        return "noise"
    return "worse" if mean > 0 else "better"
