"""Checks the headers of a checkpoint's safetensors files before any tensor is read.

Every element of every tensor must be in the files exactly once, and all parts of a tensor must have
the same dtype. The libraries do not check this: safetensors takes the last of two entries with the
same name, and torch reads files in any order. Without the check, wrong weights would go unnoticed
if two files had the same rows of a tensor, or if a dtype were replaced by another of the same size.
"""

import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wlb.plan import UserError
from wlb.plan.read_file import parse_json
from wlb.plan.schema import ANYTHING, COUNT, OTHERS, Schema, check_schema

# `_ABOUT` is the key of a header's metadata, and all other keys are names of tensors. The
# metadata's entry `_SHARDING`, which torch writes, says where each part of a tensor begins in the
# whole tensor.
_ABOUT, _SHARDING = "__metadata__", "DCP_SHARDING_INFO"
_MOST_BYTES = 100_000_000
"""Longest header, in bytes, that the safetensors library reads."""
# Number of bits of one element of each dtype, by the dtype's name in safetensors.
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_HEADER: Schema = {
    f"{_ABOUT}?": {OTHERS: str},
    OTHERS: {"dtype": str, "shape": [COUNT], "data_offsets": [COUNT]},
}


class HeaderEntry(NamedTuple):
    """A tensor, or the part of a tensor in one file, as the file's header describes it."""

    dtype: str  # name of the dtype in safetensors, such as "BF16"
    shape: tuple[int, ...]  # shape of the part that this file has
    # Index of the part's first element in the whole tensor, one number per dimension. Empty for
    # files that wlb did not write, because they have whole tensors.
    start: tuple[int, ...] = ()


def read_header(path: Path, *, remedy: str, has_offsets: bool = False) -> dict[str, HeaderEntry]:
    """Read the header of a safetensors file.

    Args:
        path: The file.
        remedy: What the user can do if the file is damaged, for messages.
        has_offsets: Whether the header must say where each part begins in its whole tensor, as in
            wlb's checkpoints.

    Returns:
        The entries of the file's tensors, by the tensor's name.

    Raises:
        UserError: If the header is damaged, or if a byte of the file's data belongs to no tensor or
            to more than one.
    """
    with path.open("rb") as file:
        begin = file.read(8)
        size = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
        left = path.stat().st_size - 8 - size
        if not 2 <= size <= _MOST_BYTES or left < 0:
            raise UserError(
                f"{path} is not a complete safetensors file: the size of its header, {size} bytes, "
                f"must be from 2 to {_MOST_BYTES} and fit into the file of {path.stat().st_size} "
                f"bytes; {remedy}"
            )
        where = f"the header of {path}"
        data = parse_json(file.read(size), where, remedy=remedy, unique=True)
    check_schema(data, _HEADER, where, remedy=remedy)
    about = data.pop(_ABOUT, {})
    at = 0
    # The bytes of the tensors must follow each other in the file, without gaps or overlaps.
    for name, entry in sorted(data.items(), key=lambda item: item[1]["data_offsets"]):
        bits, (begin_at, end_at) = _BITS.get(entry["dtype"]), _pair(entry, where, name, remedy)
        # If the dtype is unknown, accept the size. Reading the tensor will fail later.
        need = (end_at - begin_at) * 8 if bits is None else prod(entry["shape"]) * bits
        if begin_at != at or need != (end_at - begin_at) * 8:
            raise UserError(
                f"{where} is damaged: tensor {name} of dtype {entry['dtype']} and "
                f"shape {entry['shape']} has bytes [{begin_at}, {end_at}), but must "
                f"begin at byte {at} and have the size of its dtype and shape; "
                f"{remedy}"
            )
        at = end_at
    if at != left:
        raise UserError(
            f"{path} is not a complete safetensors file: its header lists {at} bytes "
            f"of tensors, but the file has {left}; {remedy}"
        )
    starts = _starts(about, data, where, remedy) if has_offsets else {}
    return {
        name: HeaderEntry(entry["dtype"], tuple(entry["shape"]), starts.get(name, ()))
        for name, entry in data.items()
    }


def _pair(entry: dict[str, Any], where: str, name: str, remedy: str) -> tuple[int, int]:
    """Return the offsets in the file's data at which a tensor's bytes begin and end (exclusive).

    Args:
        entry: The tensor's entry in the header.
        where: Words that name the header, for messages.
        name: Name of the tensor, for messages.
        remedy: What the user can do if the file is damaged, for messages.

    Raises:
        UserError: If the entry does not have two offsets in ascending order.
    """
    offsets: list[int] = entry["data_offsets"]
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(
            f"{where} is damaged: tensor {name} has data_offsets = {offsets}, but these must be "
            f"two numbers, the offsets at which its bytes begin and end; {remedy}"
        )
    return offsets[0], offsets[1]


def _starts(
    about: dict[str, str], tensors: dict[str, Any], where: str, remedy: str
) -> dict[str, tuple[int, ...]]:
    """Return, for each tensor of a file, the position of the file's part in the whole tensor.

    Args:
        about: The header's metadata, which has these positions as JSON.
        tensors: The header's entries of the file's tensors, by name.
        where: Words that name the header, for messages.
        remedy: What the user can do if the file is damaged, for messages.

    Returns:
        For each tensor, by name, the index of the part's first element, one number per dimension.

    Raises:
        UserError: If the positions are missing or do not fit the tensors' shapes.
    """
    if _SHARDING not in about:
        raise UserError(
            f"{where} lacks the metadata {_SHARDING}, which gives the position of each "
            f"saved part in its whole tensor; {remedy}"
        )
    found = parse_json(about[_SHARDING], f"{_SHARDING} in {where}", remedy=remedy, unique=True)
    each: Schema = {"saved_offsets": [COUNT], OTHERS: ANYTHING}
    schema: Schema = dict.fromkeys(tensors, each) if tensors else {OTHERS: ANYTHING}
    check_schema(found, schema, f"{_SHARDING} in {where}", remedy=remedy)
    starts = {name: tuple(found[name]["saved_offsets"]) for name in tensors}
    for name, start in starts.items():
        if len(start) != len(tensors[name]["shape"]):
            raise UserError(
                f"{where} is damaged: tensor {name} has saved_offsets = {list(start)}, "
                f"but must have one offset for each dimension; {remedy}"
            )
    return starts


def checked_headers(folder: Path, *, remedy: str) -> dict[str, HeaderEntry]:
    """Read the headers of all safetensors files of a checkpoint, and join the parts of each tensor.

    Args:
        folder: The checkpoint.
        remedy: What the user can do if the checkpoint is damaged, for messages.

    Returns:
        The entry of each whole tensor, by the tensor's name.

    Raises:
        UserError: If an element of a tensor is missing or in two files, or if the parts of a tensor
            have different dtypes.
    """
    parts: dict[str, list[HeaderEntry]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in read_header(path, remedy=remedy, has_offsets=True).items():
            parts.setdefault(name, []).append(entry)
    return {name: _whole(found, f"{folder}: {name}", remedy) for name, found in parts.items()}


def _whole(parts: list[HeaderEntry], where: str, remedy: str) -> HeaderEntry:
    """Return the entry of a whole tensor, given its parts in all files.

    UserError is raised unless the parts have one dtype and cover each element exactly once. Its
    message uses `where`, which names the tensor, and `remedy`, which says what the user can do.
    """
    dtypes, ranks = {p.dtype for p in parts}, {len(p.shape) for p in parts}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise UserError(
            f"{where} is saved in parts of different kinds (dtypes {sorted(dtypes)}, "
            f"numbers of dimensions {sorted(ranks)}), but all parts must have one "
            f"dtype and one number of dimensions; {remedy}"
        )
    stops = [tuple(map(sum, zip(p.start, p.shape, strict=True))) for p in parts]
    shape = tuple(map(max, zip(*stops, strict=True)))
    if len(parts) > 1 or any(parts[0].start):
        # Cut the whole tensor into boxes: along each axis, cut wherever any part begins or ends.
        # The parts fit together if each box is covered by exactly one part.
        borders = [
            np.unique([*(p.start[axis] for p in parts), *(s[axis] for s in stops), 0])
            for axis in range(len(shape))
        ]
        taken = np.zeros([max(0, b.size - 1) for b in borders], np.int64)
        for part, stop in zip(parts, stops, strict=True):
            cells = (
                slice(*np.searchsorted(b, (x, y)))
                for b, x, y in zip(borders, part.start, stop, strict=True)
            )
            taken[tuple(cells)] += 1
        if (taken != 1).any():
            what = "more than once" if (taken > 1).any() else "only in part"
            raise UserError(
                f"{where} is saved {what} in the files of the checkpoint, but each of "
                f"its elements must be saved exactly once; {remedy}"
            )
    return HeaderEntry(parts[0].dtype, shape, (0,) * len(shape))
