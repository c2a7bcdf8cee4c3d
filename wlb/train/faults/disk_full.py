"""Replaces errors that a full disk has caused by one error, whose message says what to do."""

import errno

from wlb.plan import RunError

# Error numbers that count as a full disk: no space is left on it, a quota is exceeded, or a file
# exceeds the limit on the size of one file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDisk(RunError):
    """Raised if a file system, a quota or a limit on file sizes left no space for a file."""


def lack_of_room(error: BaseException | None) -> OSError | None:
    """Return the first of `error` and its causes that is about a full disk; None if none is."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def full_disk(error: BaseException) -> FullDisk | None:
    """Return a FullDisk error that explains `error`; None if no full disk has caused `error`."""
    cause = lack_of_room(error)
    if cause is None:
        return None
    path = f"{cause.filename}" if cause.filename else "a file of this run"
    return FullDisk(
        f"{path} cannot be written ({cause.strerror}). Make space on the disk of this file, "
        "of run.output_dir and of the folder for temporary files (TMPDIR), then continue "
        "from the last checkpoint with --resume"
    )
