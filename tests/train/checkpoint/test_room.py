"""Tests that a run knows how much room its checkpoints need, and what it removes for room."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.train.case import small_spec, train
from tests.train.checkpoint.case import spec_of
from tests.words import lacks
from wlb.memory.budget import CHECKPOINT_BYTES
from wlb.plan import UserError
from wlb.spec import RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint import room


class Usage(NamedTuple):
    total: int
    used: int
    free: int


Fit = Callable[[RunSpec, float], None]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Fit:
    """Leaves room for so many checkpoints of a run."""

    def arrange(spec: RunSpec, count: float) -> None:
        free = int(count * CHECKPOINT_BYTES * spec.model.num_parameters)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * free + 1, free + 1, free))

    return arrange


def made(directory: Path, *steps: int) -> list[Path]:
    """Makes small checkpoints that `check_files` accepts."""
    folders = [checkpoint.folder_of(directory, step) for step in steps]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        (folder / "shard-1.safetensors").write_bytes(bytes(8))
        checkpoint.write_manifest(folder)
    return folders


def spec_in(folder: Path, **saved: Any) -> RunSpec:
    return small_spec(folder, folder / "texts", checkpoint={"interval": 2, **saved})


def test_a_save_needs_room_for_one_more_than_are_kept(tmp_path: Path, fit: Fit) -> None:
    spec = spec_in(tmp_path, keep=2)
    directory = tmp_path / "runs" / "small" / "checkpoints"
    fit(spec, 3.1)
    assert room.check_disk_space(directory, spec, None) == []
    fit(spec, 2.9)
    (told,) = room.check_disk_space(directory, spec, None)
    words = [
        f"WARNING: {tmp_path} has ",
        "Only 2 more checkpoints fit",
        "space for 3 more",
        "checkpoint.keep = 2",
    ]
    assert lacks(told, *words) == []
    fit(spec, 0.9)
    with pytest.raises(
        UserError, match=r"run\.output_dir = .*no checkpoint could be saved. Make space"
    ):
        room.check_disk_space(directory, spec, None)


def test_saves_that_never_come_need_no_room(tmp_path: Path, fit: Fit) -> None:
    """Six steps: one save at the end, or two with an interval of 4."""
    for interval, count in ((0, 1.1), (4, 2.1), (3, 2.1)):
        spec = spec_in(tmp_path, keep=9, interval=interval)
        fit(spec, count)
        assert room.check_disk_space(tmp_path, spec, None) == []
        fit(spec, 1.1)
        assert len(room.check_disk_space(tmp_path, spec, None)) == (interval > 0)


def test_what_is_there_needs_no_room_again(tmp_path: Path, fit: Fit) -> None:
    spec = spec_in(tmp_path, keep=2)
    first, second, _ = made(tmp_path, 1, 2, 3)
    fit(spec, 1.1)
    assert room.check_disk_space(tmp_path, spec, second) == []
    (told,) = room.check_disk_space(tmp_path, spec, first)  # the later ones are put aside, and stay
    assert "Only 1 more checkpoints fit, but the run will need space for 2 more" in told
    fit(spec, 0.9)
    assert len(room.check_disk_space(tmp_path, spec, second)) == 1  # the first one can be removed
    with pytest.raises(UserError, match="no checkpoint could be saved"):
        room.check_disk_space(tmp_path, spec, first)
    # What a crash left half-written is removed before the first save.
    partial = tmp_path / "partial-00000004"
    partial.mkdir()
    (partial / "shard").write_bytes(bytes(CHECKPOINT_BYTES * spec.model.num_parameters))
    assert len(room.check_disk_space(tmp_path, spec, first)) == 1


def test_a_file_system_without_blocks_says_nothing_of_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    assert room.check_disk_space(tmp_path, spec_in(tmp_path), None) == []


def test_the_only_sound_checkpoint_is_never_removed_for_room(tmp_path: Path) -> None:
    assert room.to_drop(tmp_path) is None
    (first,) = made(tmp_path, 1)
    assert room.to_drop(tmp_path) is None
    second, third = made(tmp_path, 2, 3)
    assert room.to_drop(tmp_path) == first
    for damaged in (second, third):
        (damaged / "run.json").unlink()
    assert room.to_drop(tmp_path) == second  # only the first one can be loaded
    (first / "run.json").unlink()
    assert room.to_drop(tmp_path) is None


def test_a_lack_of_room_is_known_from_other_failures() -> None:
    full, broken = OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")
    caused = RuntimeError("while writing")
    caused.__cause__ = full
    for error, is_full in ((full, True), (caused, True), (broken, False)):
        assert room.says_full(error) == is_full
        failures: Any = {3: (error, None)}
        assert room.is_full(CheckpointException("write", failures)) == is_full
    # An error that other ranks may not know of: they would not try again together.
    assert not room.is_full(full)


@pytest.mark.process
def test_a_run_looks_for_room_before_its_folder_is_made(
    corpus: Path, tmp_path: Path, fit: Fit
) -> None:
    spec = spec_of(tmp_path, corpus, checkpoint={"keep": 2}, training={"steps": 3})
    trained = replace(spec, model=replace(spec.model, vocab_size=320))
    fit(trained, 0.5)
    with pytest.raises(UserError, match="no checkpoint could be saved"):
        train(spec)
    assert not (tmp_path / "runs" / "small").exists()
    fit(trained, 1.5)
    _, shown = train(spec)
    assert "Only 1 more checkpoints fit, but the run will need space for 2 more" in " ".join(
        shown.split()
    )
