"""Create folders for output, with error messages that name what is in the way.

Other processes may remove or replace folders of wlb at any time, so some operations are retried.
The number of retries is limited. Functions raise an error at once if a file or a broken link is in
the way (`_obstacle`), because retries would not help.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from wlb.plan import UserError

TRIES = 1000
"""How often an operation is repeated if other processes undo it.

Each process that waits for the same lock can undo it once, so this number must exceed the number
of processes.
"""
PAUSE_S = 0.002
"""Pause before an operation is repeated, in seconds."""
# Errors of mkdir if a file or link is in the way, or if another process just removed a folder.
_IN_THE_WAY = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.ELOOP)


def attempts(path: Path) -> Iterator[int]:
    """Yield 0 to `TRIES` - 1 with a short pause after each, for a loop that retries an operation.

    The loop breaks or returns as soon as the operation succeeds.

    Args:
        path: What the loop tries to create, open or lock, for the error message.

    Raises:
        UserError: The loop asks for another number, because other processes keep removing `path`.
    """
    for number in range(TRIES):
        yield number
        time.sleep(PAUSE_S)
    raise UserError(
        f"another program removed or replaced {path} {TRIES} times while wlb tried to use it; stop "
        f"that program, or choose a path on another file system"
    )


def open_folder(path: Path) -> int:
    """Open a folder, following links, and return its file descriptor."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Create a folder and its parents, unless they exist.

    Args:
        path: The folder.
        mode: Permissions of a new folder. Bits of the umask are cleared in them.

    Raises:
        UserError: A part of the path is a file, or a link to something that does not exist.
        OSError: The folder cannot be created for any other reason, such as missing permissions.
    """
    error = OSError()
    for _ in range(TRIES):
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            return
        except OSError as found:
            if found.errno not in _IN_THE_WAY:
                raise
            error = found
        refuse_nowhere(path)
        time.sleep(PAUSE_S)
    missing = next((part for part in _components(path) if not part.is_dir()), path)
    raise UserError(
        f"the folder {path} cannot be created: creating {missing} fails "
        f"({error.strerror}); choose another folder"
    )


def make_and_open(path: Path, *, mode: int = 0o777) -> int:
    """Create a folder and its parents unless they exist; open it and return its file descriptor.

    If another process removes the folder before it is open, it is created again.
    """
    for _ in attempts(path):
        make_folder(path, mode=mode)
        try:
            return open_folder(path)
        except FileNotFoundError:
            continue
    raise AssertionError  # not reached: `attempts` raises UserError


def refuse_nowhere(path: Path) -> None:
    """Raise UserError if a file or a broken link prevents that a folder is created at `path`.

    Permissions are not checked.
    """
    if reason := _obstacle(path):
        raise UserError(f"the folder {path} cannot be created: {reason}, or choose another folder")


def refuse_file(path: Path) -> None:
    """Raise UserError if no file can be written at `path`.

    Commands call this before they do any work. It refuses a folder, a path whose folder does not
    exist, and a link that leads nowhere. It does not check permissions.
    """
    # A link to a missing file can be written, if the folder that it points to exists.
    folder = path.absolute().parent
    if folder.is_dir() and path.is_symlink() and not path.exists():
        folder = folder.joinpath(os.readlink(path)).parent
    reason = _obstacle(folder) or _circle(path)
    if path.is_dir():
        reason = "it is a folder; give the name of a file"
    elif not reason and not folder.is_dir():
        missing = next(part for part in _components(folder) if not part.is_dir())
        reason = f"the folder {missing} does not exist; make it"
    if reason:
        raise UserError(f"the file {path} cannot be written: {reason}, or choose another path")


def _circle(path: Path) -> str:
    """Return an error message if `path` is a link in a circle of symbolic links, otherwise ""."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            return (
                f"{path} is a link to {os.readlink(path)}, which leads nowhere "
                f"({error.strerror}); remove the link"
            )
    return ""


def _components(path: Path) -> tuple[Path, ...]:
    """Return all parents of a path from the root down, and then the path itself."""
    return (*reversed(path.parents), path)


def _obstacle(path: Path) -> str:
    """Return an error message if no folder can be created at `path`, otherwise "".

    The message names the first part of the path that exists but does not lead to a folder.
    """
    for part in _components(path):
        try:
            if stat.S_ISDIR(part.stat().st_mode):
                continue
        except OSError as error:
            if not part.is_symlink():
                return ""
            return (
                f"{part} is a link to {os.readlink(part)}, which leads nowhere ({error.strerror}); "
                f"mount or make the target of the link"
            )
        return f"{part} is a file, not a folder; move it away"
    return ""
