"""Tests that what killed processes leave behind goes with the next start, and nothing else."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.ports import descendants
from wlb.data import leftovers
from wlb.data.leftovers import make_and_lock, sweep, temporary_folder, temporary_path

PLANNER = "planner.0123456789abcdef.0"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for temporary files whose name is short enough for sockets in it; pytest's own, in
    which `tmp_path` is, was made before.
    """
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)
    tempfile.tempdir = None


def test_a_folder_is_swept_once_its_owner_is_gone(place: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    (place / "wlb.ranks.0a1b2c3d").symlink_to(tmp_path)
    theirs = ["other.x", "wlb.backup", "wlb.ranks.mine", "wlb.ranks.0a1b2c3d"]
    for name in theirs[:-1]:
        (place / name).mkdir()
    with temporary_folder("ranks") as folder:
        (folder / "file").touch()
        held = make_and_lock(temporary_path(PLANNER))
        (place / "wlb.ranks.01234567" / "deep").mkdir(parents=True)
        sweep()
        assert sorted(path.name for path in place.iterdir()) == sorted(
            [folder.name, f"wlb.{PLANNER}", *theirs]
        )
        assert (folder / "file").exists()
        os.close(held)
        sweep()
        assert not (place / f"wlb.{PLANNER}").exists()
    assert sorted(path.name for path in place.iterdir()) == sorted(theirs)
    assert (tmp_path / "theirs").exists()


def test_semaphores_are_swept_by_their_owners_number(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path)
    here = leftovers._namespace()
    kept = [f"sem.wlb.{here}.{os.getpid()}-a", f"sem.wlb.1.{ended.pid}-a", "sem.mp-x", "other"]
    for name in [*kept, f"sem.wlb.{here}.{ended.pid}-a"]:
        (tmp_path / name).touch()
    sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


RANKS = """
import sys, time
from wlb.launch.local import run_local

def work(world, seconds):
    if world.rank == 0:
        print("running", flush=True)
    time.sleep(seconds)

if __name__ == "__main__":
    run_local(work, 2, float(sys.argv[1]))
"""
WORKERS = """
import sys, time
from wlb.simulate.layout_search.workers import Workers

def work(seconds):
    print("running", flush=True)
    time.sleep(seconds)

if __name__ == "__main__":
    with Workers(jobs=2) as workers:
        list(workers.each(work, [float(sys.argv[1])] * 2))
"""


def start(script: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(script), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    # Lines of two workers may be written into each other.
    assert process.stdout.readline().startswith("running"), process.stderr
    return process


def semaphores(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"sem.wlb.*.{pid}-*"))


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("text", [RANKS, WORKERS], ids=["ranks", "workers"])
def test_nothing_is_left_of_a_killed_run_after_the_next(
    place: Path, tmp_path: Path, text: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    process = start(script, 600)
    try:
        started = descendants(process.pid)
        # Others who start now remove the semaphores of the dead, but not those of the living.
        assert semaphores(process.pid) or list(place.iterdir())
    finally:
        # The group has the fork server and the resource tracker as well; ranks lead their own.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert len(started) >= 3
    end = time.monotonic() + 600
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < end
        time.sleep(0.05)
    following = start(script, 0)
    _, said = following.communicate()
    assert (following.returncode, said) == (0, "")
    assert [path for path in place.iterdir() if path.name.startswith("wlb.")] == []
    assert list(place.glob("pymp-*")) == []
    assert semaphores(process.pid) == semaphores(following.pid) == []


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
