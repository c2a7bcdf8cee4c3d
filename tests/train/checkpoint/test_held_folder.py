"""Tests that a save writes into its run's folder, whatever becomes of the folder's name."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoint.case import spec_of
from tests.train.checkpoint.test_saver import one_rank
from wlb.parallel import world as worlds
from wlb.plan import RunError
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint import saver
from wlb.train.checkpoint.held_folder import HeldFolder
from wlb.train.loop import Trainer

LOST = ("renamed", "removed", "replaced")


def lose(folder: Path, how: str) -> None:
    if how == "removed":
        shutil.rmtree(folder)
        return
    folder.rename(folder.with_name("renamed"))
    if how == "replaced":
        (folder / "checkpoints").mkdir(parents=True)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def trainer(tmp_path: Path, corpus: Path) -> Iterator[Trainer]:
    made, _ = one_rank(spec_of(tmp_path, corpus))
    try:
        yield made
    finally:
        made.context.inputs.close()
        made.context.feed.close()
        made.saves.saver.close()
        worlds.shutdown()


@pytest.mark.process
@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("moment", ["before it", "once it has begun", "as it ends"])
def test_a_save_in_flight_brings_no_name_back(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, how: str, moment: str
) -> None:
    """The moments are before rank 0 makes a folder, before torch does, and before the rename."""
    folder = trainer.job.directory
    place, name = {
        "before it": (saver.CheckpointSaver, "_make_folder"),
        "once it has begun": (saver.state_dict_saver, "save"),
        "as it ends": (saver.CheckpointSaver, "_publish"),
    }[moment]
    before = getattr(place, name)

    def losing(*arguments: Any, **named: Any) -> Any:
        lose(folder, how)
        return before(*arguments, **named)

    monkeypatch.setattr(place, name, losing)
    trainer.saves.saver.save(3, trainer.context.feed.peek(1)[0][0].state)
    (saved,) = trainer.saves.saver.wait()
    if how == "replaced":
        assert not files_in(folder)
    else:
        assert not folder.exists()
    if how == "removed":
        assert "No such file" in saved.error
        assert "/proc/self" not in saved.error
        return
    assert not saved.error
    made = checkpoint.folder_of(folder.with_name("renamed") / "checkpoints", 3)
    checkpoint.check_files(made)
    checkpoint.check_share(made, index=0, num=1)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}/gone, the folder of this run, was removed"):
        HeldFolder(tmp_path / "gone")


def test_what_is_held_has_a_path_and_a_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    held = HeldFolder(run)
    (held.path / "a").write_text("1")
    run.rename(tmp_path / "renamed")
    assert (held.path / "a").read_text() == "1"
    assert held.named(f"no room: '{held.path}/a'") == f"no room: '{run}/a'"
    assert held.named("rank 1: /proc/self/fd/77/a") == f"rank 1: {run}/a"
    held.close()
    held.close()
    assert not held.path.exists()
