"""Tests parts that only GPUs run, by what their commands would leave."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_hour import measured
from experiments.gpu_hour.runs import trainings
from experiments.gpu_hour.setting import Setting, Verdict


@pytest.mark.parametrize(
    ("rehearsed_gib", "verdict"), [(62.0, Verdict.HOLDS), (75.0, Verdict.DIFFERS)]
)
def test_memory_is_held_against_its_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsed_gib: float, verdict: Verdict
) -> None:
    setting = Setting(folder=tmp_path, device="cuda", gpus=1, quick=True)
    (run,) = (run for run in trainings(setting) if run.name == "stack_64k")
    asked: list[tuple[Any, ...]] = []

    def python(*arguments: str, env: dict[str, str]) -> None:
        asked.append((arguments, env))
        ranks = [{"peak_bytes": int(gib * 2**30)} for gib in (10.0, rehearsed_gib)]
        Path(arguments[-1]).write_text(json.dumps({"ranks": ranks}), "utf-8")

    def compared(folder: Path, profiles: dict[str, str]) -> dict[str, float]:
        assert folder == tmp_path / "steps_stack_64k" / "runs" / "stack_64k"
        return {"peak_gib": 60.0}

    monkeypatch.setattr(measured, "python", python)
    monkeypatch.setattr(measured, "compared", compared)
    answer = measured.memory(setting, run=run)
    ((arguments, env),) = asked
    assert arguments[:3] == ("-m", "wlb", "rehearse")
    assert env == {"CUDA_VISIBLE_DEVICES": ""}
    assert answer.figures == {"rehearsed_gib": rehearsed_gib, "peak_gib": 60.0}
    assert [row.verdict for row in answer.rows] == [verdict]


@pytest.mark.parametrize("gpus", [1, 8])
def test_several_gpus_measure_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    setting = Setting(folder=tmp_path, device="cuda", gpus=gpus, quick=True)
    asked: list[tuple[str, ...]] = []

    def python(*arguments: str) -> None:
        asked.append(arguments)
        setting.profile.write_text('{"attention": []}', "utf-8")

    monkeypatch.setattr(measured, "python", python)
    measured.profile(setting)
    (arguments,) = asked
    command = ("-m", "wlb", "profile", "--device", "cuda")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
    assert arguments[: len(command) + 5 * (gpus > 1)] == (*launcher * (gpus > 1), *command)


def test_measured_layers_are_held_against_predicted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(folder=tmp_path, device="cuda", gpus=1, quick=True)
    seconds = {"plain_4d": (13.0, 13.0), "paper": (10.0, 10.1), "wlb": (10.0, 12.0)}

    def python(*arguments: str) -> None:
        assert arguments[:2] == ("-m", "experiments.gpu_hour.layers")
        out = Path(arguments[arguments.index("--out") + 1])
        rows = {s: {"predicted_s": p, "measured_s": m} for s, (p, m) in seconds.items()}
        out.write_text(json.dumps({"configs": {"7b_128k": rows}}), "utf-8")

    monkeypatch.setattr(measured, "python", python)
    verdicts = [row.verdict for row in measured.layers(setting).rows]
    assert verdicts == [Verdict.HOLDS, Verdict.DIFFERS]
