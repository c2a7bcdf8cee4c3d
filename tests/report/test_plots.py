"""Tests what figures share: heat maps, running means, and SVG that follows a page's colours."""

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from tests.simulate.by_hand import simulation_of
from wlb.report.plots import heat_map_figure, running_mean, svg
from wlb.report.timeline import timeline_figure


def test_a_heat_map_is_relative_to_the_mean():
    values = np.array([[[1.0, 3.0], [2.0, 2.0]]])  # dp 1, pp 2, cp 2
    axes = heat_map_figure(values).axes[0]
    (mesh,) = (c for c in axes.collections if isinstance(c, QuadMesh))
    assert np.array(mesh.get_array()).reshape(2, 2).tolist() == [[0.5, 1.0], [1.5, 1.0]]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["dp 0, cp 0", "dp 0, cp 1"]
    assert "0.500 to 1.500" in axes.get_title(loc="left")
    assert [t.get_text() for t in axes.texts] == ["0.50", "1.00", "1.50", "1.00"]


def test_a_heat_map_of_equal_or_many_gpus():
    assert heat_map_figure(np.ones((1, 1, 1))).axes[0].texts[0].get_text() == "1.000"
    large = heat_map_figure(np.arange(8 * 16 * 16.0).reshape(8, 16, 16) + 1)
    assert not large.axes[0].texts
    assert large.get_figheight() < 9
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        heat_map_figure(np.ones((2, 2)))


def test_a_running_mean_is_what_the_steps_had_together():
    values, weights = np.arange(80.0), np.ones(80)
    assert running_mean(values, weights)[[0, 40, 79]].tolist() == [1, 40, 78]
    weights[:] = 0
    weights[41] = 2
    assert running_mean(values, weights)[40] == 41
    assert running_mean(np.array([3.0, 4.0]), np.array([1.0, 5.0])).tolist() == [3, 4]


def test_figures_follow_the_pages_colours():
    text = svg(timeline_figure(simulation_of([[[1, 2]]], pp=2)), "t")
    assert "#000000" not in text
    assert "currentColor" in text
