"""Makes the n-th change of files in a folder fail, or kills the process there.

A change is an open for writing, write, flush, close, fsync, rename, link, removal or making of a
folder. Opens, renames, links and removals are seen by an audit hook, so that those of libraries
count as well; the others by replaced functions.
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
"""Called with the kind of a change and its path; what it raises is what the change raises."""
NAMING = ("rename", "link", "remove", "rmdir")
"""Changes of names, between which another process, or the next start, sees the folder."""

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
    """Counts the changes of files in `folder`; at the one numbered `at`, from 1, does `action`.

    kinds: those that count; empty = all. seen: kind and name of each.
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
        # A path may lead through a descriptor of the folder (/proc/self/fd).
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
    """Counts in the block, see `Changes`."""
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
    """Returns an action that fails as a disk does. number: of errno."""

    def fail(kind: str, path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    return fail


def is_short_of_memory(kind: str, path: str) -> None:
    """An action: no memory for a buffer."""
    raise MemoryError


def is_killed(kind: str, path: str) -> None:
    """An action: kill -9."""
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
    """A file whose writes are changes. One that fails has written half, as on a full disk."""

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
            # A file is closed, whether its last bytes could be written or not.
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
