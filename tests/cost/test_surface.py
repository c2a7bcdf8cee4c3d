"""Tests throughput surfaces: literal interpolation, clamping, refusal of falling time."""

import numpy as np
import pytest

from wlb.cost import Surface, limit_growth


def surface() -> Surface:
    return Surface(
        axis0=np.array([1, 2, 4]),
        axis1=np.array([10, 20]),
        values=np.array([[10, 20], [20, 30], [40, 40]]),
    )


def at(x: float, y: float) -> float:
    return float(surface().at(np.array([x]), np.array([y]))[0])


def test_grid_points_and_linear_weights():
    assert [at(1, 10), at(2, 20), at(4, 20)] == [10, 30, 40]
    assert at(1, 15) == 15
    assert at(3, 10) == 30
    assert at(1.5, 15) == 20


def test_outside_is_clamped_and_told():
    assert at(0.1, 10) == 10
    assert at(9, 99) == 40
    outside = surface().outside(np.array([0.5, 1, 4, 5]), np.array([10, 10, 20, 20]))
    assert outside.tolist() == [True, False, False, True]


def test_throughput_that_outgrows_its_axis_is_refused():
    with pytest.raises(ValueError, match="limit_growth"):
        Surface(axis0=[1, 2], axis1=[1, 2], values=[[1, 1], [3, 3]])


def test_limit_growth_lowers_only_what_is_too_high():
    axis = np.array([1.0, 2.0])
    out = limit_growth(axis, axis, np.array([[1.0, 3.0], [1.5, 1.0]]))
    assert out.tolist() == [[1, 2], [1.5, 1]]


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_values_must_be_finite_and_positive(bad):
    with pytest.raises(ValueError, match="finite and above 0"):
        Surface(axis0=[1, 2], axis1=[1, 2], values=[[1, 1], [1, bad]])


def test_axes_must_rise():
    with pytest.raises(ValueError, match="at least two entries and must increase"):
        Surface(axis0=[2, 2], axis1=[1, 2], values=[[1, 1], [1, 1]])


def test_shape_must_match():
    with pytest.raises(ValueError, match="sizes along the axes"):
        Surface(axis0=[1, 2], axis1=[1, 2], values=[[1, 1, 1], [1, 1, 1]])
