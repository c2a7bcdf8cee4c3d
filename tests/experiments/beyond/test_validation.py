"""Tests the validation's arithmetic: errors by step, what others took of the cores, its page."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments.beyond.validation import others, replay, training
from experiments.beyond.validation.plans import draw_plans
from experiments.beyond.validation.record import Conditions
from experiments.beyond.validation.replay import Replayed
from experiments.beyond.validation.training import RUNS, Trained

pytestmark = pytest.mark.full

AT = Conditions(commit="abc", date="2026-11-22", machine="a CPU", cores=2, load=(0.1, 2.0))


def trained(index: int = 1, *, others: list[float]) -> Trained:
    return Trained(
        run=RUNS[index],
        others=others,
        measured_s=[1.0, 2.0, 4.0, 2.0],
        simulated_s=[0.9, 2.2, 4.0, 1.0],
        before_s=[0.5, 1.0, 2.0, 1.0],
        computing_s=2.0,
        simulated_computing_s=2.1,
    )


def test_errors_are_of_undisturbed_steps() -> None:
    quiet = trained(others=[])
    assert quiet.mape == quiet.mape_of_all == pytest.approx((0.1 + 0.1 + 0.0 + 0.5) / 4)
    busy = trained(others=[0.0, 0.05, 0.01, 0.9])
    assert busy.undisturbed.tolist() == [True, True, True, False]
    assert busy.mape == pytest.approx(0.2 / 3)
    assert busy.mape_of_all == quiet.mape
    assert busy.mean(busy.measured_s) == pytest.approx(7 / 3)
    assert busy.correlation == pytest.approx(0.9953, abs=1e-4)
    nothing = trained(others=[1.0] * 4)
    assert (nothing.mape, nothing.correlation) == (None, None)
    assert nothing.mean(nothing.measured_s) == pytest.approx(9 / 4)  # of all steps


def test_records_survive_json_and_make_a_page() -> None:
    found = [trained(0, others=[0.0] * 4), trained(1, others=[0.0, 0.0, 0.0, 1.0])]
    record = {"conditions": asdict(AT), "steps": 7, "runs": [asdict(t) for t in found]}
    at, again = training.parse(json.loads(json.dumps(record)))
    assert (at, again) == (AT, found)
    table = training.table(again)
    assert [row[0] for row in table.rows] == ["one", "plain"]
    assert "largest 6.7%, mean 6.7%, at most 15% in 1" in table.note
    assert "4 steps a run after" in " ".join(training.text(at, again).split())
    plans = [
        Replayed(plan=plan, imbalance=1.2, simulated_s=1.0, replayed_s=(1.01, 1.2, 1.06))
        for plan in draw_plans(2, seed=0)
    ]
    record = {"conditions": asdict(AT), "seed": 0, "plans": [asdict(p) for p in plans]}
    at, back = replay.parse(json.loads(json.dumps(record)))
    assert (at, back) == (AT, plans)
    assert back[0].difference == pytest.approx(0.06)
    assert "largest 6.0%, mean 6.0%, within 5% in 0 of 2" in replay.table(back).note


class Running:
    """Plays a run that writes a line of metrics each time it is asked whether it has ended, four
    times.
    """

    pid = 7

    def __init__(self, metrics: Path) -> None:
        self.metrics, self.num_steps = metrics, 0

    def poll(self) -> int | None:
        if self.num_steps == 4:
            return 0
        self.num_steps += 1
        with self.metrics.open("a") as file:
            file.write('{"kind": "step"}\n')
        return None


def test_a_runs_own_time_is_not_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In four readings 2 s apart the cores were busy for 2, 3 and 1 s more, the run for 2, 1 and
    1.
    """
    readings = iter(
        others._Reading(at_s=2.0 * i, busy_s=busy, own_s=own)
        for i, (busy, own) in enumerate([(50.0, 5.0), (52.0, 7.0), (55.0, 8.0), (56.0, 9.0)])
    )
    monkeypatch.setattr(others, "_read", lambda pid: next(readings))
    monkeypatch.setattr(others, "_POLL_S", 0.0)
    run: Any = Running(tmp_path / "metrics.jsonl")
    assert others.watch(run, run.metrics) == [0.0, 1.0, 0.0]


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
def test_readings_are_of_this_process_and_its_machine() -> None:
    first = others._read(os.getpid())
    sum(range(1_000_000))
    second = others._read(os.getpid())
    assert 0 < first.own_s <= second.own_s
    assert 0 < first.busy_s <= second.busy_s
    assert first.at_s <= second.at_s
