"""Tests locks of prepared stores: removed, replaced and linked lock files, and file systems."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from wlb.data import lock
from wlb.prepare.files import locked, locked_folder


def test_a_lock_file_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one process would hold the removed file, and the next one a new file."""
    path, flock, removed = tmp_path / "x.lock", fcntl.flock, list[int]()

    def late(descriptor: int, how: int) -> None:
        if not removed:
            path.unlink()
            removed.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(path):
        assert removed
        descriptor = os.open(path, os.O_RDWR)
        assert not lock.lock(descriptor)
        os.close(descriptor)


def test_a_linked_lock_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("their text")
    (tmp_path / "x.lock").symlink_to(theirs)
    (tmp_path / "y.lock").symlink_to(tmp_path / "nothing")
    for name in ("x.lock", "y.lock"):
        with (
            pytest.raises(ValueError, match=rf"{name} as its lock file, but that path is a link"),
            locked(tmp_path / name),
        ):
            pass
    assert theirs.read_text() == "their text"
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_was_removed_while_its_lock_was_awaited_is_made_again(tmp_path: Path) -> None:
    path, in_it, may_go = tmp_path / "x.parts", threading.Event(), threading.Event()
    found: list[bool] = []

    def hold() -> None:
        with locked_folder(path):
            in_it.set()
            assert may_go.wait(600)
            path.rmdir()

    def follow() -> None:
        with locked_folder(path):
            found.append(path.is_dir())

    threads = [threading.Thread(target=hold), threading.Thread(target=follow)]
    threads[0].start()
    assert in_it.wait(600)
    threads[1].start()
    may_go.set()
    for thread in threads:
        thread.join(600)
    assert found == [True]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "x.lock"), locked_folder(tmp_path / "x.parts"):
        pass
    said = capsys.readouterr().err
    assert said.count("is on a file system without locks") == 1
    assert "no second process prepares x at the same time" in said
