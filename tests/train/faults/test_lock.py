"""Tests that one process at a time trains a run, and that a dead one keeps nobody out."""

import errno
import fcntl
import json
import os
import re
import socket
import stat
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.train.case import small_spec, train, write_corpus
from wlb.train.faults import lock
from wlb.train.faults.lock import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from rich.console import Console
from wlb.train.faults.lock import RunLock
lock = RunLock(Path(sys.argv[1]), Console())
lock.take()
print("held", flush=True)
time.sleep(600)
"""


def said_by(directory: Path) -> tuple[RunLock, StringIO]:
    text = StringIO()
    return RunLock(directory, Console(file=text, width=300)), text


def test_a_second_process_is_told_who_trains_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SAME_MACHINE_S", 0.1)
    first, second = said_by(tmp_path / "runs" / "mine")[0], said_by(tmp_path / "runs" / "mine")[0]
    first.take()
    first.take()
    owner = rf"runs/mine is in use: process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(
        ValueError,
        match=(
            rf"{owner} has trained a run there since .*\. End "
            r"that process, or set another run\.name"
        ),
    ):
        second.take()
    other = said_by(tmp_path / "runs" / "other")[0]
    other.take()
    other.close()
    first.close()
    second.take()
    second.close()


@pytest.mark.process
def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "mine")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
    taken, said = said_by(tmp_path / "mine")
    taken.take()
    assert json.loads(taken.path.read_text())["pid"] == os.getpid()
    assert said.getvalue() == ""
    taken.close()


FLOCK = fcntl.flock


def lock_files_only(descriptor: int, how: int) -> None:
    """Locks as NFS does, which wants a descriptor that can be written."""
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(descriptor, how)


def test_a_machine_that_is_gone_is_waited_for_and_may_be_overruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "OTHER_MACHINE_S", 0.3)
    monkeypatch.setattr(fcntl, "flock", lock_files_only)
    gone, second = said_by(tmp_path / "mine"), said_by(tmp_path / "mine")
    gone[0].take()
    said = (
        "is on a file system that can lock files but not "
        f"folders, such as NFS .* only {gone[0].path} is locked: do not remove this file"
    )
    assert re.search(said, gone[1].getvalue())
    gone[0].path.write_text('{"pid": 7, "host": "n12", "since": "2026-11-01"}')
    remedy = (
        r"process 7 on n12 has trained a run there since "
        rf"2026-11-01.*the machine of that process no longer runs, remove {gone[0].path}"
    )
    with pytest.raises(ValueError, match=remedy):
        second[0].take()
    assert second[1].getvalue().count("waiting for") == 1
    gone[0].path.unlink()
    second[0].take()
    second[0].close()
    gone[0].close()


@pytest.mark.parametrize("how", ["link to the folder", "lock removed", "lock replaced"])
def test_a_folder_is_locked_whatever_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(lock, "SAME_MACHINE_S", 0.1)
    monkeypatch.setattr(lock, "OTHER_MACHINE_S", 0.1)
    first = said_by(tmp_path / "mine")[0]
    first.take()
    name = tmp_path / "mine"
    if how == "link to the folder":
        name = tmp_path / "other" / "theirs"
        name.parent.mkdir()
        name.symlink_to(tmp_path / "mine")
    else:
        first.path.unlink()
    if how == "lock replaced":
        first.path.touch()
    second = said_by(name)[0]
    with pytest.raises(ValueError, match="is in use: process"):
        second.take()
    first.close()
    second.take()
    second.close()
    assert not any((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "folder"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    theirs = tmp_path / "thesis.txt"
    theirs.write_text("years of work")
    taken = said_by(tmp_path / "mine")[0]
    taken.path.parent.mkdir()
    make = {
        "symlink": lambda: taken.path.symlink_to(theirs),
        "hard link": lambda: taken.path.hardlink_to(theirs),
        "fifo": lambda: os.mkfifo(taken.path),
        "folder": lambda: taken.path.mkdir(),
    }
    make[kind]()
    with pytest.raises(
        ValueError, match=rf"wlb needs {taken.path} as its lock file, but that path is a link"
    ):
        taken.take()
    assert theirs.read_text() == "years of work"
    taken.path.rmdir() if kind == "folder" else taken.path.unlink()
    taken.take()
    taken.close()


def test_a_new_folder_of_the_name_is_locked_when_the_old_one_was_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SAME_MACHINE_S", 0.1)
    first, second = said_by(tmp_path / "mine")[0], said_by(tmp_path / "mine")[0]
    first.take()
    aside = first.directory.rename(tmp_path / "mine.1")
    first.take_next()
    with pytest.raises(ValueError, match="is in use: process"):
        second.take()
    moved = said_by(aside)[0]
    moved.take()
    for each in (moved, first):
        each.close()
        assert not any(each.directory.iterdir())


def test_a_file_system_without_locks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    taken, said = said_by(tmp_path / "mine")
    taken.take()
    taken.take()
    assert said.getvalue().count("is on a file system without locks (No locks available)") == 1
    taken.close()


@pytest.mark.full
@pytest.mark.process
def test_a_run_that_is_trained_is_neither_moved_aside_nor_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SAME_MACHINE_S", 0.1)
    spec = small_spec(tmp_path, write_corpus(tmp_path / "texts"), training={"steps": 1})
    run, _ = train(spec)
    partial = run.folder / "checkpoints" / "partial-00000002"
    partial.mkdir()
    other = said_by(run.folder)[0]
    other.take()
    for resume in (False, True, "auto"):
        with pytest.raises(ValueError, match="small is in use: process"):
            train(spec, resume=resume)
    assert partial.exists()
    assert not run.folder.with_name("small.1").exists()
    other.close()
    train(spec, resume=True)
    train(spec)  # it was let go of
    assert not other.path.exists()
    assert run.folder.with_name("small.1").exists()
