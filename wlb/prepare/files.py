"""Write files atomically, and let only one process prepare a store at a time."""

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from wlb.data.folder import attempts, make_and_open, make_folder
from wlb.data.lock import NoLocks, is_named, lock, open_lock_file
from wlb.data.store import temporary_name
from wlb.prepare.request import StoreReport


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: readers see the whole file or none."""
    make_folder(path.parent)
    temporary = temporary_name(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Lock a file for a `with` block, after waiting until no other process has the lock.

    On a file system without locks, print a warning and continue without a lock.
    """
    with ExitStack() as opened:
        folder = make_and_open(path.parent)
        opened.callback(os.close, folder)
        for _ in attempts(path):
            tried = opened.enter_context(ExitStack())
            file = open_lock_file(path, folder)
            tried.callback(os.close, file)
            try:
                lock(file, waits=True)
            except NoLocks as error:
                sys.stderr.write(
                    f"{path.parent} is on a file system without locks ({error.strerror}); "
                    f"make sure that no second process prepares {path.stem} at the same time\n"
                )
            # If another process removed the file before this one locked it, start over.
            if is_named(file, path, folder):
                break
            tried.close()
        # Closing the file releases the lock. The kernel does that too if the process is killed.
        yield


@contextmanager
def locked_folder(path: Path) -> Generator[None]:
    """Create a folder and lock it for a `with` block, as soon as no other process has the lock."""
    with ExitStack() as opened:
        for _ in attempts(path):
            tried = opened.enter_context(ExitStack())
            folder = make_and_open(path)
            tried.callback(os.close, folder)
            # NFS cannot lock folders. `locked` warns if the file system has no locks at all.
            with suppress(NoLocks):
                lock(folder, waits=True)
            # If another process replaced the folder before this one locked it, start over.
            if is_named(folder, path):
                break
            tried.close()
        yield


def find_or_make(
    lock_file: Path, find: Callable[[], StoreReport | None], make: Callable[[], object]
) -> StoreReport:
    """Make stores unless they exist already, and return their report.

    If several processes call this at the same time, one makes the stores and the others wait.

    Args:
        lock_file: The process that makes the stores locks this file.
        find: Returns the report of the stores, or None if they do not exist.
        make: Makes the stores.
    """
    began = time.perf_counter()
    if (found := find()) is None:
        with locked(lock_file):
            # Another process may have made the stores while this one waited for the lock.
            if (found := find()) is None:
                make()
                if (found := find()) is None:
                    raise RuntimeError(
                        f"the store that was just made in {lock_file.parent} is missing, damaged, "
                        f"or was replaced by another process; run the same command again"
                    )
                found = replace(found, reused=False)
    return replace(found, time_s=time.perf_counter() - began)
