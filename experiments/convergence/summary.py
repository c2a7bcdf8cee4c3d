"""Seeds to numbers: each arm beside its baseline, seed by seed, and what is noise.

A difference is taken between runs of the same seed: same weights to begin with, same order in which
documents come. Its variance over seeds is pooled over all arms, so that three seeds, or a delay's
one, tell more than nothing; the interval is Student's t for CONFIDENCE. Losses at equal token
counts lie between two evaluations and are interpolated: steps of different policies end at
different tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from experiments.convergence.arms import ARMS, BASELINE, Arm
from experiments.convergence.bookkeeping import Bookkeeping
from experiments.convergence.outcome import Result
from wlb.cost.flops import FloatArray

CONFIDENCE = 0.95
NO_DELAY = "hold-0"
Measure = Callable[[Result], float]


def final(result: Result) -> float:
    """Held-out loss after the whole epoch."""
    return result.final


def train_loss(result: Result) -> float:
    return result.train_loss


def long_loss(result: Result) -> float:
    """Held-out loss on documents of a window and more after the epoch; NaN where there is none."""
    last = result.class_losses[-1] if result.class_losses else None
    return float("nan") if last is None else last


def loss_at(tokens: float) -> Measure:
    """Held-out loss when so many tokens were trained."""

    def measure(result: Result) -> float:
        at, loss = zip(*result.curve, strict=True)
        return float(np.interp(tokens, at, loss))

    return measure


def cut_share(book: Bookkeeping) -> float:
    """Documents trained in more than one piece, of all."""
    return book.summary.cut_documents / book.summary.num_documents


@dataclass(frozen=True)
class Group:
    """An arm: its runs and bookkeeping by seed, and its baseline's runs of the same seeds."""

    arm: Arm
    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    books: tuple[Bookkeeping, ...]
    baseline: tuple[Result, ...]

    @property
    def is_baseline(self) -> bool:
        return self.arm.name == baseline_of(self.arm)

    def values(self, measure: Measure) -> FloatArray:
        return np.array([measure(result) for result in self.results], np.float64)

    def differences(self, measure: Measure) -> FloatArray:
        theirs = np.array([measure(result) for result in self.baseline], np.float64)
        return self.values(measure) - theirs

    def book(self, of: Callable[[Bookkeeping], float]) -> float:
        return float(np.mean([of(book) for book in self.books]))

    @cached_property
    def class_weights(self) -> FloatArray:
        """Mean of seeds, by class of length."""
        return np.mean([book.class_weights for book in self.books], axis=0)

    def class_differences(self) -> FloatArray:
        """Held-out loss less the baseline's, shape [seeds, classes]; NaN where there is none."""

        def losses(results: Sequence[Result]) -> FloatArray:
            return np.array([[np.nan if x is None else x for x in r.class_losses] for r in results])

        return losses(self.results) - losses(self.baseline)


def baseline_of(arm: Arm) -> str:
    """Forced delays are compared with none of the same packing, all else with Plain-4D's."""
    return NO_DELAY if arm.group == "delay" else BASELINE


def groups_of(
    results: Mapping[tuple[str, int], Result], books: Mapping[tuple[str, int], Bookkeeping]
) -> list[Group]:
    """Of arms by name and seed, in the study's order. Only seeds that the arm and its baseline both
    have count; arms without any are left out."""
    out: list[Group] = []
    for arm in ARMS:
        base = baseline_of(arm)
        seeds = [s for name, s in results if name == arm.name and (base, s) in results]
        if seeds:
            out.append(
                Group(
                    arm=arm,
                    seeds=tuple(seeds),
                    results=tuple(results[arm.name, s] for s in seeds),
                    books=tuple(books[arm.packing, s] for s in seeds),
                    baseline=tuple(results[base, s] for s in seeds),
                )
            )
    return out


def against(groups: Sequence[Group], name: str) -> list[Group]:
    """Arms of all but the forced delays, compared with arm `name` in place of their baseline, by
    seeds that both have; none where `name` has not run."""
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
                seeds=tuple(g.seeds[i] for i in rows),
                results=tuple(g.results[i] for i in rows),
                books=tuple(g.books[i] for i in rows),
                baseline=tuple(theirs[g.seeds[i]] for i in rows),
            )
        )
    return out


def band(groups: Sequence[Group], group: Group, measure: Measure) -> float:
    """Half the width of the interval of `group`'s mean difference, in the measure's unit; NaN
    where no arm has two seeds. Smaller differences are noise."""
    others = [g for g in groups if not g.is_baseline]
    freedom = sum(len(g.results) - 1 for g in others)
    if not freedom:
        return float("nan")
    squares = sum(
        float(g.differences(measure).var(ddof=1)) * (len(g.results) - 1)
        for g in others
        if len(g.results) > 1
    )
    deviation = np.sqrt(squares / freedom / len(group.results))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * deviation)


def verdict(groups: Sequence[Group], group: Group, measure: Measure) -> str:
    """ "noise", "worse" or "better" than the baseline; "one seed" where nothing can be said."""
    width, mean = band(groups, group, measure), float(group.differences(measure).mean())
    if not np.isfinite(width):
        return "one seed"
    if abs(mean) <= width:
        return "noise"
    return "worse" if mean > 0 else "better"
