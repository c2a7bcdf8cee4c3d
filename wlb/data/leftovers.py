"""Remove temporary folders and semaphores that killed processes left behind.

A process locks each of its temporary folders `wlb.KIND.NAME` (flock). The kernel releases the lock
when the process ends, even if it is killed. So an unlocked folder is left over and may be removed.
The names of multiprocessing's semaphores contain the PID and the PID namespace of their process, so
that left-over semaphores can be recognised. Usually multiprocessing's resource tracker removes
semaphores, but the tracker may be killed as well.
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
# The most bytes of the path of a folder that will contain sockets. The path of a socket has at most
# 107 bytes, so this leaves 47 for the names below the folder.
_LONGEST = 60
# Names of the folders that this module creates. A user's folder "wlb.something" is never removed.
_NAME = re.compile(r"wlb\.[a-z]+\.[0-9a-f]{8,16}(\.\d+)?")


@contextmanager
def temporary_folder(kind: str) -> Generator[Path]:
    """Create a temporary folder for a `with` block, and remove it at the end.

    If the process is killed before the end of the block, a later `sweep` removes the folder.
    """
    sweep()
    folder = Path(tempfile.gettempdir(), f"{_PREFIX}{kind}.{secrets.token_hex(4)}")
    descriptor = make_and_lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@functools.cache
def process_folder(pid: int) -> Path:
    """Return the temporary folder of this process, which is removed when the process ends.

    Args:
        pid: PID of this process. It is the key of the cache, so a forked process gets a folder of
            its own.
    """
    sweep()
    folder = temporary_path(f"process.{secrets.token_hex(4)}")
    descriptor = make_and_lock(folder)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)

    # Finalizers with lower priorities run later. multiprocessing removes its own folder, which is
    # inside this one, at priority -100, so this one must be removed after that. A forked process
    # does not run the finalizers of its parent.
    util.Finalize(None, remove, exitpriority=-200)
    return folder


def temporary_path(name: str) -> Path:
    """Return a path for a temporary folder, short enough that sockets can be created in the folder.

    The path of a socket has at most 107 bytes, and the TMPDIR of a batch job can be long. If TMPDIR
    is too long, the folder is in /tmp instead. `sweep` looks in both places.

    Args:
        name: Name of the folder, without the prefix "wlb.".
    """
    roots = (tempfile.gettempdir(), "/tmp")
    return min((Path(root, _PREFIX + name) for root in roots), key=lambda p: len(str(p)) > _LONGEST)


def make_and_lock(folder: Path) -> int:
    """Create and lock a folder, and return its file descriptor.

    Closing the descriptor releases the lock. On a file system without locks, the folder is not
    locked.
    """
    for _ in attempts(folder):
        descriptor = make_and_open(folder, mode=0o700)
        with contextlib.suppress(NoLocks):
            lock(descriptor, waits=True)
        # Before the folder was locked, another process may have removed it as a left-over folder.
        if is_named(descriptor, folder):
            return descriptor
        os.close(descriptor)
    raise AssertionError  # not reached: `attempts` raises UserError


def sweep() -> None:
    """Remove temporary folders and semaphores that killed processes of this user left behind."""
    roots = {Path(tempfile.gettempdir()), Path("/tmp")}
    for folder in (found for root in roots for found in root.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            _remove_if_unlocked(folder)
    for path in _SHARED_MEMORY.glob(f"{_SEMAPHORE}{_PREFIX}*"):
        namespace, _, owner = path.name.removeprefix(_SEMAPHORE + _PREFIX).partition(".")
        pid = owner.partition("-")[0]
        if namespace == _namespace() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_if_unlocked(folder: Path) -> None:
    is_ours = _NAME.fullmatch(folder.name) and not folder.is_symlink()
    if not is_ours or folder.stat().st_uid != os.getuid():
        return
    descriptor = open_folder(folder)
    try:
        # On file systems without locks, `lock` raises NoLocks (an OSError), so the folder is kept:
        # its process may still run.
        if lock(descriptor):
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def name_semaphores() -> None:
    """Name the semaphores of this process after its PID, so that `sweep` knows their owner.

    It also calls `sweep`.
    """
    sweep()
    # The default prefix of semaphores' names, "/mp", does not say which process made the semaphore.
    # multiprocessing has no public setting for this prefix, so set the private one.
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{_PREFIX}{_namespace()}.{os.getpid()}"


def _namespace() -> str:
    """Return the PID namespace of this process. Containers may reuse the same PIDs."""
    return str(os.stat("/proc/self/ns/pid").st_ino)
