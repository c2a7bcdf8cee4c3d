"""Fits the constants to the runs of all sources but one, and checks them on that one.

The time of a step is nearly linear in `fsdp_slowdown`, which multiplies collectives that overlap
with computation, and in the reciprocals of the two throughputs. So four simulations of a run are
enough to know its time for any constants (`Sensitivity`), and all points of a grid can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from experiments.beyond.published_runs.mapping import Mapped
from experiments.beyond.published_runs.prediction import Constants, predict
from wlb.cost import KernelProfile
from wlb.plan import FloatArray

# Values that are tried for product_speed, fsdp_slowdown and triton_speed.
PRODUCTS = np.linspace(0.70, 1.10, 41)
SLOWDOWNS = np.linspace(0.0, 1.0, 51)
KERNELS = np.linspace(0.40, 0.80, 41)
GRID = np.meshgrid(PRODUCTS, SLOWDOWNS, KERNELS, indexing="ij")
FITTED_PRECISION = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Predicted over measured time of a run, and how much each constant adds to it."""

    case: Mapped
    base: float  # the ratio without a slowdown, with the profile's throughputs
    of_products: float  # added to it if matrix products take twice as long
    of_slowdown: float  # added if fsdp_slowdown is 1
    of_kernel: float  # added if Triton's attention kernel takes twice as long

    def ratios(self, products: FloatArray, slowdown: FloatArray, kernel: FloatArray) -> FloatArray:
        """Returns predicted over measured throughput for arrays of constants.

        Args:
            products: Values of `Constants.product_speed`.
            slowdown: Values of `Constants.fsdp_slowdown`.
            kernel: Values of `Constants.triton_speed`.
        """
        time = self.base + slowdown * self.of_slowdown
        time = time + (1 / products - 1) * self.of_products + (1 / kernel - 1) * self.of_kernel
        return 1 / time

    def ratio(self, constants: Constants) -> float:
        """Returns predicted over measured throughput with these constants."""
        values = (constants.product_speed, constants.fsdp_slowdown, constants.triton_speed)
        return float(self.ratios(*(np.array(value) for value in values)))


def sensitivity(case: Mapped, profile: KernelProfile) -> Sensitivity:
    """Simulates a run with one constant changed at a time and returns the effects.

    A constant that cannot matter for the run is not simulated: its effect is 0.
    """

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
    """Returns the best constants: they minimise the mean square of log(predicted / measured).

    All sources have the same weight, however many runs they have.
    """
    return _best(_errors(found))


def fit_without(found: Sequence[Sensitivity], source: str) -> Constants:
    """Returns constants that are fitted to the runs of all sources except one.

    There is one exception. If only `source` uses Triton's kernel, other sources cannot determine
    its speed. Then it is fitted to the runs of `source`, while the other two constants stay fixed.
    """
    others = [one for one in found if one.case.run.source != source]
    left_out = [one for one in found if one.case.run.source == source]
    errors = _errors(others)
    if any(one.of_kernel for one in others) or not any(one.of_kernel for one in left_out):
        return _best(errors)
    first, second, _ = np.unravel_index(int(errors.argmin()), errors.shape)
    # Only grid points with the fixed values of the first two constants may be chosen.
    only_kernel = np.full_like(errors, np.inf)
    only_kernel[first, second] = _errors(left_out)[first, second]
    return _best(only_kernel)


def _errors(found: Sequence[Sensitivity]) -> FloatArray:
    """Returns the mean square error at every point of the grid, with equal weights of sources."""
    source_of: Callable[[Sensitivity], str] = lambda one: one.case.run.source  # noqa: E731
    groups = (list(own) for _, own in groupby(sorted(found, key=source_of), source_of))
    means = [np.mean([np.log(one.ratios(*GRID)) ** 2 for one in own], axis=0) for own in groups]
    return np.mean(means, axis=0)


def _best(errors: FloatArray) -> Constants:
    """Returns the constants at the grid point with the smallest error."""
    at = int(errors.argmin())
    products, slowdown, kernel = (round(float(axis.flat[at]), 2) for axis in GRID)
    return Constants(product_speed=products, fsdp_slowdown=slowdown, triton_speed=kernel)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of two lists of values without ties."""
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])
