"""A full disk in one line: what could not be written, and what to do."""

import errno

from wlb.plan import RunError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDisk(RunError):
    """A file system, a quota or a limit of file sizes leaves no room."""


def lack_of_room(error: BaseException | None) -> OSError | None:
    """The error, or what caused it, that is a lack of room; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def full_disk(error: BaseException) -> FullDisk | None:
    """The error in words where it, or what caused it, is a lack of room; else None."""
    cause = lack_of_room(error)
    if cause is None:
        return None
    path = f"{cause.filename}" if cause.filename else "a file of this run"
    return FullDisk(
        f"{path} cannot be written ({cause.strerror}): make room there, in run.output_dir and in "
        f"the folder for temporary files (TMPDIR), and go on from the last checkpoint with --resume"
    )
