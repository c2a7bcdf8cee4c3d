"""The arguments and inputs of a preparation, kept beside its parts and in its store.

An interrupted preparation continues only with equal arguments and unchanged inputs.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wlb.plan import UserError
from wlb.plan.read_file import malformed, read_object
from wlb.prepare.files import write_text
from wlb.prepare.records import InputFile

Manifest = dict[str, Any]

MANIFEST = "manifest.json"
_FORMAT = 1
_MOST_NAMED = 5


def manifest_of(arguments: dict[str, Any], files: Sequence[InputFile]) -> Manifest:
    """JSON-able; equal for equal arguments and inputs."""
    made = {"format": _FORMAT, "arguments": arguments, "inputs": [asdict(file) for file in files]}
    return json.loads(json.dumps(made))


def manifest_digest(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def differences(old: Manifest, new: Manifest) -> list[str]:
    """Describe the changes between two manifests; empty if they are equal."""
    if old.get("format") != new["format"]:
        return [f"it was made by another version of this program (format {old.get('format')})"]
    sides = [
        (name, *(side["arguments"].get(name) for side in (old, new)))
        for name in sorted({*old["arguments"], *new["arguments"]})
    ]
    found = [f"{name} was {then!r}, is {now!r}" for name, then, now in sides if then != now]
    files = [{file["path"]: file for file in side["inputs"]} for side in (old, new)]
    changed: list[str] = []
    for path in {**files[0], **files[1]}:
        then, now = (side.get(path) for side in files)
        if then is None:
            changed.append(f"{path} is new")
        elif now is None:
            changed.append(f"{path} is gone")
        else:
            names = [name for name in now if then.get(name) != now[name]]
            changed += [f"{path}: {name} was {then.get(name)}, is {now[name]}" for name in names]
    if not changed and old["inputs"] != new["inputs"]:
        changed.append("the inputs are in another order")
    if len(changed) > _MOST_NAMED:
        changed[_MOST_NAMED:] = [f"and {len(changed) - _MOST_NAMED} more changes of inputs"]
    return found + changed


def is_manifest(path: Path, manifest: Manifest) -> bool:
    """Whether `path` is this manifest."""
    try:
        return json.loads(path.read_bytes()) == manifest
    except (OSError, ValueError):
        return False


def open_manifest(path: Path, manifest: Manifest, *, overwrite: bool = False) -> bool:
    """Whether `path` is this manifest already; else its folder is emptied and gets it.

    UserError where a different one exists, unless overwrite is set.
    """
    try:
        what = f"{path} is not the manifest of a preparation"
        with malformed(what, "remove its folder, or use --overwrite"):
            found = differences(read_object(path), manifest)
    except FileNotFoundError:
        problem = ""
    except UserError as error:
        problem = str(error)
    else:
        if not found:
            return True
        problem = (
            f"an interrupted preparation in {path.parent} has other arguments or inputs: "
            f"{'; '.join(found)}. Use the same arguments to continue it, or start anew with "
            f"--overwrite"
        )
    if problem and not overwrite:
        raise UserError(problem)
    # Parts of other arguments may be left even where their manifest is not.
    remove_parts(path.parent)
    write_text(path, json.dumps(manifest))
    return False


def remove_parts(folder: Path, *, with_manifest: bool = False) -> None:
    """Empties a folder of parts. The manifest stays, or goes last: while there are parts, it says
    of which arguments they are, also where this is interrupted.
    """
    for entry in folder.iterdir():
        if entry.name != MANIFEST:
            entry.unlink()
    if with_manifest:
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.rmdir()


def check_unchanged(files: Sequence[InputFile]) -> None:
    """UserError for the first input whose size or modification time changed since the listing."""
    for file in files:
        try:
            status = Path(file.path).stat()
            now = (status.st_size, status.st_mtime_ns)
        except OSError:
            now = None
        if now != (file.size, file.mtime_ns):
            raise UserError(
                f"{file.path} changed while it was prepared; prepare again with --overwrite when "
                f"nothing writes to it"
            )
