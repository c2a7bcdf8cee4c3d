"""Tests that a lack of room is told in one line, with the path and what to do."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.train.case import small_spec, write_corpus
from wlb.cli.main import main
from wlb.spec import to_toml
from wlb.train.faults.disk_full import full_disk
from wlb.train.loop import Trainer


def no_room(path: str | None, number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_lack_of_room_is_found_behind_other_errors(number: int) -> None:
    other = RuntimeError("torch says something else")
    other.__cause__ = no_room("/runs/mine/x", number)
    told = full_disk(other)
    assert told is not None
    assert str(told).startswith(
        f"/runs/mine/x cannot be written ({os.strerror(number)}). Make space"
    )
    assert full_disk(no_room(None, number)) is not None
    assert full_disk(RuntimeError("no space left on device")) is None
    assert full_disk(OSError(errno.EIO, "an error", "/runs/mine/x")) is None


@pytest.mark.process
def test_a_disk_that_fills_up_ends_a_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What hooks write, such as traces, in a step."""
    run = Trainer._step

    def full(self: Trainer, plan: Any, pipeline: Any) -> None:
        run(self, plan, pipeline)
        raise no_room(str(tmp_path / "trace.json"))

    monkeypatch.setattr(Trainer, "_step", full)
    spec = small_spec(tmp_path, write_corpus(tmp_path / "texts"))
    (tmp_path / "run.toml").write_text(to_toml(spec))
    assert main(["train", str(tmp_path / "run.toml")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"wlb train: {tmp_path / 'trace.json'} cannot be written (No space left")
    assert line.endswith("continue from the last checkpoint with --resume")
