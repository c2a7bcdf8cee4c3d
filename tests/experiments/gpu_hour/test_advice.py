"""Tests what an hour's file says should change, by files with one thing in each."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_hour import advice as module
from experiments.gpu_hour.advice import advice


def made(**figures: dict[str, Any]) -> dict[str, Any]:
    """An hour whose parts have these figures."""
    return {
        "conditions": {"gpu": "NVIDIA H200", "gpus": 8},
        "claims": [],
        "parts": [{"name": name, "answer": {"figures": f}} for name, f in figures.items()],
    }


def steps(ratio: float, **more: float) -> dict[str, Any]:
    return {"profiles": {"the shipped profile": {"ratio": ratio}}, **more}


def test_an_hour_that_agrees_changes_nothing() -> None:
    same = {"plain_4d": 90.0, "paper": 99.0, "wlb": 100.0}
    ways = {"gather": 100.0, "by_need": 101.0}
    hour = made(
        steps_billion=steps(1.05, estimated_gib=70.0, peak_gib=68.0),
        balance={"tokens_per_s": same},
        exchange={"tokens_per_s": ways},
    )
    assert advice(hour) == []


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"profile": {"profile": {}}}, "kernels_profile/h200.json"),
        ({"steps_a": steps(0.8), "steps_b": steps(0.8)}, "Steps take 1.25 times what the shipped"),
        ({"steps_a": steps(1.0, estimated_gib=60.0, peak_gib=50.0)}, "a: the estimate of memory"),
        ({"balance": {"tokens_per_s": {"paper": 110.0, "wlb": 100.0}}}, "System paper is 1.10"),
        (
            {"exchange": {"tokens_per_s": {"gather": 100.0, "by_need_overlapped": 112.0}}},
            "Keys by need overlapped are 1.12 times as fast",
        ),
    ],
)
def test_each_thing_that_differs_is_said(figures: dict[str, Any], expected: str) -> None:
    (said,) = advice(made(**figures))
    assert expected in said


def test_an_hour_on_a_cpu_says_nothing_of_prices() -> None:
    hour = made(profile={"profile": {}}, steps_a=steps(0.5))
    hour["conditions"] = {"device": "cpu"}
    assert advice(hour) == []


def test_what_failed_comes_first() -> None:
    hour = made(profile={"profile": {}})
    hour["claims"] = [
        {"claim": "kernels", "claimed": "0 fail", "measured": "1 fail", "verdict": "failed"}
    ]
    assert advice(hour)[0].startswith("kernels: failed (1 fail)")


def test_the_command_reads_files_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "gpu_hour.json", tmp_path / "other.json"
    good.write_text(json.dumps(made()), "utf-8")
    bad.write_text("{}", "utf-8")
    monkeypatch.setattr(sys, "argv", ["advice", str(good)])
    module.main()
    assert "8 x NVIDIA H200" in (shown := capsys.readouterr().out)
    assert "nothing to change" in shown
    monkeypatch.setattr(sys, "argv", ["advice", str(bad)])
    with pytest.raises(SystemExit):
        module.main()
    assert "other.json is no gpu_hour.json" in capsys.readouterr().err
