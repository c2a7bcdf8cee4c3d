"""Tests the token ledger: what is in a lineage, what it notices, and runs that are killed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sets import nightly
from tests.train.case import Run, small_spec, train, write_corpus
from tests.train.telemetry.killed_runs import survive, write_store
from wlb.plan import PlannerState
from wlb.planner import Planner, open_planner
from wlb.spec import RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.stores import open_stores, ready
from wlb.train.telemetry.ledger import Count, Ledger, count, lineage

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, RunSpec]:
    """Runs 4 of the steps of an epoch, so that some tokens wait; a document is longer than the
    window.
    """
    folder = tmp_path_factory.mktemp("ledger")
    corpus = write_corpus(folder / "texts")
    (corpus / "long.txt").write_text("rank " * 400)
    spec = small_spec(
        folder, corpus, telemetry={"ledger": True}, training={"steps": 4}, eval={"steps": 0}
    )
    return train(spec)[0], spec


def planned(run: Run, spec: RunSpec) -> tuple[Planner, PlannerState]:
    from rich.console import Console

    stores = open_stores(spec, Console(quiet=True))
    saved = checkpoint.list_complete(run.folder / "checkpoints")[-1]
    planner = open_planner(ready(spec, stores, 1), stores.train, "cpu")
    return planner, checkpoint.planner_state(saved)


def counted(run: Run, spec: RunSpec, folder: Path, change: Any) -> Count:
    """Returns the count after the lines were changed by `change`."""
    text = (run.folder / "ledger.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in text if line]
    (folder / "ledger.jsonl").write_text("\n".join(map(json.dumps, change(lines))) + "\n")
    return count(folder, *planned(run, spec))


def test_what_is_trained_and_what_waits_is_all_that_was_given(
    run: tuple[Run, RunSpec], tmp_path: Path
) -> None:
    found = counted(*run, tmp_path, lambda lines: lines)
    trained = sum(line["measured"]["num_tokens"] for line in run[0].steps)
    assert found.is_exact
    assert (found.once, found.num_steps, found.num_begun, found.num_undone) == (trained, 4, 1, 0)
    assert found.waiting == run[0].steps[-1]["measured"]["num_held_tokens"] > 0


def test_a_token_that_is_lost_or_repeated_is_noticed(
    run: tuple[Run, RunSpec], tmp_path: Path
) -> None:
    def shorter(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines[2]["stop"][0] -= 1
        return lines

    lost = counted(*run, tmp_path, shorter)
    assert (lost.never, lost.repeated, lost.is_exact) == (1, 0, False)

    def twice(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for name in ("document", "start", "stop", "source"):
            lines[2][name].append(lines[1][name][0])
        return lines

    again = counted(*run, tmp_path, twice)
    assert again.repeated > 0
    assert not again.is_exact

    def early(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Trains a piece that still waits."""
        waits = planned(*run)[1].carry.pieces
        for name in ("document", "start", "stop", "source"):
            lines[2][name].append(int(getattr(waits, name)[0]))
        return lines

    before, found = counted(*run, tmp_path, lambda lines: lines), counted(*run, tmp_path, early)
    assert found.once == before.once
    assert found.repeated > 0

    def skipped(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines[2]["updated"] = False
        return lines

    assert counted(*run, tmp_path, skipped).skipped > 0


def write(folder: Path, text: str) -> Path:
    (folder / "ledger.jsonl").write_text(text)
    return folder


def test_a_lineage_forgets_what_was_undone(tmp_path: Path) -> None:
    text = '{"begin": 0}\n{"step": 0}\n{"step": 1, "first": 1}\n{"step": 2}\n{"st'
    text += '\n{"begin": 1}\n{"step": 1, "first": 0}\n'
    steps, num_begun, num_undone = lineage(write(tmp_path, text))
    assert steps == {0: {"step": 0}, 1: {"step": 1, "first": 0}}
    assert (num_begun, num_undone) == (2, 2)


def test_lines_that_a_full_disk_lost_make_the_count_inexact(
    run: tuple[Run, RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = next(planned(*run)[0].steps())
    ledger = Ledger(tmp_path)
    file = ledger._file
    ledger.begin(0)
    written, full = file._file, (tmp_path / "full")
    full.symlink_to("/dev/full")
    file._file = full.open("ab", buffering=0)
    ledger.add(plan, updated=True)
    file.close()
    file._file = written
    ledger.add(replace(plan, packing=replace(plan.packing, step=1)), updated=True)
    ledger.close()
    steps, _, _ = lineage(tmp_path)
    assert list(steps) == [1]
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert '{"lost": 1}' in lines

    def without(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*lines[:2], {"lost": 1}, *lines[3:]]

    found = counted(*run, tmp_path, without)
    assert (found.num_lost, found.num_steps, found.is_exact) == (1, 3, False)


@pytest.mark.full
@pytest.mark.parametrize("then", [2, *nightly(8)])
def test_steps_of_another_number_of_micro_batches_are_counted(tmp_path: Path, then: int) -> None:
    """Global batches have another size after the resume."""
    store = {"store": write_store(tmp_path / "store", num=300)}
    about = {"telemetry": {"ledger": True}, "eval": {"steps": 0}, "checkpoint": {"interval": 0}}
    first = small_spec(tmp_path, tmp_path, data=store, training={"steps": 3}, **about)
    train(first)
    again = {**store, "num_windows": then}
    spec = small_spec(tmp_path, tmp_path, data=again, training={"steps": 5}, **about)
    made, _ = train(spec, resume=True)
    found = count(made.folder, *planned(made, spec))
    assert found.is_exact, found
    assert found.once == sum(line["measured"]["num_tokens"] for line in made.steps)
    assert found.num_steps == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"begin": 0}\n{"step": 1}\n', "line for step 1 where step 0 must follow"),
        ('{"begin": 0}\n{"step": 0}\n{"st\n{"step": 1}\n', "is followed by the line of a step"),
    ],
)
def test_a_ledger_with_a_hole_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lineage(write(tmp_path, text))
    with pytest.raises(ValueError, match=r"train with telemetry\.ledger = true"):
        lineage(tmp_path / "nothing")


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.parametrize(("layout", "kills"), [("1 rank", 1), *nightly(("1 rank", 3), ("DP 2", 2))])
def test_runs_that_are_killed_train_every_token_once(
    tmp_path: Path, layout: str, kills: int
) -> None:
    store = write_store(tmp_path / "store", num=2000)
    outcome = survive(tmp_path, store, layout, kills=kills, seed=1)
    assert outcome.count.is_exact
    assert outcome.same_losses
    assert outcome.kills == kills
    assert outcome.count.waiting == 0
    # Those killed before their first checkpoint began anew.
    assert outcome.count.num_begun == outcome.resumed + 1
