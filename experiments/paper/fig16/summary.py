"""Turns seeds into numbers: each arm against its baseline, seed by seed, and the noise.

A difference is taken between runs of the same seed, which begin with the same weights and get
documents in the same order. Noise is estimated from all runs at once (`leftover`). Intervals are
Student's t for CONFIDENCE; `joint_factor` is how much wider they have to be to hold for all
comparisons at once. Losses at equal token counts are interpolated between two evaluations, because
steps of different policies end at different tokens.
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


def final(result: Result) -> float:
    """Returns the held-out loss after the whole epoch."""
    return result.final


def train_loss(result: Result) -> float:
    return result.train_loss


def long_loss(result: Result) -> float:
    """Returns the held-out loss on documents of a window and more, NaN without any."""
    last = result.class_losses[-1] if result.class_losses else None
    return float("nan") if last is None else last


def loss_at(tokens: float) -> Measure:
    """Returns the measure of held-out loss when `tokens` tokens were trained."""

    def measure(result: Result) -> float:
        at, loss = zip(*result.curve, strict=True)
        return float(np.interp(tokens, at, loss))

    return measure


def cut_share(book: Bookkeeping) -> float:
    """Returns the share of documents trained in more than one piece."""
    return book.summary.cut_documents / book.summary.num_documents


@dataclass(frozen=True)
class Group:
    """Holds an arm's runs and bookkeeping by seed, and its baseline's runs of the same seeds.

    beside: name of the baseline
    """

    arm: Arm
    beside: str
    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    books: tuple[Bookkeeping, ...]
    baseline: tuple[Result, ...]

    @property
    def is_baseline(self) -> bool:
        return self.arm.name == self.beside

    def values(self, measure: Measure) -> FloatArray:
        return np.array([measure(result) for result in self.results], np.float64)

    def differences(self, measure: Measure) -> FloatArray:
        theirs = np.array([measure(result) for result in self.baseline], np.float64)
        return self.values(measure) - theirs

    def book(self, of: Callable[[Bookkeeping], float]) -> float:
        return float(np.mean([of(book) for book in self.books]))

    @cached_property
    def class_weights(self) -> FloatArray:
        """Returns the weights of labels by class of length, mean of seeds."""
        return np.mean([book.class_weights for book in self.books], axis=0)

    def class_differences(self) -> FloatArray:
        """Returns held-out loss minus the baseline's, shape [seeds, classes], NaN without any."""

        def losses(results: Sequence[Result]) -> FloatArray:
            return np.array([[np.nan if x is None else x for x in r.class_losses] for r in results])

        return losses(self.results) - losses(self.baseline)


def baseline_of(arm: Arm) -> str:
    """Returns the arm to compare with: no delay for forced delays, Plain-4D for all else."""
    return NO_DELAY if arm.group == "delay" else BASELINE


def groups_of(
    results: Mapping[tuple[str, int], Result], books: Mapping[tuple[str, int], Bookkeeping] | None
) -> list[Group]:
    """Groups runs by arm, in the study's order.

    Only seeds that the arm and its baseline both have count; arms without any are left out.

    books: None: only losses are looked at
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
    """Compares arms other than forced delays with arm `name` in place of their baseline.

    Only seeds that both have count; there are no groups where `name` has not run.
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
    """Returns the standard deviation that neither arm nor seed explains, and degrees of freedom.

    A run's loss is modelled as an effect of its arm plus one of its seed (a randomised block
    design), and the residuals have one variance, so that even three seeds of an arm, or one, tell
    something. It comes from least squares over all runs. It is (NaN, 0) where no two arms have two
    seeds in common.
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
    """Returns half the width of the interval of `group`'s mean difference, in the measure's unit.

    Smaller differences are noise. It is NaN where the noise cannot be estimated.
    """
    deviation, freedom = leftover(groups, measure)
    if not freedom:
        return float("nan")
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    return t * deviation * float(np.sqrt(2 / len(group.results)))


def joint_factor(groups: Sequence[Group], measure: Measure) -> float:
    """Returns how much wider intervals must be to hold for all groups at once with CONFIDENCE.

    The correction is Bonferroni's. It is NaN where there are no intervals.
    """
    freedom = leftover(groups, measure)[1]
    count = sum(not g.is_baseline for g in groups)
    if not freedom or not count:
        return float("nan")
    one, each = (1 + CONFIDENCE) / 2, 1 - (1 - CONFIDENCE) / 2 / count
    return float(stats.t.ppf(each, freedom) / stats.t.ppf(one, freedom))


def verdict(groups: Sequence[Group], group: Group, measure: Measure) -> str:
    """Says "noise", "worse" or "better" than the baseline, "one seed" where nothing can be said."""
    width, mean = band(groups, group, measure), float(group.differences(measure).mean())
    if not np.isfinite(width):
        return "one seed"
    if abs(mean) <= width:
        return "noise"
    return "worse" if mean > 0 else "better"
