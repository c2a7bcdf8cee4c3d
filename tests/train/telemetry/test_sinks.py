"""Tests where records go: one line each, the same numbers in TensorBoard and Weights & Biases."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plan.test_telemetry import record
from tests.train.case import small_spec, train, write_corpus
from wlb.plan import TERMS, Moments
from wlb.spec import RunSpec, apply
from wlb.train.telemetry import sinks
from wlb.train.telemetry.appended import AppendedFile
from wlb.train.telemetry.sinks import JsonLines, open_sinks, refuse_missing, scalars_of


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_numbers_of_a_record_have_its_own_names() -> None:
    terms = tuple((name, Moments.of(1.0, 1.3)) for name in TERMS)
    telemetry = record(terms=terms, num_steps=1).to_json()
    line = {
        "kind": "step",
        "step": 4,
        "steps_done": 5,
        "is_good": True,
        "measured": {"step": 4, "origin": "measured", "loss": 2.5, "telemetry": telemetry},
        "plain_4d": None,
    }
    found = scalars_of(line)
    assert found["measured/loss"] == 2.5
    assert found["measured/telemetry/terms/linear_forward/ratio"] == pytest.approx(1.3)
    assert found["measured/telemetry/compute/max_s"] == telemetry["compute"]["max_s"]
    assert found["measured/telemetry/work/mfu"] == telemetry["work"]["mfu"] == 0.25
    assert found["measured/telemetry/work/window_tflops"] == 0.75
    # Neither what only sums, nor the axis, nor what is no number.
    names = ["predicted_squares", "products", "step", "steps_done", "kind", "origin", "is_good"]
    assert not {name.rsplit("/", 1)[-1] for name in found} & set(names)


def test_a_line_that_was_cut_off_is_ended_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "start"}\n{"kind": "st', "utf-8")
    sink = JsonLines(path)
    sink.write({"kind": "start"})
    sink.close()
    assert path.read_text("utf-8").splitlines()[1:] == ['{"kind": "st', '{"kind": "start"}']
    JsonLines(path).close()
    assert path.read_text("utf-8").count("\n") == 3


def test_a_full_disk_costs_lines_and_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonLines(path)
    for _ in range(3):
        sink.write({"kind": "start"})
    sink.close()
    said = capfd.readouterr().err
    assert said.count(f"{path} cannot be written ([Errno 28] No space left on device)") == 1


def test_a_line_that_the_disk_took_half_of_is_ended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Filling:
        """Is a file on a disk with 5 bytes left, which then gets more."""

        def __init__(self) -> None:
            self.data, self.room = b"", 5

        def write(self, data: bytes) -> int:
            if not self.room:
                self.room = 1000
                raise OSError(28, "No space left on device")
            taken = data[: self.room]
            self.data, self.room = self.data + taken, self.room - len(taken)
            return len(taken)

    file = AppendedFile(tmp_path / "log")
    file.close()
    monkeypatch.setattr(file, "_file", Filling())
    assert [file.write(text) for text in ("first\n", "second\n", "third\n")] == [False, True, True]
    assert file._file.data == b"first\nsecond\nthird\n"  # type: ignore[attr-defined]
    assert file.num_lost == 1


def test_tables_beyond_their_budget_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MOST_TABLE_BYTES", 80)
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for step in range(3):
        sink.write({"kind": "step", "step": step})
        sink.write({"kind": "ranks", "step": step, "compute_us": [1000]})
    sink.close()
    assert [line["kind"] for line in lines(path)] == ["step", "ranks", "step", "step"]


@pytest.mark.parametrize(("key", "value"), [("tensorboard", True), ("wandb", "mine")])
def test_a_package_that_is_missing_is_named_before_ranks_start(
    key: str, value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = small_spec(tmp_path, write_corpus(tmp_path / "corpus"), telemetry={key: value})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = (
        rf"telemetry\.{key} = .* needs the package {key}, which is not "
        rf"installed. Install it with pip install 'wlb-llm\["
    )
    with pytest.raises(ValueError, match=message):
        refuse_missing(spec)
    with pytest.raises(ValueError, match=message):
        train(spec)
    assert not (tmp_path / "runs" / "small").exists()
    refuse_missing(RunSpec())


class FakeRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.metrics = options, [], []
        self.is_finished = False

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)

    def finish(self) -> None:
        self.is_finished = True


@pytest.mark.full
@pytest.mark.process
def test_weights_and_biases_keeps_its_run_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    corpus = write_corpus(tmp_path / "corpus")
    spec = small_spec(tmp_path, corpus, telemetry={"wandb": "mine"}, checkpoint={"interval": 3})
    train(apply(spec, {"training": {"steps": 3}}, source="test"))
    run, _ = train(spec, resume=True)
    first, second = runs
    assert first.options["id"] == second.options["id"]
    assert {k: first.options[k] for k in ("project", "name", "resume")} == {
        "project": "mine",
        "name": "small",
        "resume": "allow",
    }
    assert first.options["config"]["telemetry"]["wandb"] == "mine"
    assert ("*", {"step_metric": "steps_done"}) in first.metrics
    assert [x["steps_done"] for x in first.logged] == [0, 1, 2, 3, 3]
    assert [x["steps_done"] for x in second.logged] == [4, 5, 6, 6]
    assert [x["measured/loss"] for x in second.logged[:3]] == run.losses[3:]
    assert first.is_finished
    assert second.is_finished


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_the_numbers_of_the_lines(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = apply(RunSpec(), {"telemetry": {"tensorboard": True}}, source="test")
    for first, last in ((0, 4), (2, 5)):  # went on from step 2, and did 3 and 4 again
        opened = open_sinks(spec, tmp_path, steps_done=first)
        for done in range(first + 1, last + 1):
            measured = {"loss": first + done / 10}
            step = {"kind": "step", "step": done - 1, "steps_done": done, "measured": measured}
            for sink in opened:
                sink.write(step)
                sink.write({"kind": "ranks", "steps_done": done, "compute_us": [1]})
        for sink in opened:
            sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert read.Tags()["scalars"] == ["measured/loss"]
    found = [(e.step, round(e.value, 3)) for e in read.Scalars("measured/loss")]
    assert found == [(1, 0.1), (2, 0.2), (3, 2.3), (4, 2.4), (5, 2.5)]
    assert len(lines(tmp_path / "metrics.jsonl")) == 14
