"""Room on the disk for a run's checkpoints: how many are there at once, whether they fit, and which
may be removed.

A save needs room for one checkpoint more than are kept, because older ones are removed only after
the new one is complete.
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
    """Checkpoints that the run's folder holds at most: those that are kept, and the one that is
    written.
    """
    return spec.checkpoint.keep + 1


def to_prune(directory: Path, spec: RunSpec) -> list[Path]:
    """Checkpoints to remove once a new one is complete: all but the newest."""
    return checkpoint.list_complete(directory)[: -spec.checkpoint.keep]


def hold_room(directory: Path, spec: RunSpec, resumed: Path | None) -> list[str]:
    """A warning if fewer checkpoints fit than the run will hold at once; UserError if not one does.

    directory: of checkpoints, which may be absent. resumed: the one that the run goes on from; its
    predecessors stay, and what a crash left half-written goes away.
    """
    folder, there, left = directory.absolute(), list[Path](), 0
    if resumed is not None:
        step = checkpoint.step_of(resumed)
        there = [p for p in checkpoint.list_complete(directory) if checkpoint.step_of(p) <= step]
        left = sum(size_of(path) for path in directory.glob("partial-*"))
    while not folder.exists():
        folder = folder.parent
    usage, one = shutil.disk_usage(folder), CHECKPOINT_BYTES * spec.model.num_parameters
    # A file system without blocks, such as /proc, says nothing of its room.
    if not usage.total:
        return []
    fit = (usage.free + left) // one
    found = (
        f"{folder} has {size_text(usage.free + left)} free, and a checkpoint takes about "
        f"{size_text(one)}"
    )
    # Of several checkpoints the oldest is removed if a save finds no room.
    if not fit and len(there) < 2:
        raise UserError(
            f"run.output_dir = {spec.run.output_dir}: {found}, so that not one could be saved; "
            f"free room there, or set run.output_dir to a larger disk"
        )
    need = min(most_at_once(spec), len(there) + _saves_to_come(spec, resumed)) - len(there)
    if fit >= need:
        return []
    return [
        f"WARNING: {found}: {fit} more fit, but the run will hold {need} more at once "
        f"(checkpoint.keep = {spec.checkpoint.keep}, and the one that is being written). Free "
        f"room or lower checkpoint.keep; a save without room removes the oldest checkpoint, and "
        f"fails if there is only one"
    ]


def _saves_to_come(spec: RunSpec, resumed: Path | None) -> int:
    interval, steps = spec.checkpoint.interval, spec.training.steps
    done = checkpoint.step_of(resumed) if resumed is not None else 0
    # The last save is that of the run's end.
    return 1 + (max(0, steps - 1) // interval - done // interval if interval else 0)


def is_full(failure: BaseException) -> bool:
    """Whether a save failed for lack of room. The same on all ranks if all know of the failure
    (torch's CheckpointException lists it by rank).
    """
    failures = getattr(failure, "failures", None)
    if failures:
        return any(says_full(cause) for cause, _ in failures.values())
    return bool(getattr(failure, "is_full", False))


def says_full(error: BaseException | None) -> bool:
    """Whether an error of this process, or what caused it, is a lack of room on the disk."""
    found = lack_of_room(error)
    # A limit of file sizes does not move when other files are removed.
    return found is not None and found.errno != errno.EFBIG


def to_drop(directory: Path) -> Path | None:
    """The oldest checkpoint, which may make room for a new one unless it is the only sound one;
    None if none may.
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
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def aside_remark(directory: Path) -> str:
    """A line for the log on checkpoints that were set aside, and take room until somebody removes
    them; "" if there are none.
    """
    there = [
        f"{path.name} ({size_text(size_of(path))})" for path in checkpoint.list_aside(directory)
    ]
    if not there:
        return ""
    return (
        f"set aside in {directory}, where no run removes them: {', '.join(there)}; remove those "
        f"that are not needed"
    )


def strays_remark(saved_in: Path) -> str:
    """A line for the log on files in a checkpoint that are none of its own, "" without any."""
    names = checkpoint.harmless_strays(saved_in)
    if not names:
        return ""
    return (
        f"WARNING: {saved_in} has files that were not saved with it: {', '.join(names)}. They are "
        f"not read, and go when the checkpoint is removed; keep them elsewhere"
    )
