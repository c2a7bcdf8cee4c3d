"""Tests Figures 2, 5 and 11: known slow-downs, the layout's ranks, the planner's choices."""

import numpy as np
import pytest

from experiments.harness.constants import configuration
from experiments.paper.fig02.__main__ import draw as draw_ranks
from experiments.paper.fig02.__main__ import layers_of, planned, ranks_table
from experiments.paper.fig05.__main__ import (
    EIGHT,
    LAYOUTS,
    Layout,
    one_slow,
    papers_path,
    simulate,
    slow_downs,
    timelines,
)
from experiments.paper.fig11.__main__ import choice_of, shown_of
from experiments.paper.fig11.__main__ import draw as draw_choice
from wlb.cost import workload_for
from wlb.spec import Schedule

pytestmark = pytest.mark.full

ONE_F = LAYOUTS[0]


def test_equal_micro_batches_take_what_the_schedule_says() -> None:
    """A step takes (n + (pp - 1) / v) forward and backward passes of 30 ms."""
    for layout in LAYOUTS[:5]:
        time = simulate(layout, pp=4, relative=np.ones((1, 4))).step_time_s[0]
        assert time == pytest.approx((4 + 3 / layout.v) * 0.030)


def test_one_slow_micro_batch_costs_what_an_independent_study_found() -> None:
    first = {layout: slow_downs(layout, pp=4, n=4, slow=1.44)[0] for layout in (ONE_F, EIGHT)}
    assert first[ONE_F] == pytest.approx(0.13, abs=0.005)
    assert first[EIGHT] == pytest.approx(0.36, abs=0.006)
    four = Layout(Schedule.INTERLEAVED_1F1B, 4)
    assert slow_downs(four, pp=4, n=4, slow=1.44)[0] == pytest.approx(0.30, abs=0.005)


def test_no_step_is_shorter_than_the_slow_one_takes_through_all_ranks() -> None:
    for layout in LAYOUTS[:5]:
        times = simulate(layout, pp=4, relative=one_slow(4, 1.44, is_added=False)).step_time_s
        assert (times[1:] >= 4 * 1.44 * 0.030 - 1e-9).all()
    # The whole of 1F1B's path, and never more than the paper's.
    assert papers_path(4, 4, 1.44) == pytest.approx((4 * 1.44 + 3 * 2.56 / 3) / 7 - 1)
    assert slow_downs(ONE_F, pp=4, n=4, slow=1.44).max() < papers_path(4, 4, 1.44)


def test_work_is_kept_or_added() -> None:
    assert one_slow(4, 1.44, is_added=False).sum(axis=1) == pytest.approx([4] * 5)
    assert one_slow(2, 1.5, is_added=True).tolist() == [[1, 1], [1.5, 1], [1, 1.5]]


def test_timelines_share_their_axis() -> None:
    axes = timelines(ONE_F, pp=4, n=4, slow=1.44).axes
    assert axes[0].get_xlim() == axes[1].get_xlim()
    assert "+13%" in axes[1].get_title(loc="left")


def test_ranks_are_the_executors() -> None:
    layout = [f"parallel.{name}={size}" for name, size in (("tp", 2), ("cp", 2), ("dp", 2))]
    spec = configuration(
        "7b_128k", *layout, "parallel.pp=2", "pp.virtual_stages=2", "data.num_windows=4"
    )
    assert layers_of(spec, 1) == [(1, 8, 16), (3, 24, 32)]
    step = planned(spec, workload_for(spec, "cuda"), step=0)
    rows = ranks_table(spec, step).rows
    assert [tuple(row[:5]) for row in rows[:5]] == [
        (0, 0, 0, 0, 0),
        (1, 0, 0, 0, 1),
        (2, 0, 0, 1, 0),
        (3, 0, 0, 1, 1),
        (4, 0, 1, 0, 0),
    ]
    assert rows[8][1:5] == [1, 0, 0, 0]
    drawn = {p.get_gid() for p in draw_ranks(spec, step).axes[0].patches} - {None}
    assert drawn == {f"rank{i}" for i in range(16)}


def test_the_chosen_sharding_is_the_faster_one() -> None:
    spec = configuration("7b_64k", "parallel.dp=1", "parallel.cp=4")
    cost = workload_for(spec, "cuda")
    long_one, all_short = np.array([60000] + [500] * 8), np.full(120, 500)
    choices = [
        choice_of(lengths, cost, cp=4, step=0, micro_batch=i)
        for i, lengths in enumerate((long_one, all_short))
    ]
    for c in choices:
        names = [plan.strategy for plan in c.plans]
        assert c.chosen == names[int(np.argmin(c.times_ns))]
        assert c.gain >= 0
    assert {c.chosen for c in choices} == {"per_document", "per_sequence"}
    assert [c.chosen for c in shown_of(choices)] == ["per_sequence", "per_document"]
    bars = draw_choice(choices[0]).axes[1].patches
    widths = [p.get_width() for p in bars]
    latency = choices[0].latencies[0]
    assert widths[:2] == pytest.approx([latency.forward_ns[0] / 1e6, latency.backward_ns[0] / 1e6])
