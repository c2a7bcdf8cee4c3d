"""The `.idx` of a token store, byte for byte Megatron's: where each document lies in the `.bin`.

Little-endian: magic, uint64 version, uint8 dtype code, uint64 number of sequences, uint64 number of
document indices, then int32 sequence lengths, int64 byte offsets of sequences in `.bin`, int64
document indices (first sequence of each document, then the number of sequences).
"""

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wlb.plan import IntArray, UserError
from wlb.plan.arrays import first_true

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    """The content of an `.idx`: first token and number of tokens of each document."""

    dtype: np.dtype[Any]
    start: IntArray
    length: IntArray
    num_tokens: int
    num_empty: int


def write_index(file: Any, lengths: "array[int]", dtype: np.dtype[Any]) -> None:
    """Writes one sequence a document, as Megatron does without sentence splitting."""
    sizes = np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)
    ends = np.cumsum(sizes)
    file.write(_HEADER.pack(_MAGIC, _VERSION, CODES[dtype], sizes.size, sizes.size + 1))
    file.write(sizes.astype("<i4").tobytes())
    file.write(((ends - sizes) * dtype.itemsize).astype("<i8").tobytes())
    file.write(np.arange(sizes.size + 1, dtype="<i8").tobytes())


def read_index(path: Path, *, num_bytes: int) -> StoreIndex:
    """Reads the index at `path` for a `.bin` of `num_bytes`; UserError if they do not fit."""
    dtype, num_sequences, num_indices = _read_layout(path)
    # The index is copied, not mapped, so that a store which is replaced while open keeps its
    # documents.
    raw = np.fromfile(path, np.uint8, offset=_HEADER.size)
    lengths = raw[: 4 * num_sequences].view("<i4").astype(np.int64)
    offsets = raw[4 * num_sequences : 12 * num_sequences].view("<i8").astype(np.int64)
    firsts = raw[12 * num_sequences :].view("<i8").astype(np.int64)
    _check_sequences(path, lengths, offsets, dtype.itemsize, num_bytes)
    _check_documents(path, firsts, num_sequences, num_indices)
    boundary = np.append(offsets // dtype.itemsize, num_bytes // dtype.itemsize)[firsts]
    start, length = boundary[:-1], np.diff(boundary)
    keep = length > 0
    # Indexing copies both columns, so it is done only if there are empty documents.
    if not keep.all():
        start, length = start[keep], length[keep]
    length.flags.writeable = False
    return StoreIndex(
        dtype=dtype,
        start=start,
        length=length,
        num_tokens=num_bytes // dtype.itemsize,
        num_empty=int(keep.size - keep.sum()),
    )


def read_header(
    path: Path, header: struct.Struct, magic: bytes, version: int, *, what: str, remedy: str
) -> tuple[Any, ...]:
    """The header of a store's file after its magic and version; UserError for another file.

    what, remedy: the message's words for the defect and for the remedy.
    """
    with open(path, "rb") as file:
        data = file.read(header.size)
    if len(data) < header.size or not data.startswith(magic):
        raise UserError(
            f"{path} {what}: it starts with {data[: len(magic)]!r}, not {magic!r}; {remedy}"
        )
    _, found, *values = header.unpack(data)
    if found != version:
        raise UserError(f"{path} has version {found}, only {version} is known; rewrite it")
    return tuple(values)


def _read_layout(path: Path) -> tuple[np.dtype[Any], int, int]:
    what = "is not the index of a token store"
    remedy = "stores of other formats have to be prepared again"
    header = read_header(path, _HEADER, _MAGIC, _VERSION, what=what, remedy=remedy)
    code, num_sequences, num_indices = header
    if code not in _DTYPES:
        raise UserError(f"{path} has dtype code {code}, known are {sorted(_DTYPES)}; rewrite it")
    size, expected = path.stat().st_size, _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes, {num_sequences} sequences and {num_indices} document "
            f"indices need {expected}; copy or prepare the store again (sequence modes of "
            f"multimodal stores are not read)"
        )
    return _DTYPES[code], num_sequences, num_indices


def _check_sequences(
    path: Path, lengths: IntArray, offsets: IntArray, itemsize: int, num_bytes: int
) -> None:
    """Sequences must follow each other without gap or overlap and fill the `.bin`."""
    if lengths.size and int(lengths.min()) < 0:
        i = int(np.argmin(lengths))
        raise UserError(f"{path}: sequence {i} has length {lengths[i]}; copy the store again")
    ends = np.cumsum(lengths) * itemsize
    if (i := first_true(offsets != ends - lengths * itemsize)) is not None:
        raise UserError(
            f"{path}: sequence {i} is at byte {offsets[i]}, {ends[i] - lengths[i] * itemsize} is "
            f"expected (no gap or overlap after sequence {i - 1}); prepare the store again"
        )
    need = int(ends[-1]) if ends.size else 0
    if num_bytes != need:
        raise UserError(
            f"{path.with_suffix('.bin')} has {num_bytes} bytes, its index needs {need}; the copy "
            f"is not complete or the two files are of different stores"
        )


def _check_documents(path: Path, firsts: IntArray, num_sequences: int, num_indices: int) -> None:
    """Document indices must start at 0, never go back and end with the number of sequences."""
    if num_indices == 0 or firsts[0] != 0 or firsts[-1] != num_sequences:
        shown = "none" if num_indices == 0 else f"{firsts[0]} ... {firsts[-1]}"
        raise UserError(
            f"{path}: document indices ({shown}) must go from 0 to the {num_sequences} sequences; "
            f"write the index with a trailing count, as Megatron does"
        )
    if (i := first_true(np.diff(firsts) < 0)) is not None:
        raise UserError(
            f"{path}: document {i} starts at sequence {firsts[i]}, the next one at "
            f"{firsts[i + 1]}; document indices must not go back, so prepare the store again"
        )
