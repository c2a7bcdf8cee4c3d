"""Tests that saving survives a failure or a kill at each change of its files."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults import BROKEN, FULL, NAMING, Action, changes, is_short_of_memory
from tests.sets import full, nightly
from tests.train.case import Run, job_of, write_corpus
from tests.train.checkpoint.case import save_at_once
from tests.train.checkpoint.test_saver import one_rank, spec_of
from wlb.launch.local import run_local
from wlb.parallel import world as worlds
from wlb.parallel.world import World
from wlb.train import start
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint import saver
from wlb.train.job import Job
from wlb.train.loop import Trainer

pytestmark = pytest.mark.process


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    save_at_once(monkeypatch)
    corpus = write_corpus(tmp_path / "texts")
    made, _ = one_rank(spec_of(tmp_path, corpus, checkpoint={"keep": 1}))
    try:
        yield made
    finally:
        made.context.inputs.close()
        made.context.feed.close()
        made.saves.saver.close()
        worlds.shutdown()


ALL = ()


@pytest.mark.parametrize(
    ("action", "again", "every", "kinds"),
    [
        *full((FULL, False, 7, ALL)),
        *full((FULL, True, 1, NAMING), (BROKEN, False, 11, ALL)),
        *nightly((FULL, True, 1, ALL), (FULL, False, 1, ALL), (BROKEN, False, 1, ALL)),
        *nightly((BROKEN, True, 1, ALL), (is_short_of_memory, False, 1, ALL)),
    ],
)
def test_any_change_of_a_save_may_fail(
    trainer: Trainer, action: Action, again: bool, every: int, kinds: tuple[str, ...]
) -> None:
    """The checkpoint before it stays, and the next save works. again: the step was saved before."""
    saves, folder = trainer.saves.saver, trainer.job.checkpoints
    item = trainer.context.feed.peek(1)
    state = item[0][0].state
    saves.save(1, state)
    for at in count(1, every):
        before = checkpoint.list_complete(folder)[-1]
        step = 1 if again else 1 + at
        with changes(folder, at=at, action=action, kinds=kinds) as seen:
            (saved,) = saves.save(step, state)
        found = checkpoint.list_complete(folder)
        for each in found:
            checkpoint.check_files(each)
            checkpoint.check_share(each, index=0, num=1)
        made = checkpoint.folder_of(folder, step)
        assert found[-1] in ((before, made) if saved.error else (made,)), seen.seen[at - 1]
        if len(seen.seen) < at:
            assert not saved.error
            assert at > (4 if kinds else 20)
            return


@pytest.mark.parametrize(
    ("kind", "at"), [("write", 1), ("write", 2), *full(("fsync", 1), ("open", 1), ("rename", 1))]
)
def test_a_full_disk_costs_the_oldest_of_several_checkpoints(
    trainer: Trainer, kind: str, at: int
) -> None:
    """The save is then tried once again. The only checkpoint is not removed."""
    trainer.saves.saver.spec = replace(
        trainer.spec, checkpoint=replace(trainer.spec.checkpoint, keep=2)
    )
    saves, folder = trainer.saves.saver, trainer.job.checkpoints
    state = trainer.context.feed.peek(1)[0][0].state
    saves.save(1, state)
    with changes(folder, at=at, action=FULL, kinds=(kind,)):
        (only,) = saves.save(2, state)
    assert ("No space left" in only.error, only.dropped) == (True, "")
    assert names(folder) == ["step-00000001"]
    saves.save(3, state)
    with changes(folder, at=at, action=FULL, kinds=(kind,)):
        (saved,) = saves.save(4, state)
    assert (saved.error, saved.dropped) == ("", "step-00000001")
    assert names(folder) == ["step-00000003", "step-00000004"]
    with changes(folder, at=at, action=BROKEN, kinds=(kind,)):
        (saved,) = saves.save(5, state)
    assert ("Input/output" in saved.error, saved.dropped) == (True, "")
    assert names(folder) == ["step-00000003", "step-00000004"]


def rank_whose_disk_fills(world: World, job: Job) -> None:
    """Rank 1 alone finds the disk full in the third save, once."""
    write, tried = saver.state_dict_saver.save, list[int]()

    def full_once(*arguments: Any, **named: Any) -> Any:
        tried.append(len(tried) + 1)
        at = 1 if world.rank == 1 and tried[-1] == 3 else 0
        with changes(job.checkpoints, at=at, action=FULL, kinds=("write",)):
            return write(*arguments, **named)

    saver.state_dict_saver.save = full_once
    start.local_rank(world, job, "cpu")


@pytest.mark.full
@pytest.mark.dist
def test_all_ranks_try_again_where_one_has_no_room(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "texts")
    spec = spec_of(tmp_path, corpus, parallel={"dp": 2})
    run_local(rank_whose_disk_fills, 2, job_of(spec), timeout_s=600)
    run = Run(spec)
    assert run.checkpoints == ["step-00000004", "step-00000006"]
    saves = [line for line in run.lines if line["kind"] == "checkpoint"]
    assert [line["dropped"] for line in saves] == ["", "", "step-00000002"]
    checkpoint.check_share(run.folder / "checkpoints" / "step-00000006", index=0, num=1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kinds", "again"),
    [*full(("naming", True)), *nightly(("naming", False), ("all", False), ("all", True))],
)
def test_a_kill_at_any_change_of_a_save_is_survived(
    tmp_path: Path, kinds: str, again: bool
) -> None:
    command = [sys.executable, "-m", "tests.train.checkpoint.killed"]
    command += [str(tmp_path), kinds, str(int(again))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["kills"] >= 4
