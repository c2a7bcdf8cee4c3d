"""Tests parts that pass or fail: what an earlier try left is not taken for an answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu_hour import __main__ as gpu_hour
from experiments.gpu_hour import checks
from experiments.gpu_hour.parts import Part, all_parts
from experiments.gpu_hour.setting import Setting, emptied_runs

pytestmark = pytest.mark.process


def setting_of(folder: Path) -> Setting:
    return Setting(folder=folder, device="cpu", gpus=0, quick=True)


def start_instead(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Has a run be a program of Python."""
    start = subprocess.Popen

    def started(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-c", source], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(checks.subprocess, "Popen", started)


def test_a_run_is_killed_once_it_has_done_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    start_instead(
        monkeypatch,
        f"""
import time
for _ in range(600):
    with open({str(metrics)!r}, "a") as file:
        file.write('{{"kind": "step"}}\\n')
    time.sleep(0.1)
""",
    )
    assert checks._killed(tmp_path / "run.toml", metrics) >= checks.KILLED_AT


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_that_ends_before_it_is_killed_is_no_proof(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_instead(monkeypatch, f"raise SystemExit({status})")
    said = f"ended with exit status {status} after 0 steps, before it was killed"
    with pytest.raises(RuntimeError, match=said):
        checks._killed(tmp_path / "run.toml", tmp_path / "metrics.jsonl")


def test_what_an_earlier_try_found_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both programs may end without a file, as where they are killed."""
    setting = setting_of(tmp_path)
    monkeypatch.setattr(checks, "python", lambda *arguments, **options: None)
    (setting.of("doctor") / "doctor.json").write_text('{"counts": {"pass": 1, "fail": 0}}')
    with pytest.raises(FileNotFoundError):
        checks.doctor(setting)
    (setting.of("kernels") / "junit.xml").write_text("<testsuites><testsuite/></testsuites>")
    with pytest.raises(FileNotFoundError):
        checks.kernels(setting)


def test_runs_of_an_earlier_try_are_removed_and_logs_stay(tmp_path: Path) -> None:
    (tmp_path / "part" / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "part" / "log.txt").touch()
    assert emptied_runs(tmp_path / "part") == tmp_path / "part"
    assert [path.name for path in (tmp_path / "part").iterdir()] == ["log.txt"]


@pytest.mark.full
@pytest.mark.process
def test_the_whole_hour_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the parts' time limits, which a busy machine may pass."""
    monkeypatch.setattr(Part, "limit", lambda part, setting: 3600)
    command = ["--device", "cpu", "--quick", "--out", str(tmp_path / "hour")]
    monkeypatch.setattr(sys, "argv", ["gpu_hour", *command])
    assert gpu_hour.main() == 0
    made = json.loads((tmp_path / "hour" / "gpu_hour.json").read_text("utf-8"))
    names = [part.name for part in all_parts(setting_of(tmp_path))]
    assert [part["name"] for part in made["parts"]] == names
    assert {part["state"] for part in made["parts"]} == {"done"}
    assert {row["verdict"] for row in made["claims"]} <= {"holds", "differs"}
    assert made["advice"] == []
    assert "the losses are those of a whole run" in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "hour" / "gpu_hour.html").exists()
