"""Folders that output goes to: made where they can be, and refused with the cause where not.

Other processes remove and replace folders of wlb at any time, so some steps are tried again. Every
such loop goes over `attempts`, which ends: an error that stays is told from a race by what is in
the way (`_obstacle`), or by its staying.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from wlb.plan import UserError

TRIES = 1000
"""Times that something is tried which another process undid meanwhile; each process that waits for
one lock can undo it once."""
PAUSE_S = 0.002
_IN_THE_WAY = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.ELOOP)
"""Errors where something is in the way, or another process removed a folder in this moment."""


def attempts(path: Path) -> Iterator[int]:
    """Numbers to try by, with pauses; UserError when there were `TRIES`. path: what another process
    removed or replaced while this one made, opened or locked it.
    """
    for number in range(TRIES):
        yield number
        time.sleep(PAUSE_S)
    raise UserError(
        f"{path} was removed or replaced {TRIES} times while this process took it; see what "
        f"removes it, or choose a folder on another file system"
    )


def open_folder(path: Path) -> int:
    """A descriptor of the folder that `path` leads to, through links as well."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make the folder and its parents where they are absent.

    UserError names the first component that leads nowhere or is no folder, and what a link points
    to. Other reasons, such as permissions, stay OSErrors of the system.
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
        f"{path} cannot be made: {missing.parent} takes no new folder {missing.name!r} "
        f"({error.strerror}); choose another folder"
    )


def make_and_open(path: Path, *, mode: int = 0o777) -> int:
    """`make_folder`, and a descriptor of it; tries again while its owner removes it."""
    for _ in attempts(path):
        make_folder(path, mode=mode)
        try:
            return open_folder(path)
        except FileNotFoundError:
            continue
    raise AssertionError  # attempts has raised


def refuse_nowhere(path: Path) -> None:
    """UserError where no folder can be made at `path`, whoever may write there."""
    if reason := _obstacle(path):
        raise UserError(f"{path} cannot be made: {reason}, or choose another folder")


def refuse_file(path: Path) -> None:
    """UserError, before any work, where no file can be written at `path`: it is a folder, or what
    it or its folder leads to is not there.
    """
    folder = path.absolute().parent
    if folder.is_dir() and path.is_symlink() and not path.exists():
        folder = folder.joinpath(os.readlink(path)).parent
    reason = _obstacle(folder) or _circle(path)
    if path.is_dir():
        reason = "it is a folder; give the name of a file"
    elif not reason and not folder.is_dir():
        missing = next(part for part in _components(folder) if not part.is_dir())
        reason = f"its folder is missing, from {missing} on; make it"
    if reason:
        raise UserError(f"{path} cannot be written: {reason}, or choose another place")


def _circle(path: Path) -> str:
    """What is wrong with a file's link that leads back to itself, "" for any other path."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            return (
                f"{path} is a link to {os.readlink(path)}, which leads nowhere "
                f"({error.strerror}); remove it"
            )
    return ""


def _components(path: Path) -> tuple[Path, ...]:
    """The path and its parents, the root first."""
    return (*reversed(path.parents), path)


def _obstacle(path: Path) -> str:
    """The first component of `path` that is there and leads to no folder, with the remedy; "" where
    nothing is in the way.
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
                f"mount or make what it points to"
            )
        return f"{part} is a file, not a folder; move it away"
    return ""
