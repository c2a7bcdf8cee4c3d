"""Tests traces of whole steps, and the time of a whole run."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.train.case import small_spec, train, write_corpus
from wlb.spec import load
from wlb.train.telemetry.traces import TraceSteps
from wlb.train.telemetry.wall import WallTimes


@pytest.mark.full
@pytest.mark.process
def test_a_run_writes_the_traces_it_is_asked_for_and_says_where_its_time_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    spec = small_spec(
        tmp_path,
        corpus,
        telemetry={"trace_steps": [1, 3]},
        checkpoint={"interval": 2},
        eval={"interval": 2, "steps": 1},
    )
    run, _ = train(spec)
    said = capsys.readouterr().out
    traces = sorted((run.folder / "traces").iterdir())
    assert [path.name for path in traces] == [
        f"step-0000000{step}-rank-0.json.gz" for step in (1, 3)
    ]
    for path in traces:
        with gzip.open(path, "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert names.count("aten::mm") > 10
        # Neither evaluation nor saving is part of a step.
        assert "Optimizer.step#AdamW.step" in names
        assert f"trace of step {int(path.name[5:13])}: {path}" in said
    (wall,) = [line for line in run.lines if line["kind"] == "wall"]
    seconds = wall["seconds"]
    assert list(seconds) == [
        *("start-up", "planning", "steps", "evaluation", "checkpoints", "rest")
    ]
    assert min(seconds[name] for name in ("start-up", "steps", "evaluation", "checkpoints")) > 0
    measured = sum(line["measured"]["step_time_s"] for line in run.steps)
    assert seconds["steps"] >= measured
    (line,) = re.findall(r"time +│ (.+?) +│", said)
    total, *phases = map(float, re.findall(r"\d+\.\d", line.partition(";")[0]))
    assert len(phases) == 6
    assert total == pytest.approx(sum(phases), abs=0.4)
    step = run.steps[-1]
    assert step["learning_rate"] > 0
    assert step["memory_bytes"] > 2**20


def test_steps_are_counted_from_1() -> None:
    with pytest.raises(ValueError, match=r"trace_steps = \[0\] has a number below 1"):
        load("demo", ["telemetry.trace_steps=[0]"])


def test_a_trace_does_not_bring_back_a_folder_that_was_renamed(tmp_path: Path) -> None:
    hook = TraceSteps(tmp_path / "renamed", 0)
    stopped, made = list[bool](), SimpleNamespace()
    hook._running = SimpleNamespace(stop=lambda: stopped.append(True))
    hook.record(SimpleNamespace(wall=WallTimes(started_s=0.0)), made)
    assert stopped == [True]
    assert not (tmp_path / "renamed").exists()
