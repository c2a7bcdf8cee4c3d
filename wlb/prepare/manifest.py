"""Record the arguments and input files of a preparation in a manifest.

The manifest is saved with the parts, and its digest in the finished store. An interrupted
preparation is resumed only if its manifest is equal: same arguments, and inputs of unchanged size
and modification time.
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
# An error message names at most this many changed inputs.
_MOST_NAMED = 5


def manifest_of(arguments: dict[str, Any], files: Sequence[InputFile]) -> Manifest:
    """Return the manifest of a preparation: its arguments and input files, as JSON values.

    Equal arguments and inputs give equal manifests.
    """
    made = {"format": _FORMAT, "arguments": arguments, "inputs": [asdict(file) for file in files]}
    return json.loads(json.dumps(made))


def manifest_digest(manifest: Manifest) -> str:
    """Return a hash of a manifest, in hexadecimal."""
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def differences(old: Manifest, new: Manifest) -> list[str]:
    """Describe each difference between two manifests in words. Equal manifests have none."""
    if old.get("format") != new["format"]:
        return [f"another version of wlb made the parts (format {old.get('format')})"]
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
    """Return whether the file at `path` contains this manifest."""
    try:
        return json.loads(path.read_bytes()) == manifest
    except (OSError, ValueError):
        return False


def open_manifest(path: Path, manifest: Manifest, *, overwrite: bool = False) -> bool:
    """Keep the encoded parts in a folder if they have this manifest; otherwise remove them.

    Parts with an equal manifest were made with the same arguments and inputs by a call that was
    interrupted, so they are reused. Otherwise all parts are removed, and the manifest is written.

    Args:
        path: The file with the manifest in the folder of parts.
        manifest: The manifest of this call.
        overwrite: Whether parts with another manifest may be removed.

    Returns:
        Whether the folder had this manifest already.

    Raises:
        UserError: The folder has another manifest, and overwrite is not set.
    """
    try:
        what = f"{path} is not the manifest of a preparation"
        with malformed(what, "remove the folder of this file, or use --overwrite"):
            found = differences(read_object(path), manifest)
    except FileNotFoundError:
        problem = ""
    except UserError as error:
        problem = str(error)
    else:
        if not found:
            return True
        problem = (
            f"the interrupted preparation in {path.parent} had other arguments or inputs: "
            f"{'; '.join(found)}. Use the same arguments to resume this preparation, or start over "
            f"with --overwrite"
        )
    if problem and not overwrite:
        raise UserError(problem)
    # Remove parts even if there is no manifest, because their arguments may have been different.
    remove_parts(path.parent)
    write_text(path, json.dumps(manifest))
    return False


def remove_parts(folder: Path, *, with_manifest: bool = False) -> None:
    """Empty a folder of parts.

    Args:
        folder: The folder.
        with_manifest: Whether to remove the manifest and the folder too. The manifest is removed
            last. So if the removal is interrupted, the manifest still says with which arguments
            the remaining parts were made.
    """
    for entry in folder.iterdir():
        if entry.name != MANIFEST:
            entry.unlink()
    if with_manifest:
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.rmdir()


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Raise UserError if an input's size or modification time changed since it was listed."""
    for file in files:
        try:
            status = Path(file.path).stat()
            now = (status.st_size, status.st_mtime_ns)
        except OSError:
            now = None
        if now != (file.size, file.mtime_ns):
            raise UserError(
                f"the input {file.path} changed while wlb read it; wait until no program writes "
                f"the file, and prepare again with --overwrite"
            )
