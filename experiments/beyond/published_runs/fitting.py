"""Fits the constants to the runs of all sources but one, and checks them on that one.

A step's time is close to linear in the constants: in `fsdp_slowdown`, which multiplies the
collectives that run beside passes, and in the reciprocals of both throughputs. A few simulations of
a run therefore give its time for any constants, and a grid is searched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from experiments.beyond.published_runs.mapping import Mapped
from experiments.beyond.published_runs.prediction import Constants, predict
from wlb.cost import KernelProfile
from wlb.plan import FloatArray

PRODUCTS = np.linspace(0.70, 1.10, 41)
SLOWDOWNS = np.linspace(0.0, 1.0, 51)
KERNELS = np.linspace(0.40, 0.80, 41)
GRID = np.meshgrid(PRODUCTS, SLOWDOWNS, KERNELS, indexing="ij")
FITTED_PRECISION = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """A run's predicted over measured time, and what it grows by."""

    case: Mapped
    base: float  # with no slowdown, at the profile's throughputs
    of_products: float  # by products that take twice as long
    of_slowdown: float  # by a slowdown of 1
    of_kernel: float  # by Triton's kernel if it takes twice as long

    def ratios(self, products: FloatArray, slowdown: FloatArray, kernel: FloatArray) -> FloatArray:
        """Predicted over measured throughput."""
        time = self.base + slowdown * self.of_slowdown
        time = time + (1 / products - 1) * self.of_products + (1 / kernel - 1) * self.of_kernel
        return 1 / time

    def ratio(self, constants: Constants) -> float:
        """The same with these constants."""
        values = (constants.product_speed, constants.fsdp_slowdown, constants.triton_speed)
        return float(self.ratios(*(np.array(value) for value in values)))


def sensitivity(case: Mapped, profile: KernelProfile) -> Sensitivity:
    """Simulate a run with each constant changed alone, where it has any effect."""

    def time(constants: Constants) -> float:
        return 1 / predict(case, profile, constants).ratio

    base = time(Constants())
    slowed = time(Constants(fsdp_slowdown=1.0)) if case.spec.fsdp.reshard_after_forward else base
    halved = time(Constants(triton_speed=0.5)) if case.kernel == "triton_1" else base
    return Sensitivity(
        case=case,
        base=base,
        of_products=time(Constants(product_speed=0.5)) - base,
        of_slowdown=slowed - base,
        of_kernel=halved - base,
    )


def fit(found: Sequence[Sensitivity]) -> Constants:
    """The constants with the least mean square of the logarithm of predicted over measured.

    Every source counts as much as any other, however many runs it has.
    """
    return _best(_errors(found))


def fit_without(found: Sequence[Sensitivity], source: str) -> Constants:
    """Constants that no run of `source` took part in, but the speed of a kernel that only it has:
    that one is fitted to its runs, with the other constants held.
    """
    others = [one for one in found if one.case.run.source != source]
    own = [one for one in found if one.case.run.source == source]
    errors = _errors(others)
    if any(one.of_kernel for one in others) or not any(one.of_kernel for one in own):
        return _best(errors)
    first, second, _ = np.unravel_index(int(errors.argmin()), errors.shape)
    held = np.full_like(errors, np.inf)
    held[first, second] = _errors(own)[first, second]
    return _best(held)


def _errors(found: Sequence[Sensitivity]) -> FloatArray:
    """Mean square error of sources at every point of the grid."""
    source_of: Callable[[Sensitivity], str] = lambda one: one.case.run.source  # noqa: E731
    groups = (list(own) for _, own in groupby(sorted(found, key=source_of), source_of))
    means = [np.mean([np.log(one.ratios(*GRID)) ** 2 for one in own], axis=0) for own in groups]
    return np.mean(means, axis=0)


def _best(errors: FloatArray) -> Constants:
    at = int(errors.argmin())
    products, slowdown, kernel = (round(float(axis.flat[at]), 2) for axis in GRID)
    return Constants(product_speed=products, fsdp_slowdown=slowdown, triton_speed=kernel)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, of values without ties."""
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])
