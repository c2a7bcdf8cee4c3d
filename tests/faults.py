"""Makes the n-th change of files in a folder fail, or kills the process at that change.

Changes are: open for writing, write, flush, close, fsync, rename, link, remove, truncate, and
making or removing a folder. An audit hook sees opens and changes of names, so those that libraries
make count as well. Replaced functions see the other changes.
"""

import builtins
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Action = Callable[[str, str], None]
"""Function of a change's kind and path. An exception that it raises is raised by the change."""
NAMING = ("rename", "link", "remove", "rmdir")
"""Changes of names. Only by these does the folder look different to other processes."""

_KINDS = {
    "os.rename": "rename",
    "os.link": "link",
    "os.remove": "remove",
    "os.rmdir": "rmdir",
    "os.mkdir": "mkdir",
    "os.truncate": "truncate",
}
_FOLDER_FD = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.mkdir": 2}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_open, _fsync = io.open, os.fsync
_active: list["Changes"] = []
_is_hooked = False


class Changes:
    """Counts the changes of files in a folder and calls an action at one of them.

    Args:
        folder: The folder, including its subfolders.
        at: Number of the change at which the action is called, from 1. 0: it is never called.
        action: The action.
        kinds: Kinds of changes that count. Empty: all.

    Attributes:
        seen: Kind and file name of each change so far.
    """

    def __init__(
        self,
        folder: Path,
        *,
        at: int = 0,
        action: Action | None = None,
        kinds: tuple[str, ...] = (),
    ) -> None:
        self.folder, self.at, self.action, self.kinds = os.path.realpath(folder), at, action, kinds
        self.seen: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def note(self, kind: str, path: str) -> None:
        if self.kinds and kind not in self.kinds:
            return
        # Resolve the folder, because a path may lead through a descriptor (/proc/self/fd).
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if not path.startswith(self.folder + os.sep):
            return
        with self._lock:
            self.seen.append((kind, os.path.basename(path)))
            is_due = len(self.seen) == self.at
        if is_due and self.action is not None:
            self.action(kind, path)


@contextmanager
def changes(
    folder: Path, *, at: int = 0, action: Action | None = None, kinds: tuple[str, ...] = ()
) -> Iterator[Changes]:
    """Counts the changes that the block makes (see `Changes`)."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hear)
        _is_hooked = True
    counted = Changes(folder, at=at, action=action, kinds=kinds)
    _active.append(counted)
    builtins.open = io.open = _noting_open  # type: ignore[assignment]
    os.fsync = _noting_fsync
    try:
        yield counted
    finally:
        builtins.open = io.open = _open
        os.fsync = _fsync
        _active.remove(counted)


def fails(number: int) -> Action:
    """Returns an action that raises OSError with an error number, as a disk would."""

    def fail(kind: str, path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    return fail


def is_short_of_memory(kind: str, path: str) -> None:
    """Raises MemoryError, as if there were no memory for a buffer; an action of `Changes`."""
    raise MemoryError


def is_killed(kind: str, path: str) -> None:
    """Kills this process by SIGKILL; an action of `Changes`."""
    os.kill(os.getpid(), signal.SIGKILL)


FULL, BROKEN = fails(errno.ENOSPC), fails(errno.EIO)


def _note(kind: str, path: str) -> None:
    for counted in list(_active):
        counted.note(kind, path)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes | os.PathLike) and flags & _WRITES:
            _note("open", os.fsdecode(path))
    elif event in _KINDS:
        path = os.fsdecode(arguments[0])
        at = _FOLDER_FD.get(event)
        if at is not None and not os.path.isabs(path) and (descriptor := arguments[at]) >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), path)
        _note(_KINDS[event], path)


def _noting_fsync(descriptor: int) -> None:
    _note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
    _fsync(descriptor)


def _noting_open(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
    opened = _open(file, mode, *arguments, **named)
    if isinstance(file, int) or not set(mode) & set("wax+"):
        return opened
    return _NotingFile(opened, os.path.abspath(os.fsdecode(file)))


class _NotingFile:
    """A file whose writes, flushes and closes are counted as changes.

    A write that fails has written half of its data, as on a full disk.
    """

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def write(self, data: Any) -> int:
        try:
            _note("write", self._path)
        except BaseException:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)

    def flush(self) -> None:
        _note("flush", self._path)
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            # The file must be closed even if the action raises.
            try:
                _note("close", self._path)
            finally:
                self._file.close()

    def __enter__(self) -> "_NotingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
