"""Checkpoint folders `step-00000030`: find, describe and verify them (README.md lists their files).

manifest.json is written last, then the folder is renamed from `partial-...`, so a crash never
leaves an incomplete checkpoint under the final name. Nothing is pickled.
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
from wlb.plan.schema import ANYTHING, COUNT, OTHERS, Schema, hold_schema

MANIFEST, PLANNER, RUN = "manifest.json", "planner.json", "run.json"
AUTO = "auto"
_TENSORS = ".safetensors"
_STEP = re.compile("[0-9]{1,18}")
_SHA256 = re.compile("[0-9a-f]{64}")
SEEN_WITHIN_S = 60.0
"""An NFS client may cache a folder's entries for this long (acdirmax)."""


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
    # Of an import, only the model.
    "spec": ({"model": _MODEL, "training": dict, "data": dict, OTHERS: dict}, {"model": _MODEL}),
    "profile?": str,
    "written_by?": {OTHERS: (str, None)},
    # Gradient norms, in checkpoints of older versions.
    "norms?": [float],
    "planner?": {"next_step": COUNT, "policy": str},
    "imported?": _IMPORTED,
}


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not those that were saved."""


class ToResume(NamedTuple):
    """The checkpoint that `--resume` names, None for a new run. passed_over: why newer ones were
    not taken. falls_back: whether an older one may be loaded if this one is damaged.
    """

    checkpoint: Path | None
    passed_over: tuple[str, ...] = ()
    falls_back: bool = False


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def list_complete(directory: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    return sorted(p for p in directory.glob("step-*") if _STEP.fullmatch(p.name[5:]))


def resolve_resume(directory: Path, asked: str | None) -> ToResume:
    """Return the checkpoint that `--resume` names; UserError if there is none. One that a crash
    left between its old and its new name is put back first.

    asked: None = no --resume, "" = the newest, "auto" = the newest if any, else a step or a folder.
    "auto" passes over newest ones that `check_files` refuses, if there is another.
    """
    if asked is not None:
        put_back(directory)
    if asked == AUTO:
        return _newest_sound(directory)
    return ToResume(None if asked is None else _asked_for(directory, asked))


def replaced_of(directory: Path, step: int) -> Path:
    """The temporary name of a checkpoint while a new one of the same step replaces it."""
    return directory / f"partial-replaced-{step:08d}"


def put_back(directory: Path) -> None:
    """Give checkpoints their names back whose replacement was never published."""
    for replaced in directory.glob("partial-replaced-*"):
        number = replaced.name.rpartition("-")[2]
        if not _STEP.fullmatch(number):
            continue
        final = folder_of(directory, int(number))
        # If its replacement is there, the old checkpoint may be half removed.
        if not final.exists():
            replaced.rename(final)


def _newest_sound(directory: Path) -> ToResume:
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
    """Return the newest checkpoint before `damaged` that `check_files` accepts."""
    for checkpoint in reversed(list_complete(damaged.parent)):
        if step_of(checkpoint) < step_of(damaged):
            try:
                check_files(checkpoint)
            except DamagedCheckpoint:
                continue
            return checkpoint
    return None


def _asked_for(directory: Path, asked: str) -> Path:
    found = list_complete(directory)
    if not asked:
        if not found:
            raise UserError(
                f"--resume: no checkpoint in {directory}; start without --resume, or set run.name "
                f"and run.output_dir to those of the run that should continue"
            )
        return found[-1]
    wanted = folder_of(directory, int(asked)) if _STEP.fullmatch(asked) else Path(asked)
    if wanted.absolute() not in [path.absolute() for path in found]:
        there = ", ".join(path.name for path in found) or "none"
        raise UserError(
            f"--resume {asked}: {wanted} is no checkpoint of this run; {directory} has {there}. To "
            f"start a new run from its weights, set checkpoint.init_from"
        )
    return wanted


def resolve(folder: Path, asked: str) -> Path:
    """`folder` if it is a checkpoint, or a run folder's newest; else UserError about `asked`."""
    if (folder / RUN).is_file():
        return folder
    found = list_complete(folder / "checkpoints")
    if not found:
        raise UserError(
            f"{asked} is neither a checkpoint (a folder with {RUN}) nor a run that has checkpoints"
        )
    return found[-1]


def list_aside(directory: Path) -> list[Path]:
    """Return checkpoints that a resume set aside, which no run removes."""
    return sorted(directory.glob("aside-*"))


def prepare_for_resume(directory: Path, resumed: Path) -> list[Path]:
    """Remove partial checkpoints; rename those after `resumed`, and return the new paths."""
    for partial in directory.glob("partial-*"):
        shutil.rmtree(partial)
    aside: list[Path] = []
    for later in list_complete(directory):
        if step_of(later) > step_of(resumed):
            names = (directory / f"aside-{number}-{later.name}" for number in count(1))
            aside.append(later.rename(next(path for path in names if not path.exists())))
    return aside


def planner_state(checkpoint: Path) -> PlannerState:
    """Return the planner's state as it was saved; `Planner.steps` continues from it."""
    path = checkpoint / PLANNER
    with malformed(path, "use another checkpoint"):
        return PlannerState.from_json(read_object(path, remedy="use another checkpoint"))


def read_run(checkpoint: Path) -> dict[str, Any]:
    """Read `run.json`: "step" (executed steps), "spec", "profile" (name of the kernel profile),
    "written_by" (versions of wlb and torch, and wlb's commit),
    for a model imported from Hugging Face "imported", and in "planner" what planner.json must say
    as well. Older checkpoints lack some.
    """
    path, remedy = checkpoint / RUN, "use another checkpoint"
    # "imported" holds a model's generation_config.json.
    run = read_object(path, remedy=remedy, wide=True)
    hold_schema(run, _RUN, path, remedy=remedy)
    return run


def is_import(checkpoint: Path) -> bool:
    """Whether a checkpoint was imported, with only a model's weights, in the files' dtypes."""
    return set(read_run(checkpoint)["spec"]) == {"model"}


def planner_of(planner: dict[str, Any]) -> dict[str, Any]:
    """What run.json says of a checkpoint's planner.json: the step that comes next and the policy of
    what waits.
    """
    carry, ready = planner["carry"], planner["ready"]
    next_step = ready[0]["step"] if ready else carry["next_step"]
    return {"next_step": next_step, "policy": carry["policy"]}


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(checkpoint: Path, files: dict[str, dict[str, Any]] | None = None) -> None:
    """Write manifest.json and sync it to disk. files: known entries; None = read all files."""
    if files is None:
        files = {path.name: manifest_entry(path) for path in sorted(checkpoint.iterdir())}
    write_json(checkpoint / MANIFEST, {"files": files, "sha256": _digest_of(files)})


def _digest_of(files: dict[str, dict[str, Any]]) -> str:
    """SHA-256 of a manifest's own entries, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def manifest_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON and sync it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{"bytes", "sha256"} by file name; UserError if the manifest is absent, unreadable or lists no
    whole checkpoint.
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
        _refuse(path, 'has an entry that is not "NAME": {"bytes": N, "sha256": 64 digits}')
    if RUN not in files or not any(name.endswith(_TENSORS) for name in files):
        _refuse(path, f"lists no whole checkpoint, which has {RUN} and files *{_TENSORS}")
    # Manifests of earlier versions have no digest of their own.
    if found.get("sha256", _digest_of(files)) != _digest_of(files):
        _refuse(path, "is corrupt: its entries are not those that were saved")
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
    """UserError for the first file that is missing, damaged or not the checkpoint's; checksums of
    JSON files only.
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
    """Torch reads every *.safetensors of the folder, so that one which a copy left behind would be
    trained; JSON files of our names are read without being asked for.
    """
    for path in _unlisted(checkpoint, files):
        if _is_read(path):
            _refuse(path, f"is not in {MANIFEST}: it was not saved with the others")


def harmless_strays(checkpoint: Path) -> list[str]:
    """Names in a checkpoint's folder that were not saved with it and that nothing reads. Hidden
    files, the file system's own, are left out.
    """
    unlisted = _unlisted(checkpoint, read_manifest(checkpoint))
    return [p.name for p in unlisted if not _is_read(p) and not p.name.startswith(".")]


def _unlisted(checkpoint: Path, files: dict[str, dict[str, Any]]) -> list[Path]:
    return [p for p in sorted(checkpoint.iterdir()) if p.name not in files and p.name != MANIFEST]


def _is_read(path: Path) -> bool:
    return path.suffix == _TENSORS or path.name in (PLANNER, RUN)


def _damage(path: Path, num_bytes: int) -> str:
    """Describe the defect of a file's size; "" if there is none."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return f"has {size:,} bytes, but was saved with {num_bytes:,}" if size != num_bytes else ""


def first_unseen(folder: Path, files: dict[str, dict[str, Any]], *, within_s: float) -> str:
    """Name the files of `files` that this process does not see completely after `within_s`, or
    "".
    """
    end = time.monotonic() + within_s
    for name, about in files.items():
        while what := _damage(folder / name, about["bytes"]):
            if time.monotonic() >= end:
                return f"{folder / name} {what}"
            time.sleep(0.1)
    return ""


def await_files(checkpoint: Path, *, within_s: float = SEEN_WITHIN_S) -> None:
    """Wait for a checkpoint that another node may have just written; UserError after `within_s`."""
    end = time.monotonic() + within_s
    while True:
        try:
            files = read_manifest(checkpoint)
            break
        # The checkpoint is absent, or not completely visible yet.
        except UserError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.1)
    if problem := first_unseen(checkpoint, files, within_s=max(0.0, end - time.monotonic())):
        raise UserError(f"{problem}, as this node sees it; run.output_dir must be shared by all")


def check_share(checkpoint: Path, *, index: int, num: int) -> None:
    """Check the checksums of this reader's share of the large files: every num-th from `index`."""
    files = read_manifest(checkpoint)
    if index == 0:
        _refuse_strays(checkpoint, files)
    large = [name for name in sorted(files) if not name.endswith(".json")]
    for name in large[index::num]:
        check_digest(checkpoint / name, files[name]["sha256"])


def check_digest(path: Path, wanted: str) -> None:
    """UserError where the file's SHA-256 is not `wanted`."""
    if file_digest(path) != wanted:
        _refuse(path, "is corrupt: its SHA-256 is not the manifest's")


def _refuse(path: Path, what: str) -> NoReturn:
    checkpoint = path.parent
    before = [p for p in list_complete(checkpoint.parent) if p.name < checkpoint.name]
    offer = "there is no checkpoint before it"
    if before:
        offer = f"the one before it is {before[-1]} (--resume {step_of(before[-1])})"
    raise DamagedCheckpoint(f"{path} {what}; this checkpoint cannot be used, {offer}")
