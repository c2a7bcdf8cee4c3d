"""Tests folders for output: races that pass, errors that stay, and what messages name."""

import itertools
import os
from pathlib import Path

import pytest

from wlb.data import folder
from wlb.data.folder import attempts, make_and_open, make_folder, refuse_file
from wlb.data.leftovers import make_and_lock
from wlb.plan import UserError
from wlb.prepare.files import locked, locked_folder


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folder, "TRIES", 20)
    monkeypatch.setattr(folder, "PAUSE_S", 0)
    monkeypatch.chdir(tmp_path)


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, mkdir, parent = itertools.count(), Path.mkdir, tmp_path / "p"

    def removed_twice(self: Path, *given: object, **options: object) -> None:
        mkdir(self, *given, **options)  # type: ignore[arg-type]
        if self.parent == parent and next(made) < 2:
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", removed_twice)
    descriptor = make_and_open(parent / "x")
    assert os.path.samestat(os.fstat(descriptor), (parent / "x").stat())
    os.close(descriptor)


def test_what_never_succeeds_ends_with_a_message() -> None:
    with pytest.raises(UserError, match="removed or replaced x 20 times"):
        list(attempts(Path("x")))
    with pytest.raises(UserError, match=r"creating /proc/x fails \(No such file"):
        make_folder(Path("/proc/x/y"))


def test_locks_on_a_file_system_without_lasting_inodes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """There no name ever leads to what was opened, and no file may stay open for each attempt."""
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    opened = len(os.listdir("/proc/self/fd"))
    for lock in (locked(Path("x.lock")), locked_folder(Path("x.parts"))):
        with pytest.raises(UserError, match=r"replaced \S+ 20 times"), lock:
            pass
    with pytest.raises(UserError, match=r"replaced \S+ 20 times"):
        make_and_lock(Path("x.kept"))
    assert len(os.listdir("/proc/self/fd")) == opened


def test_the_first_component_that_leads_nowhere_is_named() -> None:
    Path("file").touch()
    Path("away").symlink_to("/not/here")
    Path("first").symlink_to("away")
    Path("round").symlink_to("round")
    for place, cause in (
        ("away", r"away is a link to /not/here, which leads nowhere \(No such file"),
        ("first/a/b", r"first is a link to away, which leads nowhere \(No such file"),
        ("round/a", r"round is a link to round, which leads nowhere \(Too many levels"),
        ("file/a", "file is a file, not a folder; move it away"),
    ):
        with pytest.raises(UserError, match=rf"^the folder {place} cannot be created: {cause}"):
            make_folder(Path(place))
        with pytest.raises(UserError, match=rf"^the file {place}/x cannot be written: \S*{cause}"):
            refuse_file(Path(place, "x"))


def test_a_file_may_be_new_or_replaced_or_linked_to_a_folder_that_is_there(tmp_path: Path) -> None:
    Path("there").touch()
    Path("linked").symlink_to(tmp_path / "new")
    for name in ("new", "there", "linked"):
        refuse_file(Path(name))
    Path("lost").symlink_to("nowhere/x")
    Path("circle").symlink_to("circle")
    for name, cause in (
        ("circle", "circle is a link to circle, which leads nowhere"),
        ("lost", r"the folder \S*nowhere does not exist; make it"),
        ("a/b/x", r"the folder \S*/a does not exist; make it"),
        (".", "it is a folder; give the name of a file"),
    ):
        with pytest.raises(UserError, match=f"cannot be written: {cause}"):
            refuse_file(Path(name))


def test_folders_that_others_forbid_keep_the_system_s_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str, mode: int) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PermissionError, match="Permission denied: 'x'"):
        make_folder(Path("x"))
