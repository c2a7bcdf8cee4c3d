"""End a run whose folder was removed or renamed: what it writes would be lost without a word."""

import errno
import os
from pathlib import Path

from wlb.plan import RunError
from wlb.train.hooks import ExecutedStep, Hook, RunContext

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class FolderLost(RunError):
    """The run's folder is not where it was."""


class KeepFolder(Hook):
    """Looks after each step whether `directory` is the folder that it was at the begin; on rank 0,
    without communication. FolderLost if not, before anything is saved there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._began_as: tuple[int, int] | None = None

    def begin(self, run: RunContext) -> None:
        self._began_as = _identity(self.directory)

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        self._check(run)

    def end(self, run: RunContext) -> None:
        self._check(run)

    def finished(self, run: RunContext) -> None:
        self._check(run)

    def _check(self, run: RunContext) -> None:
        if self._began_as is not None and _identity(self.directory) == self._began_as:
            return
        raise FolderLost(
            f"{self.directory} is no longer the folder of this run, after step {run.steps_done}: "
            f"it was removed or renamed, and what the run writes would be lost. If it was renamed, "
            f"give it its name back and go on from its last checkpoint with --resume"
        )


def _identity(directory: Path) -> tuple[int, int] | None:
    """Device and inode of a folder; None if there is none."""
    try:
        status = os.stat(directory)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return status.st_dev, status.st_ino
