"""Temporary folders and semaphores of this process; the next start removes those of killed ones.

A folder `wlb.KIND.NAME` is locked as long as its owner lives (flock, which the kernel releases), so
an unlocked one is nobody's. Named semaphores of multiprocessing carry their owner's process number
and its namespace; the resource tracker removes them unless it is killed as well.
"""

import contextlib
import functools
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import process, util
from pathlib import Path
from typing import Any

from wlb.data.folder import attempts, make_and_open, open_folder
from wlb.data.lock import NoLocks, is_named, lock

_PREFIX = "wlb."
_SHARED_MEMORY = Path("/dev/shm")
_SEMAPHORE = "sem."
_LONGEST = 60
_NAME = re.compile(r"wlb\.[a-z]+\.[0-9a-f]{8,16}(\.\d+)?")
"""Names that this module gives: a folder that somebody else called wlb.something stays."""


@contextmanager
def temporary_folder(kind: str) -> Generator[Path]:
    """A folder for temporary files that goes with the block, or with the next start of wlb."""
    sweep()
    folder = Path(tempfile.gettempdir(), f"{_PREFIX}{kind}.{secrets.token_hex(4)}")
    descriptor = made_and_held(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@functools.cache
def process_folder(pid: int) -> Path:
    """The folder of this process (its number is `pid`) for what lasts as long as it."""
    sweep()
    folder = own_name(f"process.{secrets.token_hex(4)}")
    descriptor = made_and_held(folder)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)

    # After multiprocessing's own folder in it (-100), which it cannot miss. Forks do not call this.
    util.Finalize(None, remove, exitpriority=-200)
    return folder


def own_name(name: str) -> Path:
    """The path of a temporary folder that is found by `sweep` when its owner is gone, short enough
    for sockets in it: their paths have at most 107 bytes, and a batch job's TMPDIR can be long.
    """
    roots = (tempfile.gettempdir(), "/tmp")
    return min((Path(root, _PREFIX + name) for root in roots), key=lambda p: len(str(p)) > _LONGEST)


def made_and_held(folder: Path) -> int:
    """Make a folder and lock it for this process; closing the descriptor lets go of it."""
    for _ in attempts(folder):
        descriptor = make_and_open(folder, mode=0o700)
        with contextlib.suppress(NoLocks):
            lock(descriptor, waits=True)
        # Another process may have taken it for left over before it was locked.
        if is_named(descriptor, folder):
            return descriptor
        os.close(descriptor)
    raise AssertionError  # attempts has raised


def sweep() -> None:
    """Remove what killed processes of this user have left behind."""
    roots = {Path(tempfile.gettempdir()), Path("/tmp")}
    for folder in (found for root in roots for found in root.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            _remove_if_left(folder)
    for path in _SHARED_MEMORY.glob(f"{_SEMAPHORE}{_PREFIX}*"):
        namespace, _, owner = path.name.removeprefix(_SEMAPHORE + _PREFIX).partition(".")
        pid = owner.partition("-")[0]
        if namespace == _namespace() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_if_left(folder: Path) -> None:
    is_ours = _NAME.fullmatch(folder.name) and not folder.is_symlink()
    if not is_ours or folder.stat().st_uid != os.getuid():
        return
    descriptor = open_folder(folder)
    try:
        # Where folders cannot be locked (NoLocks is an OSError), owners cannot be told.
        if lock(descriptor):
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def name_semaphores() -> None:
    """Give named semaphores that this process makes from now on its number, and remove those of
    processes that were killed.
    """
    sweep()
    # multiprocessing has no public name for this; its own is "/mp", without an owner.
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{_PREFIX}{_namespace()}.{os.getpid()}"


def _namespace() -> str:
    """Of process numbers: a container's differ from those of its host."""
    return str(os.stat("/proc/self/ns/pid").st_ino)
