"""Files that are complete or absent, and locks that let one process prepare a store."""

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
    """Writes a UTF-8 file that is complete or absent."""
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
    """Waits for a lock file and holds it; says so where the file system has no locks."""
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
                    f"{path.parent} is on a file system without locks ({error.strerror}): make "
                    f"sure that no second process prepares {path.stem} at the same time\n"
                )
            # The file may have been removed before it was locked.
            if is_named(file, path, folder):
                break
            tried.close()
        # Closing the file releases the lock, also when the process dies.
        yield


@contextmanager
def locked_folder(path: Path) -> Generator[None]:
    """Makes a folder and holds its lock; starts over if the folder was replaced while it waited."""
    with ExitStack() as opened:
        for _ in attempts(path):
            tried = opened.enter_context(ExitStack())
            folder = make_and_open(path)
            tried.callback(os.close, folder)
            # NFS locks files, not folders; `locked` says where there are no locks at all.
            with suppress(NoLocks):
                lock(folder, waits=True)
            if is_named(folder, path):
                break
            tried.close()
        yield


def found_or_made(
    lock_file: Path, find: Callable[[], StoreReport | None], make: Callable[[], object]
) -> StoreReport:
    """Return the report of the stores; one process makes them where `find` finds none."""
    began = time.perf_counter()
    if (found := find()) is None:
        with locked(lock_file):
            if (found := find()) is None:  # None made it while this one waited.
                make()
                if (found := find()) is None:
                    raise RuntimeError(
                        f"the result beside {lock_file} cannot be read, or another process "
                        f"replaced it with other settings"
                    )
                found = replace(found, reused=False)
    return replace(found, time_s=time.perf_counter() - began)
