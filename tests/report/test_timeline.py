"""Tests that bars of a timeline are where the simulated step says."""

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from tests.simulate.by_hand import simulation_of
from wlb.report.timeline import MICRO_BATCHES, timeline_figure


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
