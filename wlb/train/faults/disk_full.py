"""Turns errors of a full disk into a message of one line, which says what to do."""

import errno

from wlb.plan import RunError

# Error numbers of a full disk: no space is left, a quota is exceeded, or a file is too large.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDisk(RunError):
    """A file system, a quota or a limit on file sizes left no space for a file."""


def lack_of_room(error: BaseException | None) -> OSError | None:
    """Return the first error of `error` and its causes that means a full disk; None without one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def full_disk(error: BaseException) -> FullDisk | None:
    """Return a FullDisk error that explains `error`; None if its cause is not a full disk."""
    cause = lack_of_room(error)
    if cause is None:
        return None
    path = f"{cause.filename}" if cause.filename else "a file of this run"
    return FullDisk(
        f"{path} cannot be written ({cause.strerror}). Free space on its disk, in "
        "run.output_dir and in the folder for temporary files (TMPDIR), then continue "
        "from the last checkpoint with --resume"
    )
