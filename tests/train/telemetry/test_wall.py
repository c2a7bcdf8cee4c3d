"""Tests that every second of a run belongs to one phase."""

import time

import pytest

from wlb.train.telemetry.wall import Phase, WallTimes, wall_line


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the time in a list, which tests change."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_phases_nest_and_sum_to_all(clock: list[float]) -> None:
    wall = WallTimes(started_s=90.0, ready_s=94.0)
    clock[0] += 2
    with wall.phase(Phase.PLANNING):
        clock[0] += 3
    wall.switch(Phase.REST)
    with wall.phase(Phase.STEPS):
        clock[0] += 20
        with wall.phase(Phase.EVALUATION):
            clock[0] += 4
        with wall.phase(Phase.CHECKPOINTS):
            clock[0] += 5
        clock[0] += 1
    clock[0] += 0.5
    assert wall.seconds == {
        Phase.START: 12.0,
        Phase.PLANNING: 3.0,
        Phase.STEPS: 21.0,
        Phase.EVALUATION: 4.0,
        Phase.CHECKPOINTS: 5.0,
        Phase.REST: 0.5,
    }
    assert sum(wall.seconds.values()) == clock[0] - 90
    assert wall_line(wall.seconds, before_ranks_s=wall.before_ranks_s) == (
        "45.5 s = start-up 12.0, planning 3.0, steps 21.0, evaluation 4.0, checkpoints 5.0, "
        "rest 0.5; start-up: 4.0 s of imports, stores and checks, 8.0 s of ranks, model and "
        "communicators"
    )


def test_time_counts_also_where_a_phase_raises(clock: list[float]) -> None:
    wall = WallTimes(started_s=0.0)

    def save() -> None:
        with wall.phase(Phase.CHECKPOINTS):
            clock[0] += 2
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save()
    clock[0] += 1
    assert (wall.seconds[Phase.CHECKPOINTS], wall.seconds[Phase.START]) == (2.0, 1.0)
    assert wall.before_ranks_s == 0
