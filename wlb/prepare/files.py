"""Files that are complete or absent, and locks that let one process prepare a store."""

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from wlb.data.store import temporary_name
from wlb.prepare.request import StoreReport


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file that is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Holds a lock file; goes on without it where the file system has no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        # Closing the file releases the lock, also when the process dies.
        yield


def found_or_made(
    lock: Path, find: Callable[[], StoreReport | None], make: Callable[[], object]
) -> StoreReport:
    """Return the report of the stores; one process makes them where `find` finds none."""
    began = time.perf_counter()
    if (found := find()) is None:
        with locked(lock):
            if (found := find()) is None:  # None made it while this one waited.
                make()
                if (found := find()) is None:
                    raise RuntimeError(
                        f"the result beside {lock} cannot be read, or another process replaced "
                        f"it with other settings"
                    )
                found = replace(found, reused=False)
    return replace(found, time_s=time.perf_counter() - began)
