"""Files that are complete or absent, and locks that let one process prepare a store."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from wlb.data.store import temporary_name

Found = TypeVar("Found")


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
    lock: Path, find: Callable[[], Found | None], make: Callable[[], object]
) -> tuple[Found, bool]:
    """Return the result of `find` and whether it existed already; otherwise one process makes
    it."""
    if (found := find()) is not None:
        return found, True
    with locked(lock):
        # Another process made it while this one waited for the lock.
        if (found := find()) is not None:
            return found, True
        make()
        if (found := find()) is None:
            raise RuntimeError(
                f"the result beside {lock} cannot be read, or another process replaced it with "
                f"other settings"
            )
        return found, False
