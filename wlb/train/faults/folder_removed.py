"""Ends a run whose folder was removed or renamed.

Without this check, the run would continue, and the files that it writes would be lost silently.
"""

import errno
import os
from pathlib import Path

from wlb.plan import RunError
from wlb.train.hooks import ExecutedStep, Hook, RunContext

# Error numbers which mean that no file or folder exists at a path (any more).
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class FolderLost(RunError):
    """Raised if the run's folder was removed or renamed."""


class KeepFolder(Hook):
    """Checks after each step that the path `directory` still leads to the run's folder.

    If the path leads elsewhere or nowhere, FolderLost is raised, before a checkpoint is saved. Only
    rank 0 has this hook, so the hook does not communicate.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._began_as: tuple[int, int] | None = None

    def begin(self, run: RunContext) -> None:
        """Remember the run folder's device and inode numbers, to recognise the folder later."""
        self._began_as = _identity(self.directory)

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """Raise FolderLost if the run's folder was removed or renamed."""
        self._check(run)

    def end(self, run: RunContext) -> None:
        """Check once more, before the last checkpoint, that the run's folder was not removed."""
        self._check(run)

    def finished(self, run: RunContext) -> None:
        """Check once more, after everything was written, that the run's folder was not removed."""
        self._check(run)

    def _check(self, run: RunContext) -> None:
        if self._began_as is not None and _identity(self.directory) == self._began_as:
            return
        raise FolderLost(
            f"{self.directory}, the folder of this run, was removed or renamed after "
            f"step {run.steps_done}, so the results of further steps would be lost. If "
            "it was renamed, restore its name and continue from the last checkpoint "
            "with --resume"
        )


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return the device and inode numbers of a folder; None if the folder does not exist."""
    try:
        status = os.stat(directory)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return status.st_dev, status.st_ino
