"""Tests what tells a planner process that computes for long from one that is stopped."""

import os
from pathlib import Path

import pytest

from wlb.planner import liveness as module
from wlb.planner.liveness import Address, PlanningError, SignsOfLife


class Clock:
    """Stands in for the module time."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SignsOfLife, Clock]:
    """Returns what watches a planner process of which there is no sign, and its clock."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    address = Address(path=str(tmp_path / "socket"), key=b"")
    address.alive.write_text("nobody")
    signs = SignsOfLife(address, 60.0)
    signs.begin()
    signs.look()
    return signs, clock


def looks(signs: SignsOfLife, clock: Clock, *, until_s: float) -> None:
    while clock.now_s < until_s:
        clock.now_s += 1.0
        signs.look()


def test_a_planner_that_takes_long_is_waited_for(
    watched: tuple[SignsOfLife, Clock], tmp_path: Path
) -> None:
    signs, clock = watched
    looks(signs, clock, until_s=60.0)
    os.utime(tmp_path / "alive", ns=(1, 1))  # its thread did
    looks(signs, clock, until_s=120.0)
    with pytest.raises(PlanningError, match="gave no sign of life for 60 s"):
        looks(signs, clock, until_s=122.0)


def test_a_planner_whose_thread_is_held_up_by_a_solver_is_waited_for(
    watched: tuple[SignsOfLife, Clock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs, clock = watched
    fields = ["R"] + ["0"] * 20
    monkeypatch.setattr(module, "process_status", lambda _: fields)
    looks(signs, clock, until_s=60.0)
    fields[11] = "1"
    looks(signs, clock, until_s=120.0)
    with pytest.raises(PlanningError, match="state R"):
        looks(signs, clock, until_s=122.0)


def test_who_was_suspended_too_blames_nobody(watched: tuple[SignsOfLife, Clock]) -> None:
    signs, clock = watched
    clock.now_s = 1000.0
    signs.look()
    looks(signs, clock, until_s=1060.0)
