"""Throughput on a grid with rising axes, interpolated so that predicted time never falls.

Bilinear inside a cell with plain IEEE arithmetic, so that all CPUs get equal bits. Predicted time
is monotone because throughput may not grow faster than its axis between points (checked;
`limit_growth` repairs noisy measurements). Above the grid the last throughput holds; callers price
points below it as the lowest corner (`floor`). `outside` says which points those are.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb.cost.flops import FloatArray
from wlb.plan import IntArray, UserError

BoolArray = npt.NDArray[np.bool_]
_TOLERANCE = 1e-3


def _frozen(name: str, values: Any, ndim: int) -> FloatArray:
    array = np.array(values, np.float64)
    if array.ndim != ndim or array.size == 0:
        raise UserError(f"{name} must have {ndim} axes and entries, got shape {array.shape}")
    if not (np.isfinite(array) & (array > 0)).all():
        raise UserError(f"{name} must be finite and above 0, got {array.tolist()}")
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """`values[i]` at axis[i]: a `Surface` of one axis, with the same guarantees."""

    axis: FloatArray
    values: FloatArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _rising("axis", self.axis))
        object.__setattr__(self, "values", _frozen("values", self.values, 1))
        if self.values.shape != self.axis.shape:
            raise UserError(
                f"values have shape {self.values.shape}, the axis asks for {self.axis.shape}"
            )
        limit = limit_curve_growth(self.axis, self.values)
        bad = np.flatnonzero(self.values > limit * (1 + _TOLERANCE))
        if bad.size:
            i = int(bad[0])
            raise UserError(
                f"throughput {self.values[i]:g} at {self.axis[i]:g} grew faster than its axis (at "
                f"most {limit[i]:g}), so predicted time would fall where work grows; pass values "
                f"through limit_curve_growth"
            )
        object.__setattr__(self, "values", _frozen("values", limit, 1))

    def at(self, x: FloatArray) -> FloatArray:
        left, weight = _position(self.axis, x)
        low = self.values[left]
        return low + weight * (self.values[left + 1] - low)

    def outside(self, x: FloatArray) -> BoolArray:
        """Which points lie outside the curve, so that their throughput is clamped."""
        return (x < self.axis[0]) | (x > self.axis[-1])


def limit_curve_growth(axis: FloatArray, values: FloatArray) -> FloatArray:
    """`values` (shape [n]) lowered until no step grows more than its axis."""
    return limit_growth(axis, np.ones(1), np.array(values, np.float64)[:, None])[:, 0]


def limit_growth(axis0: FloatArray, axis1: FloatArray, values: FloatArray) -> FloatArray:
    """`values` (shape [len(axis0), len(axis1)]) lowered until no step grows more than its axis."""
    out = np.array(values, np.float64)
    for axis, x in enumerate((axis0[:, None], axis1[None, :])):
        lowest = np.minimum.accumulate(out / x, axis=axis) * x
        # Differences by rounding are kept, so that limiting twice changes nothing.
        out = np.where(lowest < out * (1 - 1e-12), lowest, out)
    return out


def _rising(name: str, values: Any) -> FloatArray:
    axis = _frozen(name, values, 1)
    if axis.size < 2 or not (np.diff(axis) > 0).all():
        raise UserError(f"{name} must rise over two points or more, got {axis.tolist()}")
    return axis


class Cells(NamedTuple):
    """Positions of points on a grid: flat index of the cell's lower corner, weights in [0, 1]."""

    corner: IntArray
    weight0: FloatArray
    weight1: FloatArray


def _position(axis: FloatArray, x: FloatArray) -> tuple[IntArray, FloatArray]:
    x = np.minimum(np.maximum(x, axis[0]), axis[-1])
    left = np.minimum(np.searchsorted(axis, x, side="right") - 1, axis.size - 2)
    low = axis[left]
    return left, (x - low) / (axis[left + 1] - low)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """`values[i, j]` at (axis0[i], axis1[j]); axes rise over at least two points each."""

    axis0: FloatArray
    axis1: FloatArray
    values: FloatArray

    def __post_init__(self) -> None:
        for name in ("axis0", "axis1"):
            object.__setattr__(self, name, _rising(name, getattr(self, name)))
        object.__setattr__(self, "values", _frozen("values", self.values, 2))
        if self.values.shape != (self.axis0.size, self.axis1.size):
            raise UserError(
                f"values have shape {self.values.shape}, axes ask for "
                f"{(self.axis0.size, self.axis1.size)}"
            )
        limit = limit_growth(self.axis0, self.axis1, self.values)
        bad = np.argwhere(self.values > limit * (1 + _TOLERANCE))
        if bad.size:
            i, j = (int(k) for k in bad[0])
            raise UserError(
                f"throughput {self.values[i, j]:g} at ({self.axis0[i]:g}, {self.axis1[j]:g}) grew "
                f"faster than its axes (at most {limit[i, j]:g}), so predicted time would fall "
                f"where work grows; pass values through limit_growth"
            )
        object.__setattr__(self, "values", _frozen("values", limit, 2))

    def cells(self, x: FloatArray, y: FloatArray) -> Cells:
        """The cells of points (x, y), clamped to the grid; surfaces of equal axes share them."""
        row, weight0 = _position(self.axis0, x)
        column, weight1 = _position(self.axis1, y)
        return Cells(row * self.axis1.size + column, weight0, weight1)

    def read(self, cells: Cells) -> FloatArray:
        flat, width = self.values.ravel(), self.axis1.size
        corner, weight0, weight1 = cells
        v00, v01 = flat[corner], flat[corner + 1]
        v10, v11 = flat[corner + width], flat[corner + (width + 1)]
        low = v00 + weight1 * (v01 - v00)
        high = v10 + weight1 * (v11 - v10)
        return low + weight0 * (high - low)

    def at(self, x: FloatArray, y: FloatArray) -> FloatArray:
        return self.read(self.cells(x, y))

    def floor(self, x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Points raised to the grid's lowest corner, which prices smaller ones."""
        return np.maximum(x, self.axis0[0]), np.maximum(y, self.axis1[0])

    def outside(self, x: FloatArray, y: FloatArray) -> BoolArray:
        """Which points lie outside the grid, so that their throughput is clamped."""
        return (
            (x < self.axis0[0]) | (x > self.axis0[-1]) | (y < self.axis1[0]) | (y > self.axis1[-1])
        )
