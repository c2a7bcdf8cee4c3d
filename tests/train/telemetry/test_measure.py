"""Tests what the summary adds up."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from wlb.plan.tally import Share, Tally
from wlb.train.telemetry.measure import MeasureSteps


def test_filler_is_on_top_of_the_tokens() -> None:
    assert Tally(padding=50, ours=Share(tokens=200)).padding_share == 0.25
    assert Tally().padding_share == 0.0


def test_steps_that_were_undone_leave_the_tally_and_what_happened_stays() -> None:
    saved = Tally(losses=[3.0], padding=1)
    saved.saves.add(1, 0.5, "")
    now = Tally(losses=[3.0, 2.0], padding=3)
    now.saves.add(2, 0.1, "full")
    now.refused["rollback"] += 1
    back = now.rolled_back(saved)
    assert (back.losses, back.padding) == ([3.0], 1)
    assert (back.saves.failed, back.refused) == ({2}, {"rollback": 1})
    back.losses.append(1.0)
    assert saved.losses == [3.0]  # it may be gone back to again


def test_a_step_holds_the_waits_before_it_and_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s come before a step that took 5 s, of which it waited 3 s for plans."""
    hook: Any = object.__new__(MeasureSteps)
    hook.clock = SimpleNamespace(marks_ns=0)
    run: Any = SimpleNamespace(
        inputs=SimpleNamespace(exposed_ns=0),
        feed=SimpleNamespace(waited_ns=5_000_000_000),
        records_ns=0,
    )
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    exposed = hook._exposed(run, SimpleNamespace(began_s=95.0, waited_ns=2_000_000_000))
    assert exposed.step_ns == pytest.approx(7e9)
    assert exposed.planning_ns == 5_000_000_000
    assert run.feed.waited_ns == 0
