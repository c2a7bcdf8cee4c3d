"""The validation's own arithmetic: errors by step, what others took of the cores, its page."""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.validation import replay, training
from experiments.validation.others import watch
from experiments.validation.plans import draw_plans
from experiments.validation.record import Conditions
from experiments.validation.replay import Replayed
from experiments.validation.training import RUNS, Trained

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
    assert nothing.mean(nothing.measured_s) == pytest.approx(9 / 4)  # for want of better


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


STEPS = """
import sys, time
for _ in range(3):
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass
    with open(sys.argv[1], "a") as file:
        file.write('{"kind": "step"}\\n')
time.sleep(0.3)
"""


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
def test_a_runs_own_time_is_not_others(tmp_path: Path) -> None:
    """Three steps, two of which are timed; what else runs here is unknown, so there is no upper
    bound but the cores."""
    metrics = tmp_path / "metrics.jsonl"
    shares = []
    for _ in range(5):
        metrics.unlink(missing_ok=True)
        shares = watch(subprocess.Popen([sys.executable, "-c", STEPS, str(metrics)]), metrics)
        assert len(shares) == 2
        assert min(shares) >= 0
        if max(shares) < 0.5:  # its own 100 % of a core would be 1
            return
        time.sleep(1)
    pytest.skip(f"the machine is busy: {shares}")
