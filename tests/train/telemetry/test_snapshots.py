"""Tests snapshots of GPU memory with stand-ins for CUDA's allocator."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cli.test_train import refused
from tests.words import lacks
from wlb.plan import UserError
from wlb.spec import RunSpec, load
from wlb.train.refuse_inputs import refuse_snapshots
from wlb.train.telemetry.snapshots import MOST_EVENTS, SnapshotMemory
from wlb.train.telemetry.wall import WallTimes


class Allocator:
    """Stands for CUDA's: writes the names of snapshots into them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[dict[str, Any]] = []
        self.observers: list[Any] = []
        memory = torch.cuda.memory
        monkeypatch.setattr(
            memory, "_record_memory_history", lambda **asked: self.recorded.append(asked)
        )
        monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text(path))
        attach = "_cuda_attach_out_of_memory_observer"
        monkeypatch.setattr(torch._C, attach, self.observers.append, raising=False)


def run_of(spec: RunSpec, said: list[str]) -> Any:
    report = SimpleNamespace(say=said.append)
    return SimpleNamespace(
        spec=spec, report=report, steps_done=0, wall=WallTimes(started_s=0.0), job=None
    )


def test_snapshots_are_written_after_steps_and_where_memory_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allocator, said = Allocator(monkeypatch), list[str]()
    telemetry = ["telemetry.snapshot_steps=[2]"]
    hook, run = SnapshotMemory(tmp_path, 3), run_of(load("demo", telemetry), said)
    hook.begin(run)
    assert allocator.recorded == [{"max_entries": MOST_EVENTS}]
    # Step 2 is followed by one without a label, which updates nothing.
    for run.steps_done, updated in ((1, True), (2, True), (2, False), (3, True)):
        step: Any = SimpleNamespace(updated=updated)
        hook.record(run, step)
    assert [path.name for path in (tmp_path / "memory").iterdir()] == [
        "step-00000002-rank-3.pickle"
    ]
    (line,) = said
    assert lacks(line, "memory snapshot: ", "step-00000002-rank-3", "memory_viz") == []
    allocator.observers[0](0, 4096, 2**30, 1024)
    assert (tmp_path / "memory" / "oom-rank-3.pickle").exists()
    told = capsys.readouterr().err
    assert (
        lacks(told, "rank 3 tried to allocate 4,096 bytes", "1,024 bytes free", "oom-rank-3.pickle")
        == []
    )
    hook.close()
    assert allocator.recorded[-1] == {"enabled": None}


def test_a_snapshot_that_cannot_be_written_hides_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allocator = Allocator(monkeypatch)
    hook = SnapshotMemory(tmp_path / "renamed", 0)
    hook.begin(run_of(load("demo", ["telemetry.snapshot_steps=[9]"]), []))
    allocator.observers[0](0, 4096, 2**30, 1024)
    assert "could not be written" in capsys.readouterr().err
    assert not (tmp_path / "renamed").exists()


def test_snapshots_of_a_run_without_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    key = "telemetry.snapshot_steps=[1]"
    spec = load("demo", [key])
    message = r"telemetry\.snapshot_steps = .* GPUs, but this run computes on cpu; remove telemetry"
    with pytest.raises(UserError, match=message):
        refuse_snapshots(spec, "cpu")
    refuse_snapshots(spec, "cuda")
    refuse_snapshots(replace(spec, telemetry=load("demo", []).telemetry), "cpu")
    assert "computes on cpu" in refused(
        ["demo", "--dry-run", "--set", "run.device=cpu", key], capsys
    )


def test_steps_of_snapshots_are_counted_from_1() -> None:
    with pytest.raises(ValueError, match=r"snapshot_steps = \[0\] has a number below 1"):
        load("demo", ["telemetry.snapshot_steps=[0]"])
