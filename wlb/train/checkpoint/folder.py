"""Checkpoints as folders: which there are, what they hold, whether they are whole.

A checkpoint is a folder `step-00000030` with
- `shard-*.safetensors`: weights, optimiser and RNG state, written by torch.distributed.checkpoint
  (`wlb.train.checkpoint.saver`), a file a rank, readable from any layout; nothing is pickled;
- `planner.json`: the planner's state after the last EXECUTED step: outlier queues, leftovers, read
  position; valid for another layout;
- `run.json`: steps, configuration, kernel profile;
- `manifest.json`: size and SHA-256 of all these. It is written last, then the folder, until then
  called `partial-...`, is renamed: a crash never leaves half a checkpoint under the final name.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, NoReturn

from wlb.plan import PlannerState

MANIFEST, PLANNER, RUN = "manifest.json", "planner.json", "run.json"
AUTO = "auto"
SEEN_WITHIN_S = 60.0
"""An NFS client may trust what it knew of a folder for so long (its acdirmax)."""


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def list_complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in directory.glob("step-*") if p.name[5:].isdigit())


def resolve_resume(directory: Path, asked: str | None) -> Path | None:
    """The checkpoint that `--resume` means; ValueError where there is none.

    asked: None for no --resume, "" for the newest, "auto" for the newest if there is one, or a
    step's number or a checkpoint's folder.
    """
    if asked is None:
        return None
    found = list_complete(directory)
    if asked == AUTO:
        return found[-1] if found else None
    if not asked:
        if not found:
            raise ValueError(
                f"--resume: no checkpoint in {directory}; start without --resume, or set run.name "
                f"and run.output_dir to the run that is to go on"
            )
        return found[-1]
    wanted = folder_of(directory, int(asked)) if asked.isdigit() else Path(asked)
    if wanted.absolute() not in [path.absolute() for path in found]:
        there = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"--resume {asked}: {wanted} is no checkpoint of this run; {directory} has {there}. To "
            f"begin a new run with its weights, set checkpoint.init_from"
        )
    return wanted


def resolve(folder: Path, asked: str) -> Path:
    """The checkpoint that a folder stands for: it itself, or a run's newest; ValueError, which
    begins with `asked`, where it is neither."""
    if (folder / RUN).is_file():
        return folder
    found = list_complete(folder / "checkpoints")
    if not found:
        raise ValueError(
            f"{asked} is neither a checkpoint (a folder with {RUN}) nor a run with checkpoints in "
            f"it"
        )
    return found[-1]


def prepare_for_resume(directory: Path, resumed: Path) -> list[Path]:
    """Removes what a crash left half-written, and sets checkpoints after `resumed` aside, which
    the resumed run will write again; returns where those are now."""
    for partial in directory.glob("partial-*"):
        shutil.rmtree(partial)
    aside: list[Path] = []
    for later in list_complete(directory):
        if step_of(later) > step_of(resumed):
            number = 1
            while (target := directory / f"aside-{number}-{later.name}").exists():
                number += 1
            aside.append(later.rename(target))
    return aside


def planner_state(checkpoint: Path) -> PlannerState:
    """Where planning goes on; data that had ended is asked again."""
    text = (checkpoint / PLANNER).read_text("utf-8")
    return PlannerState.from_json(json.loads(text)).reopened()


def read_run(checkpoint: Path) -> dict[str, Any]:
    """`run.json`: "step" (executed), "spec", "profile" (name of the kernel profile), and "imported"
    of a model that began as one of Hugging Face."""
    return json.loads((checkpoint / RUN).read_text("utf-8"))


def file_digest(path: Path) -> str:
    """SHA-256 in hexadecimal, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(checkpoint: Path, files: dict[str, dict[str, Any]] | None = None) -> None:
    """Writes manifest.json, on the disk when this returns. files: known sizes and checksums; None
    to read all files there are."""
    if files is None:
        files = {path.name: manifest_entry(path) for path in sorted(checkpoint.iterdir())}
    write_json(checkpoint / MANIFEST, {"files": files})


def manifest_entry(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """On the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{"bytes", "sha256"} by file name; ValueError where it is absent or unreadable."""
    path = checkpoint / MANIFEST
    try:
        return json.loads(path.read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        _refuse(path, f"cannot be read ({error})")


def check_files(checkpoint: Path) -> None:
    """Every file is there and as long as it was; the small ones are read. ValueError naming the
    first that is not, with the checkpoint before it."""
    for name, wanted in read_manifest(checkpoint).items():
        path = checkpoint / name
        if what := _damage(path, wanted["bytes"]):
            _refuse(path, what)
        if path.suffix == ".json":
            check_digest(path, wanted["sha256"])


def _damage(path: Path, num_bytes: int) -> str:
    """What a look at a file's size says is wrong with it; "" for nothing."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return f"has {size:,} bytes, it was saved with {num_bytes:,}" if size != num_bytes else ""


def first_unseen(folder: Path, files: dict[str, dict[str, Any]], *, within_s: float) -> str:
    """The first of `files`, entries of a manifest, that this process does not see whole within
    this time, in words; "" if it sees all. Other nodes may have written them just now."""
    end = time.monotonic() + within_s
    for name, about in files.items():
        while what := _damage(folder / name, about["bytes"]):
            if time.monotonic() >= end:
                return f"{folder / name} {what}"
            time.sleep(0.1)
    return ""


def await_files(checkpoint: Path, *, within_s: float = SEEN_WITHIN_S) -> None:
    """Waits until this process sees what another node may have written just now; ValueError where
    it does not within this time."""
    end = time.monotonic() + within_s
    while True:
        try:
            files = read_manifest(checkpoint)
            break
        except ValueError:  # absent, or as yet seen in part
            if time.monotonic() >= end:
                raise
        time.sleep(0.1)
    if problem := first_unseen(checkpoint, files, within_s=max(0.0, end - time.monotonic())):
        raise ValueError(f"{problem}, as this node sees it; run.output_dir must be shared by all")


def check_share(checkpoint: Path, *, index: int, num: int) -> None:
    """Checksums of this reader's share of the large files: every num-th, from `index` on."""
    files = read_manifest(checkpoint)
    large = [name for name in sorted(files) if not name.endswith(".json")]
    for name in large[index::num]:
        check_digest(checkpoint / name, files[name]["sha256"])


def check_digest(path: Path, wanted: str) -> None:
    """ValueError where the file's SHA-256 is not `wanted`."""
    if file_digest(path) != wanted:
        _refuse(path, "is corrupt: its SHA-256 is not the manifest's")


def _refuse(path: Path, what: str) -> NoReturn:
    """ValueError that offers the checkpoint before."""
    checkpoint = path.parent
    before = [p for p in list_complete(checkpoint.parent) if p.name < checkpoint.name]
    offer = "there is no checkpoint before it"
    if before:
        offer = f"the one before it is {before[-1]} (--resume {step_of(before[-1])})"
    raise ValueError(f"{path} {what}; this checkpoint cannot be used, {offer}")
