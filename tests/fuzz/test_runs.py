"""Fuzzes what a run leaves behind: metrics.jsonl, the ledger, manifests and run.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import Refused, damaged, fuzzed, misshapen, outcome
from tests.report.run import lines
from wlb.report.run.records import read_run
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.telemetry.ledger import lineage

WALL = {"kind": "wall", "seconds": {"steps": 3.5}}
EVALUATION = {"kind": "evaluation", "step": 1, "steps_done": 2, "heldout_loss": 5.5}
LINES: list[dict[str, Any]] = [lines.start(), lines.step(1), lines.step(2), EVALUATION, WALL]
LINES += [lines.ranks(2, lines.SLOW), lines.timeline(2)]
LINES[2]["measured"]["experts"] = {"layers": [0], "expert": [1.5], "rank": [1.2], "ranks": [1.0]}
LINES = json.loads(json.dumps(LINES))
LEDGER: list[dict[str, Any]] = [{"begin": 0}, {"step": 0, "updated": True}, {"step": 1}]
RUN = {"step": 3, "spec": lines.SPEC.to_dict(), "profile": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def text_of(found: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


@fuzzed(0.3)
@given(st.data())
def test_misshapen_metrics_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    made = [json.dumps(line) for line in LINES]
    at = data.draw(st.integers(0, len(made) - 1))
    made[at] = data.draw(misshapen(LINES[at]))
    text = "\n".join(made).encode("utf-8", "surrogatepass")
    (folder / "metrics.jsonl").write_bytes(text)
    outcome(lambda: _used(folder))


@fuzzed(0.3)
@given(st.data())
def test_damaged_metrics_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    (folder / "metrics.jsonl").write_bytes(data.draw(damaged(text_of(LINES))))
    outcome(lambda: _used(folder))


def _used(folder: Path) -> Any:
    """A run as its page uses it first."""
    run = read_run(folder)
    tables = [table.stragglers for table in run.tables]
    timelines = [timeline.ranks for timeline in run.timelines]
    tables.append([step.measured.experts and step.measured.experts.mean_rank for step in run.steps])
    found = (run.steps_done, run.telemetry, run.places, run.restarts, run.learned_from, run.wall)
    return (*found, tables, timelines)


@fuzzed()
@given(st.data())
def test_a_damaged_ledger_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(LEDGER) - 1))
    text = text_of(LEDGER)
    if data.draw(st.booleans()):
        changed = data.draw(misshapen(LEDGER[at])).encode("utf-8", "surrogatepass")
        text = text.replace(json.dumps(LEDGER[at]).encode(), changed)
    else:
        text = data.draw(damaged(text))
    (folder / "ledger.jsonl").write_bytes(text)
    outcome(lambda: lineage(folder))


def write_checkpoint(folder: Path) -> Path:
    made = checkpoint.folder_of(folder, 3)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    checkpoint.write_json(made / checkpoint.RUN, RUN)
    (made / "shard-1.safetensors").write_bytes(b"weights")
    checkpoint.write_manifest(made)
    return made


def opened(made: Path) -> Any:
    checkpoint.check_files(made)
    checkpoint.check_share(made, index=0, num=1)
    return checkpoint.read_run(made), (made / "shard-1.safetensors").read_bytes()


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.RUN, "shard-1.safetensors"])
@fuzzed(0.3)
@given(st.data())
def test_a_damaged_checkpoint_is_the_same_or_refused(
    folder: Path, name: str, data: st.DataObject
) -> None:
    made = write_checkpoint(folder)
    expected = opened(made)
    text = (made / name).read_bytes()
    if name.endswith(".json") and data.draw(st.booleans()):
        changed = data.draw(misshapen(json.loads(text))).encode("utf-8", "surrogatepass")
    else:
        changed = data.draw(damaged(text))
    (made / name).write_bytes(changed)
    found = outcome(lambda: opened(made))
    assert isinstance(found, Refused) or found == expected


@fuzzed(0.3)
@given(st.data())
def test_a_misshapen_run_json_is_refused_where_its_manifest_is_written_again(
    folder: Path, data: st.DataObject
) -> None:
    made = write_checkpoint(folder)
    text = data.draw(misshapen(RUN)).encode("utf-8", "surrogatepass")
    (made / checkpoint.RUN).write_bytes(text)
    checkpoint.write_manifest(made)
    found = outcome(lambda: opened(made))
    if not isinstance(found, Refused):
        assert type(found[0]["step"]) is int
        assert isinstance(found[0]["spec"], dict)
