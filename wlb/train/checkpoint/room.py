"""Checks disk space for a run's checkpoints, and chooses the checkpoints to remove.

A run keeps `checkpoint.keep` checkpoints but needs space for one more, because an old checkpoint is
removed only after the new one is complete.
"""

import errno
import shutil
from pathlib import Path

from wlb.memory.budget import CHECKPOINT_BYTES, size_text
from wlb.plan import UserError
from wlb.spec import RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.faults.disk_full import lack_of_room


def most_at_once(spec: RunSpec) -> int:
    """Return the largest number of checkpoints that a run's folder has at one time.

    These are the checkpoints that are kept, and the one that is being written.
    """
    return spec.checkpoint.keep + 1


def to_prune(directory: Path, spec: RunSpec) -> list[Path]:
    """Return the checkpoints to remove after a save: all but the `checkpoint.keep` newest."""
    return checkpoint.list_complete(directory)[: -spec.checkpoint.keep]


def check_disk_space(directory: Path, spec: RunSpec, resumed: Path | None) -> list[str]:
    """Compare the free disk space with the checkpoints that the run will write.

    Args:
        directory: Folder of the checkpoints, which may not exist yet.
        spec: The run.
        resumed: The checkpoint that the run resumes from; None for a new run. This checkpoint and
            older ones stay on the disk. The space of incomplete checkpoints counts as free, because
            a resumed run removes them.

    Returns:
        A list with one warning if the disk lacks space for all checkpoints that the run has at one
            time (`most_at_once`), else an empty list.

    Raises:
        UserError: If there is no space for a single checkpoint, and fewer than two older ones
            exist.
    """
    folder, there, left = directory.absolute(), list[Path](), 0
    if resumed is not None:
        step = checkpoint.step_of(resumed)
        there = [p for p in checkpoint.list_complete(directory) if checkpoint.step_of(p) <= step]
        left = sum(size_of(path) for path in directory.glob("partial-*"))
    while not folder.exists():
        folder = folder.parent
    usage, one = shutil.disk_usage(folder), CHECKPOINT_BYTES * spec.model.num_parameters
    # Some file systems, such as /proc, report no size. Then nothing can be compared.
    if not usage.total:
        return []
    fit = (usage.free + left) // one
    found = (
        f"{folder} has {size_text(usage.free + left)} of free space, and a checkpoint "
        f"takes about {size_text(one)}"
    )
    # If there are two or more checkpoints, the run can still save, because a save removes the
    # oldest one if the disk is full.
    if not fit and len(there) < 2:
        raise UserError(
            f"run.output_dir = {spec.run.output_dir}: {found}, so no checkpoint could "
            "be saved. Make space on this disk, or set run.output_dir to a folder on a larger "
            "disk"
        )
    need = min(most_at_once(spec), len(there) + _saves_to_come(spec, resumed)) - len(there)
    if fit >= need:
        return []
    return [
        (
            f"WARNING: {found}. Only {fit} more checkpoints fit, but the run will need "
            f"space for {need} more (it keeps checkpoint.keep = {spec.checkpoint.keep} of them "
            "while it writes another). Make space or lower checkpoint.keep. If a save finds the "
            "disk full, it removes the oldest checkpoint, or fails if there is only one"
        )
    ]


def _saves_to_come(spec: RunSpec, resumed: Path | None) -> int:
    """Return how many checkpoints the run will write from now until its end.

    `resumed` is the checkpoint that the run resumes from; None for a new run.
    """
    interval, steps = spec.checkpoint.interval, spec.training.steps
    done = checkpoint.step_of(resumed) if resumed is not None else 0
    # The run saves after every `interval` updates, and once more at its end.
    return 1 + (max(0, steps - 1) // interval - done // interval if interval else 0)


def is_full(failure: BaseException) -> bool:
    """Return whether a save failed because the disk is full.

    All ranks must get the same answer. They do, because `failure` is the same on all ranks. It is
    torch's CheckpointException, which has the errors of all ranks, or a CheckpointError that all
    ranks raise together.
    """
    failures = getattr(failure, "failures", None)
    if failures:
        return any(says_full(cause) for cause, _ in failures.values())
    return bool(getattr(failure, "is_full", False))


def says_full(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that caused it, means that a disk or quota is full."""
    found = lack_of_room(error)
    # EFBIG means that a file exceeds the limit on the size of one file. Removing old checkpoints
    # does not help then.
    return found is not None and found.errno != errno.EFBIG


def to_drop(directory: Path) -> Path | None:
    """Return the oldest checkpoint in `directory` that may be removed to make space, or None.

    The newest checkpoint that is not damaged is never removed.
    """
    found = checkpoint.list_complete(directory)
    newest = next((path for path in reversed(found) if _is_sound(path)), None)
    if newest is None:
        return None
    return next((p for p in found if p != newest), None)


def _is_sound(path: Path) -> bool:
    try:
        checkpoint.check_files(path)
    except checkpoint.DamagedCheckpoint:
        return False
    return True


def size_of(path: Path) -> int:
    """Return the size in bytes of all files in a folder and its subfolders."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def aside_remark(directory: Path) -> str:
    """Return a line that lists the checkpoints renamed to `aside-...`, with their sizes.

    The result is "" if there are none. A resumed run renames the checkpoints that are later than
    the one from which it resumes. No run removes them, so they take disk space until a user removes
    them.
    """
    there = [
        f"{path.name} ({size_text(size_of(path))})" for path in checkpoint.list_aside(directory)
    ]
    if not there:
        return ""
    return (
        f"{directory} has checkpoints that a resumed run renamed, because they are later than the "
        f"one from which it resumed: {', '.join(there)}. No run removes these; remove the ones "
        "that you do not need"
    )


def strays_remark(saved_in: Path) -> str:
    """Return a warning about files in a checkpoint that were not saved with it, else ""."""
    names = checkpoint.harmless_strays(saved_in)
    if not names:
        return ""
    return (
        f"WARNING: {saved_in} has files that were not saved with it: "
        f"{', '.join(names)}. They are ignored, and will be deleted together with the "
        "checkpoint; move them elsewhere to keep them"
    )
