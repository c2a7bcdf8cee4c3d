"""Tests that tokens of starts which were killed go with the next one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.case import small_spec, train, write_corpus
from wlb.parallel.world import World
from wlb.train.checkpoint import shared_folder
from wlb.train.checkpoint.shared_folder import remove_left_tokens

LEFT, HELD = ".token-0123456789abcdef", ".token-fedcba9876543210"
OTHERS = (".token-mine", ".tokens", ".token-0123456789abcdef.txt")

KILLED = """
import os, signal, sys
from pathlib import Path
import wlb.train.checkpoint.shared_folder as shared_folder
from wlb.parallel import world as worlds
from wlb.parallel.world import World
import torch

worlds.init(World(), torch.device("cpu"), timeout_s=600)
shared_folder.agree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
shared_folder.refuse_unshared(Path(sys.argv[1]), World())
"""


def tokens(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".token*"))


def test_tokens_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    for name in (LEFT, *OTHERS):
        (tmp_path / name).touch()
    kept = tmp_path / "a file of somebody"
    kept.write_text("1")
    (tmp_path / ".token-00000000000000ff").symlink_to(kept)
    held = shared_folder._make_locked_token(tmp_path / HELD)
    remove_left_tokens(tmp_path)
    assert tokens(tmp_path) == sorted([HELD, *OTHERS, ".token-00000000000000ff"])
    assert kept.read_text() == "1"
    os.close(held)
    remove_left_tokens(tmp_path)
    assert HELD not in tokens(tmp_path)


def test_a_token_that_was_taken_for_left_over_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start looks between the making of a token and its lock."""
    lock, times = shared_folder.lock, list[int]()

    def late(descriptor: int, **options: bool) -> bool:
        times.append(descriptor)
        if len(times) == 1:
            (tmp_path / HELD).unlink()
        return lock(descriptor, **options)

    monkeypatch.setattr(shared_folder, "lock", late)
    os.close(shared_folder._make_locked_token(tmp_path / HELD))
    assert len(times) == 2
    assert tokens(tmp_path) == [HELD]


@pytest.mark.full
@pytest.mark.process
def test_the_token_of_a_start_that_was_killed_goes_with_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "small"
    command = [sys.executable, "-c", KILLED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(tokens(folder)) == 1
    spec = small_spec(tmp_path, write_corpus(tmp_path / "texts"), training={"steps": 1})
    _, said = train(spec)
    assert tokens(folder) == []
    # It was all that was in the folder, which is no older run therefore.
    assert "is now" not in said
    assert not folder.with_name("small.1").exists()


def test_a_folder_that_cannot_lock_keeps_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object, **__: object) -> bool:
        raise shared_folder.NoLocks(95, "Operation not supported")

    (tmp_path / LEFT).touch()
    monkeypatch.setattr(shared_folder, "lock", without)
    remove_left_tokens(tmp_path)
    os.close(shared_folder._make_locked_token(tmp_path / HELD))
    assert tokens(tmp_path) == sorted([LEFT, HELD])


def test_a_rank_alone_sees_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is held until all ranks have agreed, and is gone then."""
    seen = list[list[str]]()
    monkeypatch.setattr(shared_folder, "agree", lambda *_, **__: seen.append(tokens(tmp_path)))
    monkeypatch.setattr(shared_folder, "host_group", lambda: None)
    monkeypatch.setattr(shared_folder.dist, "broadcast_object_list", lambda *_, **__: None)
    (tmp_path / LEFT).touch()
    shared_folder.refuse_unshared(tmp_path, World())
    ((name,),) = seen
    assert name != LEFT
    assert tokens(tmp_path) == []
