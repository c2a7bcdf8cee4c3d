"""Tests the order in which hooks see a run's events, and the order of the hooks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.case import small_spec, train, write_corpus
from wlb.plan import PipelinePlan, StepPlan
from wlb.train import loop
from wlb.train.hooks import ExecutedStep, Hook, RefusedStep, RunContext
from wlb.train.loop import Trainer
from wlb.train.reduce import StepSums
from wlb.train.watchers import hooks_of

EVENTS: list[str] = []
LISTED: list[str] = []


class Watcher(Hook):
    """Adds a new figure as the room's README says: by one class."""

    def begin(self, run: RunContext) -> None:
        EVENTS.append(f"begin after {run.steps_done}")

    def refused(self, run: RunContext, step: RefusedStep) -> None:
        EVENTS.append(f"refused {step.plan.step}: {step.action}")

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        EVENTS.append(f"rolled back to {run.steps_done}")

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        EVENTS.append(f"record {step.plan.step}")
        run.report.write("longest", steps_done=run.steps_done, tokens=step.plan.packing.num_tokens)

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        EVENTS.append(f"after {run.steps_done}")

    def end(self, run: RunContext) -> None:
        EVENTS.append("end")
        run.tally.rows["longest"] = "a row of the summary"

    def close(self) -> None:
        EVENTS.append("close")

    def finished(self, run: RunContext) -> None:
        EVENTS.append("finished")


def and_watched(*given: Any, **named: Any) -> tuple[Hook, ...]:
    hooks = hooks_of(*given, **named)
    LISTED[:] = [type(hook).__name__ for hook in hooks]
    return (*hooks, Watcher())


@pytest.mark.process
def test_events_of_a_run_that_rolls_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute, failed = Trainer._compute, list[int]()

    def fails_once(self: Trainer, plan: StepPlan, pipeline: PipelinePlan) -> StepSums:
        sums = compute(self, plan, pipeline)
        if plan.step == 1 and not failed:
            failed.append(plan.step)
            return replace(sums, loss=math.nan)
        return sums

    monkeypatch.setattr(Trainer, "_compute", fails_once)
    monkeypatch.setattr(loop, "hooks_of", and_watched)
    EVENTS.clear()
    spec = small_spec(
        tmp_path,
        write_corpus(tmp_path / "texts"),
        training={"steps": 2, "on_nonfinite": "rollback"},
        checkpoint={"interval": 1},
        telemetry={"ledger": True},
    )
    run, _ = train(spec)
    assert EVENTS == [
        "begin after 0",
        "record 0",
        "after 1",
        "refused 1: rollback",
        "rolled back to 1",
        "record 1",
        "after 2",
        "end",
        "close",
        "finished",
    ]
    assert LISTED == [
        "MeasureSteps",
        "RecordSteps",
        "ConnectRanks",
        "CompileAttention",
        "RecordRanks",
        "VerifyStores",
        "RecordLedger",
        "KeepFolder",
        "EvaluateHeldOut",
        "SaveCheckpoints",
        "TellStop",
        "ShowSummary",
        "CollectGarbage",
    ]
    assert [line["steps_done"] for line in run.lines if line["kind"] == "longest"] == [1, 2]
    assert "a row of the summary" in capsys.readouterr().out
