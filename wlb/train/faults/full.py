"""A full disk in one line: what could not be written, and what to do."""

import errno

from wlb.plan import RunError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDisk(RunError):
    """A file system, a quota or a limit of file sizes leaves no room."""


def full_disk(error: BaseException) -> FullDisk | None:
    """The error in words where it, or what caused it, is a lack of room; else None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            path = f"{cause.filename}" if cause.filename else "a file of this run"
            return FullDisk(
                f"{path} cannot be written ({cause.strerror}): make room there, in "
                f"run.output_dir and in the folder for temporary files (TMPDIR), and go on from "
                f"the last checkpoint with --resume"
            )
        cause = cause.__cause__ or cause.__context__
    return None
