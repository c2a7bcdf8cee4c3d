"""Claims a run's folder for this process, and moves an older run of the same name aside."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console

from wlb.plan import UserError
from wlb.spec import RunSpec
from wlb.spec.blend import parse_blend
from wlb.spec.run import RunSection
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.room import aside_remark
from wlb.train.checkpoint.shared_folder import remove_left_tokens
from wlb.train.faults.lock import NAME as LOCK
from wlb.train.faults.lock import RunLock
from wlb.train.faults.stop import by_hand
from wlb.train.job import Job, directory_of
from wlb.train.stores import DOCSTRINGS, STDLIB

_TRIED_BYTES = 1 << 12  # size of the temporary file that tests whether a folder can be written


def claim_directory(job: Job, console: Console, lock: RunLock) -> None:
    """Lock the run's folder, and move the folder of an older run of the same name aside.

    For a resumed run, checkpoints that are newer than the one from which it resumes are moved aside
    instead. A temporary file is written to find out whether files can be written to the folder.

    Args:
        job: The run.
        console: Where messages are printed.
        lock: The lock of the run's folder, which may be locked already.

    Raises:
        UserError: If no file can be written to the folder, or if another process trains the run.
    """
    with claiming(job.spec):
        lock.take()
        remove_left_tokens(job.directory)
        if _move_older_aside(job, console):
            # The locked folder was moved aside, so the new folder needs a lock too.
            lock.take_next()
        _forget_stop(job.spec.run, console)
        with tempfile.TemporaryFile(dir=job.directory) as file:
            file.write(bytes(_TRIED_BYTES))


def _forget_stop(run: RunSection, console: Console) -> None:
    """Remove a stop file that is left from an earlier job of this name.

    Only the process that has locked the run's folder may call this. Without the lock, it could
    remove a stop file that is meant for a job that is running.
    """
    file = by_hand(run)
    if file.exists():
        file.unlink(missing_ok=True)
        console.print(
            f"removed the stop file {file}, because it was left from an earlier job; to stop this "
            "job, create it again"
        )


@contextmanager
def claiming(spec: RunSpec) -> Iterator[None]:
    """Replace an OSError in the block by a UserError that names run.output_dir."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.output_dir = {spec.run.output_dir}: {directory_of(spec)} cannot be "
            f"written ({error}). Set run.output_dir to a folder with free space that "
            "you may write to"
        ) from None


def refuse_inputs_in(directory: Path, spec: RunSpec) -> None:
    """Raise UserError if a file that the run reads is in `directory`, which will be moved aside."""
    folder = directory.absolute()
    for key, path in _inputs(spec):
        given = Path(path).absolute()
        if path and (folder == given or folder in given.parents):
            raise UserError(
                f"{key} = {path} is inside {directory}, the folder of an older run of "
                "the same name, and this folder is renamed before training. Copy "
                f"{path} elsewhere, or set another run.name"
            )


def _move_older_aside(job: Job, console: Console) -> bool:
    """Rename the folder of an older run of the same name to `NAME.1`, `NAME.2` and so on.

    A resumed run keeps its folder. Only checkpoints that are newer than the one from which it
    resumes are renamed.

    Returns:
        Whether the run's folder was renamed.
    """
    directory = job.directory
    if job.resume is not None:
        console.print(f"resuming from {job.resume}")
        for path in checkpoint.prepare_for_resume(job.checkpoints, job.resume):
            console.print(f"a checkpoint later than the resumed one was renamed to {path}")
        if line := aside_remark(job.checkpoints):
            console.print(line)
    elif any(path.name != LOCK for path in directory.iterdir()):
        names = (directory.with_name(f"{directory.name}.{number}") for number in count(1))
        aside = directory.rename(next(path for path in names if not path.exists()))
        console.print(f"the folder of an older run of the same name was renamed to {aside}")
        return True
    return False


def _inputs(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield a pair for each path that a run reads: the configuration key, and the path."""
    data = spec.data
    yield "cost.profile", spec.cost.profile
    yield "checkpoint.init_from", spec.checkpoint.init_from
    yield "packing.packs", spec.packing.packs
    yield "data.heldout_store", data.heldout_store
    yield "data.store", data.store
    for prefix, _ in parse_blend(data.blend):
        yield "data.blend", prefix
    if not (data.store or data.blend or data.corpus in (STDLIB, DOCSTRINGS)):
        yield "data.corpus", data.corpus
