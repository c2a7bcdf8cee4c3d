"""Finds, reads and verifies checkpoints, which are folders such as `step-00000030`.

A checkpoint is first written to a folder `partial-...`. Its manifest.json, which lists the sizes
and checksums of all other files, is written last. Then the folder is renamed. So a crash never
leaves an incomplete checkpoint under the final name. Nothing is pickled. README.md lists the files
of a checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
import time
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from wlb.plan import PlannerState, UserError
from wlb.plan.read_file import malformed, read_json, read_object
from wlb.plan.schema import ANYTHING, COUNT, OTHERS, Schema, check_schema

MANIFEST, PLANNER, RUN = "manifest.json", "planner.json", "run.json"
AUTO = "auto"  # value of --resume that means the newest checkpoint that is not damaged
_TENSORS = ".safetensors"
_STEP = re.compile("[0-9]{1,18}")
_SHA256 = re.compile("[0-9a-f]{64}")
SEEN_WITHIN_S = 60.0
"""Seconds to wait at most until this process sees files that another node has written.

An NFS client may cache the entries of a folder for this long (mount option acdirmax, 60 s by
default)."""


# The entries of run.json and their types. Entries whose name ends with "?" may be absent.
_MODEL: Schema = {"experts?": dict, "linear?": dict, "rope_scaling?": dict, OTHERS: ANYTHING}
_IMPORTED: Schema = {
    "from?": str,
    "model_type?": str,
    "max_position_embeddings?": COUNT,
    "bos_token_id?": (COUNT, None),
    "eos_token_ids?": [COUNT],
    "generation_config?": dict,
}
_RUN: Schema = {
    "step": COUNT,
    # The run.json of an imported model has no section of the configuration except "model".
    "spec": ({"model": _MODEL, "training": dict, "data": dict, OTHERS: dict}, {"model": _MODEL}),
    "profile?": str,
    "written_by?": {OTHERS: (str, None)},
    # Checkpoints of older versions have gradient norms.
    "norms?": [float],
    "planner?": {"next_step": COUNT, "policy": str},
    "imported?": _IMPORTED,
}


class DamagedCheckpoint(UserError):
    """Raised if a checkpoint's files are missing, or have changed since they were saved."""


class ToResume(NamedTuple):
    """The checkpoint that --resume selects."""

    checkpoint: Path | None  # the folder to resume from; None for a new run
    # For each newer checkpoint that was skipped, a text that says how the checkpoint is damaged.
    passed_over: tuple[str, ...] = ()
    # Whether an older checkpoint may be loaded instead if `checkpoint` turns out to be damaged.
    falls_back: bool = False


def folder_of(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` updates.

    `directory` is the folder of all checkpoints of the run.
    """
    return directory / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the number of updates after which a checkpoint was saved, from its folder's name."""
    return int(checkpoint.name[5:])


def list_complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, oldest first; they may be damaged."""
    return sorted(p for p in directory.glob("step-*") if _STEP.fullmatch(p.name[5:]))


def resolve_resume(directory: Path, value: str | None) -> ToResume:
    """Return the checkpoint that `--resume` selects.

    Interrupted replacements of checkpoints are undone first (`put_back`).

    Args:
        directory: Folder of the run's checkpoints.
        value: Value of the option; None if the option was not given. "" selects the newest
            checkpoint. "auto" selects the newest checkpoint that `check_files` accepts, or a new
            run if there are no checkpoints. Any other value is the number of a step or the folder
            of a checkpoint.

    Raises:
        UserError: If the selected checkpoint does not exist.
        DamagedCheckpoint: With "auto", if all checkpoints are damaged.
    """
    if value is not None:
        put_back(directory)
    if value == AUTO:
        return _newest_sound(directory)
    return ToResume(None if value is None else _named(directory, value))


def replaced_of(directory: Path, step: int) -> Path:
    """Return the path to which a checkpoint is moved while a new one of its step replaces it."""
    return directory / f"partial-replaced-{step:08d}"


def put_back(directory: Path) -> None:
    """Undo interrupted replacements of checkpoints in `directory`.

    When a run saves a step that already has a checkpoint, the old checkpoint is moved aside
    (`replaced_of`) until the new one has its final name. If a crash came in between, the old
    checkpoint is moved back.
    """
    for replaced in directory.glob("partial-replaced-*"):
        number = replaced.name.rpartition("-")[2]
        if not _STEP.fullmatch(number):
            continue
        final = folder_of(directory, int(number))
        # If the new checkpoint exists, it is complete. The old one is then not needed, and some of
        # its files may be removed already.
        if not final.exists():
            replaced.rename(final)


def _newest_sound(directory: Path) -> ToResume:
    """Return the checkpoint that --resume auto selects: the newest that `check_files` accepts."""
    passed_over: list[str] = []
    for checkpoint in reversed(list_complete(directory)):
        try:
            check_files(checkpoint)
        except DamagedCheckpoint as error:
            passed_over.append(str(error))
        else:
            return ToResume(checkpoint, tuple(passed_over), falls_back=True)
    if passed_over:
        raise DamagedCheckpoint("; ".join(passed_over))
    return ToResume(None)


def sound_before(damaged: Path) -> Path | None:
    """Return the newest checkpoint before `damaged` that `check_files` accepts, or None."""
    for checkpoint in reversed(list_complete(damaged.parent)):
        if step_of(checkpoint) < step_of(damaged):
            try:
                check_files(checkpoint)
            except DamagedCheckpoint:
                continue
            return checkpoint
    return None


def _named(directory: Path, value: str) -> Path:
    """Return the checkpoint that a value of --resume other than "auto" names.

    Args:
        directory: Folder of the run's checkpoints.
        value: "" for the newest checkpoint, else the number of a step or the path of a checkpoint.
    """
    found = list_complete(directory)
    if not value:
        if not found:
            raise UserError(
                f"--resume: {directory} has no complete checkpoint. Start without "
                "--resume, or set run.name and run.output_dir to the values of the "
                "run that you want to resume"
            )
        return found[-1]
    wanted = folder_of(directory, int(value)) if _STEP.fullmatch(value) else Path(value)
    if wanted.absolute() not in [path.absolute() for path in found]:
        there = ", ".join(path.name for path in found) or "none"
        raise UserError(
            f"--resume {value}: {wanted} is not a checkpoint of this run; {directory} "
            f"has these checkpoints: {there}. Give one of them. To start a new run "
            "from weights of another run, set checkpoint.init_from instead"
        )
    return wanted


def resolve(folder: Path, option: str) -> Path:
    """Return `folder` if it is a checkpoint, or the newest checkpoint of the run in `folder`.

    Args:
        folder: A checkpoint, or the folder of a run.
        option: The option that names the folder, for the message.

    Raises:
        UserError: If `folder` is neither of the two.
    """
    if (folder / RUN).is_file():
        return folder
    found = list_complete(folder / "checkpoints")
    if not found:
        raise UserError(
            f"{option} must be a checkpoint (a folder with the file {RUN}) or the "
            "folder of a run that has checkpoints; correct the path"
        )
    return found[-1]


def list_aside(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory` that were renamed to `aside-...`.

    A resumed run renames the checkpoints that are later than the one from which it resumes. Runs
    never remove renamed checkpoints.
    """
    return sorted(directory.glob("aside-*"))


def prepare_for_resume(directory: Path, resumed: Path) -> list[Path]:
    """Remove incomplete checkpoints, and rename checkpoints later than `resumed` to `aside-...`.

    Args:
        directory: Folder of the run's checkpoints.
        resumed: The checkpoint from which the run resumes.

    Returns:
        The new paths of the renamed checkpoints.
    """
    for partial in directory.glob("partial-*"):
        shutil.rmtree(partial)
    aside: list[Path] = []
    for later in list_complete(directory):
        if step_of(later) > step_of(resumed):
            names = (directory / f"aside-{number}-{later.name}" for number in count(1))
            aside.append(later.rename(next(path for path in names if not path.exists())))
    return aside


def planner_state(checkpoint: Path) -> PlannerState:
    """Read the planner's state from a checkpoint. A resumed run continues planning from it."""
    path = checkpoint / PLANNER
    with malformed(path, "resume from another checkpoint"):
        return PlannerState.from_json(read_object(path, remedy="resume from another checkpoint"))


def read_run(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's run.json, and check the types of its entries.

    Checkpoints of older versions of wlb lack some entries.

    Returns:
        The entries of run.json: "step" (number of updates that the weights have had), "spec" (the
            run's configuration), "profile" (name of the kernel profile), "written_by" (versions of
            wlb and torch, and wlb's commit), "imported" (only for a model imported from Hugging
            Face) and "planner" (some entries of planner.json, see `planner_of`).
    """
    path, remedy = checkpoint / RUN, "resume from another checkpoint"
    # `wide` allows many keys, because "imported" has all keys of a model's generation_config.json.
    run = read_object(path, remedy=remedy, wide=True)
    check_schema(run, _RUN, path, remedy=remedy)
    return run


def is_import(checkpoint: Path) -> bool:
    """Return whether a checkpoint was imported from another format, such as Hugging Face's.

    Such a checkpoint has only the weights of a model, in the dtypes of the imported files.
    """
    return set(read_run(checkpoint)["spec"]) == {"model"}


def planner_of(planner: dict[str, Any]) -> dict[str, Any]:
    """Return the next step and the packing policy in planner.json, which run.json repeats.

    If the values in the two files differ, the files come from different saves.

    Args:
        planner: The content of planner.json.
    """
    carry, ready = planner["carry"], planner["ready"]
    next_step = ready[0]["step"] if ready else carry["next_step"]
    return {"next_step": next_step, "policy": carry["policy"]}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(checkpoint: Path, files: dict[str, dict[str, Any]] | None = None) -> None:
    """Write manifest.json and sync it to disk.

    Args:
        checkpoint: The folder.
        files: The size and checksum of each file (`manifest_entry`), by file name. With None, all
            files of the folder are read to find these.
    """
    if files is None:
        files = {path.name: manifest_entry(path) for path in sorted(checkpoint.iterdir())}
    write_json(checkpoint / MANIFEST, {"files": files, "sha256": _digest_of(files)})


def _digest_of(files: dict[str, dict[str, Any]]) -> str:
    """Return the SHA-256 of a manifest's entries. The order of entries does not change it."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def manifest_entry(path: Path) -> dict[str, Any]:
    """Return a file's entry in the manifest: its size in "bytes" and its "sha256"."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data` as JSON to a file, and sync the file to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Read a checkpoint's manifest.json, and check that it can belong to a complete checkpoint.

    Returns:
        The size and the checksum of each file (`manifest_entry`), by file name.

    Raises:
        DamagedCheckpoint: If manifest.json is absent, unreadable or damaged, or does not list all
            kinds of files that a checkpoint has.
    """
    path = checkpoint / MANIFEST
    try:
        found = read_json(path)
        files: dict[str, dict[str, Any]] = found["files"]
        is_sound = found.keys() <= {"files", "sha256"}
        is_sound &= all(_is_entry(name, about) for name, about in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse(path, f"cannot be read ({error})")
    if not is_sound:
        _refuse(
            path,
            'has an entry in a wrong format; each entry must be "NAME": '
            '{"bytes": N, "sha256": 64 hex digits}',
        )
    if RUN not in files or not any(name.endswith(_TENSORS) for name in files):
        _refuse(
            path,
            f"does not list all files of a checkpoint: it must list {RUN} and at "
            f"least one file *{_TENSORS}",
        )
    # Manifests that earlier versions of wlb wrote have no checksum of their entries.
    if found.get("sha256", _digest_of(files)) != _digest_of(files):
        _refuse(path, "is corrupt: the checksum of its entries is wrong")
    return files


def _is_entry(name: str, about: dict[str, Any]) -> bool:
    is_size = type(about["bytes"]) is int and about["bytes"] >= 0
    return (
        is_size
        and about.keys() == {"bytes", "sha256"}
        and Path(name).name == name
        and bool(_SHA256.fullmatch(about["sha256"]))
    )


def check_files(checkpoint: Path) -> None:
    """Check the sizes of a checkpoint's files, and the checksums of the JSON files only.

    `check_share` checks the checksums of the other files, which are large.

    Raises:
        DamagedCheckpoint: If a file is missing or damaged, or would be read although it is not in
            the manifest. The message names the first such file.
    """
    files = read_manifest(checkpoint)
    _refuse_strays(checkpoint, files)
    for name, wanted in files.items():
        path = checkpoint / name
        if what := _damage(path, wanted["bytes"]):
            _refuse(path, what)
        if path.suffix == ".json":
            check_digest(path, wanted["sha256"])


def _refuse_strays(checkpoint: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raise DamagedCheckpoint for a file that is not in the manifest but would be read.

    torch reads every *.safetensors file of the folder, so it would also use the weights in a file
    that somebody copied there. A planner.json or run.json that is not in the manifest would be read
    too.
    """
    for path in _unlisted(checkpoint, files):
        if _is_read(path):
            _refuse(
                path, f"is not listed in {MANIFEST}, so it was added after the checkpoint was saved"
            )


def harmless_strays(checkpoint: Path) -> list[str]:
    """Return the names of files in a checkpoint that are not in its manifest and are never read.

    Hidden files are left out, because file systems create them.
    """
    unlisted = _unlisted(checkpoint, read_manifest(checkpoint))
    return [p.name for p in unlisted if not _is_read(p) and not p.name.startswith(".")]


def _unlisted(checkpoint: Path, files: dict[str, dict[str, Any]]) -> list[Path]:
    """Return the files of a checkpoint that are not in its manifest."""
    return [p for p in sorted(checkpoint.iterdir()) if p.name not in files and p.name != MANIFEST]


def _is_read(path: Path) -> bool:
    """Return whether a file with the name of `path` would be read when its checkpoint is loaded."""
    return path.suffix == _TENSORS or path.name in (PLANNER, RUN)


def _damage(path: Path, num_bytes: int) -> str:
    """Describe how a file differs from one of `num_bytes` bytes; "" if it has this size."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return (
        f"has {size:,} bytes, but had {num_bytes:,} bytes when it was saved"
        if size != num_bytes
        else ""
    )


def first_unseen(folder: Path, files: dict[str, dict[str, Any]], *, within_s: float) -> str:
    """Wait until this process sees all files of a checkpoint with their full sizes.

    On a network file system, files that another node has written may appear late.

    Args:
        folder: The folder of the checkpoint.
        files: The size and the checksum of each file (`manifest_entry`), by file name.
        within_s: Seconds to wait at most.

    Returns:
        A description of the first file that is still missing or incomplete; "" if all files are
            there.
    """
    end = time.monotonic() + within_s
    for name, about in files.items():
        while what := _damage(folder / name, about["bytes"]):
            if time.monotonic() >= end:
                return f"{folder / name} {what}"
            time.sleep(0.1)
    return ""


def await_files(checkpoint: Path, *, within_s: float = SEEN_WITHIN_S) -> None:
    """Wait until this process sees all files of a checkpoint that another node may have written.

    Args:
        checkpoint: The folder.
        within_s: Seconds to wait at most.

    Raises:
        UserError: If some files are still missing or incomplete after `within_s` seconds.
    """
    end = time.monotonic() + within_s
    while True:
        try:
            files = read_manifest(checkpoint)
            break
        # The checkpoint is absent, or this node does not see all of it yet.
        except UserError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.1)
    if problem := first_unseen(checkpoint, files, within_s=max(0.0, end - time.monotonic())):
        raise UserError(
            f"{problem} on this node. All nodes must see the checkpoint; set "
            "run.output_dir to a folder that all nodes share"
        )


def check_share(checkpoint: Path, *, index: int, num: int) -> None:
    """Check the checksums of one reader's share of a checkpoint's large files.

    Several readers, such as the ranks of a run, divide the files among them, so that each file is
    read once.

    Args:
        checkpoint: The folder.
        index: This reader's number. It checks the files `index`, `index + num` and so on, in the
            order of their names.
        num: Number of readers.

    Raises:
        DamagedCheckpoint: If a checksum is wrong. Reader 0 also raises it if the folder has a file
            that loading would read but that is not in the manifest.
    """
    files = read_manifest(checkpoint)
    if index == 0:
        _refuse_strays(checkpoint, files)
    large = [name for name in sorted(files) if not name.endswith(".json")]
    for name in large[index::num]:
        check_digest(checkpoint / name, files[name]["sha256"])


def check_digest(path: Path, wanted: str) -> None:
    """Raise DamagedCheckpoint if a file's SHA-256 is not `wanted`."""
    if file_digest(path) != wanted:
        _refuse(path, "is corrupt: its SHA-256 differs from the one in the manifest")


def _refuse(path: Path, what: str) -> NoReturn:
    """Raise DamagedCheckpoint for a file, with a message that also names the previous checkpoint.

    `what` completes the sentence that begins with `path`, such as "is missing".
    """
    checkpoint = path.parent
    before = [p for p in list_complete(checkpoint.parent) if p.name < checkpoint.name]
    offer = "there is no older checkpoint"
    if before:
        offer = (
            f"resume from the previous checkpoint {before[-1]} with --resume {step_of(before[-1])}"
        )
    raise DamagedCheckpoint(f"{path} {what}. This checkpoint cannot be used; {offer}")
