"""Measured throughput at one or two sizes, interpolated so that more work never takes less time.

Predicted time is work over throughput. This time never falls as a size grows if throughput grows at
most in proportion to the size. Curves and surfaces check this rule, and `limit_growth` lowers noisy
measurements that break it.

Between measured points throughput is interpolated linearly (in two dimensions bilinearly), in plain
IEEE arithmetic, so that all CPUs compute equal bits. Above the measured sizes the throughput of the
largest one applies. Callers must raise smaller sizes to the smallest measured one (`floor`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wlb.plan import BoolArray, FloatArray, IntArray, UserError

_TOLERANCE = 1e-3
"""How far throughput may exceed its limit, as a fraction, and still count as a rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Throughput as a function of one size, linearly interpolated between measured points."""

    axis: FloatArray  # measured sizes, rising; at least two
    values: FloatArray  # throughput at each of these sizes

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _rising("axis", self.axis))
        object.__setattr__(self, "values", _checked_growth((self.axis,), self.values))

    def at(self, x: FloatArray) -> FloatArray:
        """Return the interpolated throughput at each of the sizes x."""
        left, weight = _position(self.axis, x)
        low = self.values[left]
        return low + weight * (self.values[left + 1] - low)

    def outside(self, x: FloatArray) -> BoolArray:
        """Return which sizes are outside the measured range, shape [n].

        They get the throughput of the nearest measured size.
        """
        return (x < self.axis[0]) | (x > self.axis[-1])


class Cells(NamedTuple):
    """Positions of points on a surface's grid: the grid cell that contains each point."""

    corner: IntArray  # index of the cell's lower corner in the flattened `Surface.values`
    weight0: FloatArray  # position of the point within the cell along axis 0, in [0, 1]
    weight1: FloatArray  # position of the point within the cell along axis 1, in [0, 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """Throughput as a function of two sizes, bilinearly interpolated on a measured grid."""

    axis0: FloatArray  # measured values of the first size, rising; at least two
    axis1: FloatArray  # measured values of the second size, rising; at least two
    values: FloatArray  # values[i, j] is the throughput at (axis0[i], axis1[j])

    def __post_init__(self) -> None:
        for name in ("axis0", "axis1"):
            object.__setattr__(self, name, _rising(name, getattr(self, name)))
        values = _checked_growth((self.axis0, self.axis1), self.values)
        object.__setattr__(self, "values", values)

    def cells(self, x: FloatArray, y: FloatArray) -> Cells:
        """Return the grid cells of points (x, y); points outside the grid are moved to its edge.

        Surfaces with equal axes have equal cells, so callers compute cells once for all of them.
        """
        row, weight0 = _position(self.axis0, x)
        column, weight1 = _position(self.axis1, y)
        return Cells(row * self.axis1.size + column, weight0, weight1)

    def read(self, cells: Cells) -> FloatArray:
        """Return the interpolated throughput at points.

        Args:
            cells: The grid cells of the points, as the method `cells` returns them.
        """
        flat, width = self.values.ravel(), self.axis1.size
        corner, weight0, weight1 = cells
        v00, v01 = flat[corner], flat[corner + 1]
        v10, v11 = flat[corner + width], flat[corner + (width + 1)]
        low = v00 + weight1 * (v01 - v00)
        high = v10 + weight1 * (v11 - v10)
        return low + weight0 * (high - low)

    def at(self, x: FloatArray, y: FloatArray) -> FloatArray:
        """Return the interpolated throughput at points (x, y)."""
        return self.read(self.cells(x, y))

    def floor(self, x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return points (x, y) with each size raised to at least the smallest measured one."""
        return np.maximum(x, self.axis0[0]), np.maximum(y, self.axis1[0])

    def outside(self, x: FloatArray, y: FloatArray) -> BoolArray:
        """Return which points (x, y) are outside the measured grid.

        They get the throughput of the nearest point on the edge of the grid.
        """
        return (
            (x < self.axis0[0]) | (x > self.axis0[-1]) | (y < self.axis1[0]) | (y > self.axis1[-1])
        )


def limit_curve_growth(axis: FloatArray, values: FloatArray) -> FloatArray:
    """Return throughput values, lowered until they grow at most in proportion to the sizes.

    Otherwise the predicted time, size / throughput, would be shorter for a larger size.

    Args:
        axis: Sizes, ascending, shape [n].
        values: Throughput at each size, shape [n].
    """
    return _limited((axis,), values)


def limit_growth(axis0: FloatArray, axis1: FloatArray, values: FloatArray) -> FloatArray:
    """Return throughput values, lowered until they grow at most in proportion to each of two sizes.

    Args:
        axis0: Values of the first size, shape [n0].
        axis1: Values of the second size, shape [n1].
        values: Throughput, shape [n0, n1].
    """
    return _limited((axis0, axis1), values)


def _limited(axes: tuple[FloatArray, ...], values: FloatArray) -> FloatArray:
    out = np.array(values, np.float64)
    for i, axis in enumerate(axes):
        x = axis.reshape([-1 if k == i else 1 for k in range(out.ndim)])
        # The time of work is proportional to size / throughput, that is axis / value. So the time
        # never falls if value / axis never rises.
        lowest = np.minimum.accumulate(out / x, axis=i) * x
        # Values that are lowered by rounding errors only are kept, so that limiting a second time
        # changes nothing.
        out = np.where(lowest < out * (1 - 1e-12), lowest, out)
    return out


def _checked_growth(axes: tuple[FloatArray, ...], throughput: Any) -> FloatArray:
    """Return `throughput` as a read-only array, after checking that larger work takes no less time.

    Between two neighbours along an axis, throughput may grow at most by the ratio of their sizes.
    Values that exceed this limit by a rounding error are lowered to it.

    Args:
        axes: Sizes along each dimension of `throughput`, rising.
        throughput: Measured throughput at each combination of sizes.

    Raises:
        UserError: A value exceeds its limit by more than a rounding error.
    """
    values, shape = _frozen("values", throughput, len(axes)), tuple(axis.size for axis in axes)
    if values.shape != shape:
        raise UserError(
            f"the throughput values have shape {values.shape}, but there are {shape} sizes along "
            "the axes; give one value for each combination of sizes"
        )
    limit = _limited(axes, values)
    bad = np.argwhere(values > limit * (1 + _TOLERANCE))
    if bad.size:
        at = tuple(bad[0].tolist())
        point = ", ".join(f"{axis[i]:g}" for axis, i in zip(axes, at, strict=True))
        raise UserError(
            f"the throughput {values[at]:g} at size ({point}) must be at most {limit[at]:g}, "
            "because otherwise more work would take less time. Pass the values through "
            "limit_growth first, or through limit_curve_growth if they have one axis"
        )
    return _frozen("values", limit, len(axes))


def _frozen(name: str, values: Any, ndim: int) -> FloatArray:
    array = np.array(values, np.float64)
    if array.ndim != ndim or array.size == 0:
        raise UserError(
            f"{name} must be a non-empty array with {ndim} axes, but its shape is {array.shape}; "
            "measure the profile again"
        )
    bad = np.argwhere(~(np.isfinite(array) & (array > 0)))
    if bad.size:
        at = bad[0].tolist()
        raise UserError(
            f"entry {at} of {name} is {array[tuple(at)]}, but all entries must be finite and above "
            "0; measure the profile again"
        )
    array.flags.writeable = False
    return array


def _rising(name: str, values: Any) -> FloatArray:
    axis = _frozen(name, values, 1)
    if axis.size < 2 or not (np.diff(axis) > 0).all():
        raise UserError(
            f"{name} must have at least two entries and must increase, but is {axis.tolist()}; "
            "measure the profile again"
        )
    return axis


def _position(axis: FloatArray, x: FloatArray) -> tuple[IntArray, FloatArray]:
    x = np.minimum(np.maximum(x, axis[0]), axis[-1])
    left = np.minimum(np.searchsorted(axis, x, side="right") - 1, axis.size - 2)
    low = axis[left]
    return left, (x - low) / (axis[left + 1] - low)
