"""Tests that bars and marks are where the numbers say, and that pages are self-contained."""

import re
from itertools import islice
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.colors import to_hex

from tests.simulate.by_hand import simulation_of, spec_of
from wlb.cost import workload_for
from wlb.data import GlobalBatches, lengths_of_family
from wlb.report import simulation_page
from wlb.report.plots import running_mean, svg
from wlb.report.simulation.page import COLUMNS
from wlb.report.simulation.plots import heat_map_figure, imbalance_figure
from wlb.report.timeline import MICRO_BATCHES, timeline_figure
from wlb.simulate import RunSimulation, simulate_run


def collection(axes, gid) -> PolyCollection:
    (found,) = (c for c in axes.collections if c.get_gid() == gid)
    return found


def bars(axes, gid):
    """Returns (row, left, right) of each bar, in the order drawn."""
    out = []
    for path in collection(axes, gid).get_paths():
        xs, ys = path.vertices[:4].T
        out.append((round(float(ys.mean())), float(xs.min()), float(xs.max())))
    return out


def runs_of(steps: int, n: int = 4) -> list[RunSimulation]:
    spec = spec_of(pp=2, n=n, v=2, dp=2, cp=2)
    cost = workload_for(spec, "cpu")
    source = lengths_of_family(window=1024, num_documents=steps * n * 40, seed=0)
    stream = GlobalBatches(source, tokens_per_batch=spec.tokens_per_step, seed=0)
    batches = [batch for batch, _ in islice(stream.iterate(), steps)]
    return [simulate_run(spec, cost, batches, label=label) for label in ("one", "two")]


@pytest.fixture(scope="module")
def runs() -> list[RunSimulation]:
    return runs_of(6)


def test_a_timeline_of_two_ranks():
    axes = timeline_figure(simulation_of([[[1, 2]]], pp=2)).axes[0]
    assert bars(axes, "mb0F") == [(0, 0, 1), (1, 1, 2)]
    assert bars(axes, "mb1F") == [(0, 1, 3), (1, 4, 6)]
    assert bars(axes, "mb0B") == [(1, 2, 4), (0, 4, 6)]
    assert bars(axes, "mb1B") == [(1, 6, 10), (0, 10, 14)]
    # 0F0 1F0 1B0 1F1 1B1 0B1
    assert bars(axes, "critical") == [(0, 0, 1), (1, 1, 2), (1, 2, 4), (1, 4, 6), (1, 6, 10),
                                      (0, 10, 14)]  # fmt: skip
    assert axes.get_xlabel() == "time (ms)"
    assert axes.get_xlim() == (0, 14)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # rank 0 on top
    idle = [t.get_text() for t in axes.texts if t.get_text().endswith("%")]
    assert idle == ["36%", "36%"]  # 9 of 14 ms


def test_shades_tell_the_direction_and_colours_the_micro_batch():
    axes = timeline_figure(simulation_of([[[1] * 8]], pp=2)).axes[0]

    def colour(gid):
        return to_hex(collection(axes, gid).get_facecolor()[0]).upper()

    backward = [colour(f"mb{i}B") for i in range(8)]
    assert backward == [MICRO_BATCHES[i % 6] for i in range(8)]
    assert len({*backward, *(colour(f"mb{i}F") for i in range(8))}) == 12


def test_chunks_of_a_rank_stand_lower_one_after_the_other():
    axes = timeline_figure(simulation_of([[[1, 1]]], pp=2, v=3)).axes[0]
    paths = collection(axes, "mb0F").get_paths()
    tops = [float(p.vertices[:4, 1].min()) for p in paths if p.vertices[:4, 1].mean() < 0.5]
    assert len(tops) == 3
    assert tops == sorted(set(tops))
    assert "later of 3 chunks" in axes.get_title(loc="right")


def test_what_is_waited_for_besides_is_drawn_apart():
    simulation = simulation_of([[[1, 2], [1, 1]]], pp=2, other_ms=5)
    figure = timeline_figure(simulation, pipeline=1)
    drawn = bars(figure.axes[0], "waits")
    end = round(float(simulation.step_time_s[0]) * 1e3)
    norm, optimizer = (0, end - 10, end - 5), (0, end - 5, end)
    assert norm in drawn
    assert optimizer in drawn
    assert not collection(figure.axes[0], "mb0F").get_hatch()


@pytest.mark.parametrize(("ms", "unit"), [(20, "time (ms)"), (2000, "time (s)")])
def test_the_time_axis_names_its_unit(ms, unit):
    assert timeline_figure(simulation_of([[[ms, ms]]], pp=2)).axes[0].get_xlabel() == unit


def test_sixteen_ranks_drop_numbers_that_do_not_fit():
    figure = timeline_figure(simulation_of([[[1] * 15 + [9]]], pp=16, v=2))
    texts = figure.axes[0].texts
    numbers = [t for t in texts if t.get_text().isdigit()]
    assert 0 < len(numbers) < 16 * 2 * 16 * 2
    assert all(t.get_fontsize() >= 6.5 for t in texts)


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


def test_steps_of_runs_are_points_over_the_first_runs_mean(runs):
    axes = imbalance_figure(runs).axes
    points = [line for line in axes[1].lines if line.get_marker() == "o"]
    assert len(points) == 2
    for line, run in zip(points, runs, strict=True):
        expected = run.step_time_s / runs[0].step_time_s.mean()
        assert np.allclose(line.get_ydata(), expected)
    above = [line for line in axes[0].lines if line.get_marker() == "o"]
    assert np.allclose(above[0].get_ydata(), [m.imbalance for m in runs[0].metrics])
    assert axes[-1].get_xlabel() == "step"


def test_a_running_mean_is_what_the_steps_had_together():
    values, weights = np.arange(80.0), np.ones(80)
    assert running_mean(values, weights)[[0, 40, 79]].tolist() == [1, 40, 78]
    weights[:] = 0
    weights[41] = 2
    assert running_mean(values, weights)[40] == 41
    assert running_mean(np.array([3.0, 4.0]), np.array([1.0, 5.0])).tolist() == [3, 4]


def test_the_page_needs_nothing_else(runs):
    page = simulation_page(title="A <run>", runs=runs, own="one", notes=["Drawn lengths."])
    assert "A &lt;run&gt;" in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    figures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(figures) == 4
    ids = [i for text in figures for i in re.findall(r'\bid="([^"]+)"', text)]
    assert len(ids) == len(set(ids))
    for text in figures:
        ElementTree.fromstring(text)
    slowest = int(runs[0].step_time_s.argmax())
    for words in (
        f"The slowest step: {slowest} of one",
        "The median step",
        "of the critical path",
        "by term:",
        "kernel profile",
        "blocks that are",
        "<dt>seed</dt>",
        "<dt>commit</dt>",
        "Drawn lengths.",
    ):
        assert words in page, words
    assert f"<td>{runs[0].time_s:.2f}</td>" in page
    for name, _ in COLUMNS:
        assert f"<dt>{name}</dt>" in page, f"the page does not explain {name}"


def test_a_page_of_one_step_and_of_none(runs):
    page = simulation_page(title="t", runs=runs_of(1)[:1])
    assert page.count("<svg") >= 3
    with pytest.raises(ValueError, match="no run"):
        simulation_page(title="t", runs=[])
    with pytest.raises(ValueError, match="no run is called 'x'; there are one, two"):
        simulation_page(title="t", runs=runs, own="x")


def test_the_page_draws_the_step_that_was_chosen(runs):
    slowest = int(runs[0].step_time_s.argmax())
    other = int(runs[0].step_time_s.argmin())
    page = simulation_page(title="t", runs=runs, step=other)
    assert re.findall(r"The \w+ step: (\d+)", page) == [str(slowest), str(other)]
    page = simulation_page(title="t", runs=runs, step=slowest)
    assert re.findall(r"The \w+ step: (\d+)", page) == [str(slowest)]
    with pytest.raises(ValueError, match="step 99 is none"):
        simulation_page(title="t", runs=runs, step=99)


def test_figures_follow_the_pages_colours():
    text = svg(timeline_figure(simulation_of([[[1, 2]]], pp=2)), "t")
    assert "#000000" not in text
    assert "currentColor" in text
