"""Fits the constants to the runs of all sources but one, and checks them on that one.

A step's time is close to linear in both constants: `fsdp_slowdown` multiplies the collectives that
run beside passes, and 1 / `triton_speed` the attention kernel. Three simulations of a run therefore
give its time for any constants, and a grid is searched.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.published_runs.mapping import Mapped
from experiments.published_runs.prediction import Constants, predict
from wlb.cost import KernelProfile

SLOWDOWNS = np.linspace(0.0, 1.0, 51)
SPEEDS = np.linspace(0.3, 1.0, 71)
FITTED_PRECISION = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """A run's predicted over measured time, and what it grows by."""

    case: Mapped
    base: float  # without slowdown, at FlashAttention-2's speed
    of_slowdown: float  # by a slowdown of 1
    of_kernel: float  # by a kernel that takes twice as long

    def ratio(self, slowdown: float, speed: float) -> float:
        """Predicted over measured throughput."""
        return 1 / (self.base + slowdown * self.of_slowdown + (1 / speed - 1) * self.of_kernel)


def sensitivity(case: Mapped, profile: KernelProfile) -> Sensitivity:
    """Simulate a run with each constant changed alone, where it has any effect."""

    def time(constants: Constants) -> float:
        return 1 / predict(case, profile, constants).ratio

    base = time(Constants())
    slowed = time(Constants(fsdp_slowdown=1.0)) if case.spec.fsdp.reshard_after_forward else base
    halved = time(Constants(triton_speed=0.5)) if case.kernel == "triton_1" else base
    return Sensitivity(case=case, base=base, of_slowdown=slowed - base, of_kernel=halved - base)


def fit(found: Iterable[Sensitivity]) -> Constants:
    """The constants with the least mean square of the logarithm of predicted over measured.

    Every source counts as much as any other, however many runs it has. The kernel's speed is fitted
    on runs that have it: without any, it stays 1.
    """
    by_source: dict[str, list[Sensitivity]] = {}
    for one in found:
        by_source.setdefault(one.case.run.source, []).append(one)
    has_kernel = any(one.of_kernel for group in by_source.values() for one in group)
    best = (np.inf, 0.0, 1.0)
    for slowdown in SLOWDOWNS:
        for speed in SPEEDS if has_kernel else (1.0,):
            error = np.mean([_error(group, slowdown, speed) for group in by_source.values()])
            best = min(best, (float(error), float(slowdown), float(speed)))
    return Constants(fsdp_slowdown=round(best[1], 2), triton_speed=round(best[2], 2))


def _error(group: Sequence[Sensitivity], slowdown: float, speed: float) -> float:
    return float(np.mean([np.log(one.ratio(slowdown, speed)) ** 2 for one in group]))


def fit_without(found: Sequence[Sensitivity], source: str) -> Constants:
    """Constants that no run of `source` took part in, but the speed of a kernel that only it has."""
    others = fit(one for one in found if one.case.run.source != source)
    own = [one for one in found if one.case.run.source == source]
    if not any(one.of_kernel for one in own):
        return others
    errors = [_error(own, others.fsdp_slowdown, speed) for speed in SPEEDS]
    return Constants(
        fsdp_slowdown=others.fsdp_slowdown,
        triton_speed=round(float(SPEEDS[int(np.argmin(errors))]), 2),
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, of values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def worst_error(ratios: Mapping[str, float]) -> float:
    """Largest distance of predicted over measured from 1."""
    return max(abs(ratio - 1) for ratio in ratios.values())
