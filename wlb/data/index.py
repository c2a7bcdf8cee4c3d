"""Read and write the `.idx` file of a token store, which says where each document begins.

The format is byte for byte that of Megatron's IndexedDataset. All numbers are little-endian:

    magic                        9 bytes
    version                      uint64
    dtype code of the tokens     uint8
    number of sequences          uint64
    number of document indices   uint64, the number of documents + 1
    length of each sequence      int32, in tokens
    offset of each sequence      int64, in bytes of the `.bin` file
    document indices             int64, the first sequence of each document,
                                 then the number of sequences
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
# The number by which Megatron's index names each dtype.
CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    """The content of an `.idx` file, without the documents that have no tokens."""

    dtype: np.dtype[Any]  # type of the tokens in the `.bin` file
    start: IntArray  # position of each document's first token in the `.bin`, shape [num_documents]
    length: IntArray  # tokens of each document, at least 1, read-only, shape [num_documents]
    num_tokens: int  # tokens in the `.bin` file
    num_empty: int  # documents without tokens, which `start` and `length` leave out


def write_index(file: Any, lengths: "array[int]", dtype: np.dtype[Any]) -> None:
    """Write an index in which each document is one sequence, as Megatron does by default.

    Args:
        file: A binary file opened for writing.
        lengths: Tokens of each document.
        dtype: Type of the tokens in the `.bin` file.
    """
    sizes = np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)
    ends = np.cumsum(sizes)
    file.write(_HEADER.pack(_MAGIC, _VERSION, CODES[dtype], sizes.size, sizes.size + 1))
    file.write(sizes.astype("<i4").tobytes())
    file.write(((ends - sizes) * dtype.itemsize).astype("<i8").tobytes())
    file.write(np.arange(sizes.size + 1, dtype="<i8").tobytes())


def read_index(path: Path, *, num_bytes: int) -> StoreIndex:
    """Read the index at `path`, and check that it fits a `.bin` file of `num_bytes` bytes.

    Raises:
        UserError: The file is not an index, is damaged, or belongs to another `.bin` file.
    """
    dtype, num_sequences, num_indices = _read_layout(path)
    # Copy the index instead of mapping the file. If another process replaces the store while this
    # reader uses it, the reader still has the index of the old store.
    raw = np.fromfile(path, np.uint8, offset=_HEADER.size)
    lengths = raw[: 4 * num_sequences].view("<i4").astype(np.int64)
    offsets = raw[4 * num_sequences : 12 * num_sequences].view("<i8").astype(np.int64)
    firsts = raw[12 * num_sequences :].view("<i8").astype(np.int64)
    _check_sequences(path, lengths, offsets, dtype.itemsize, num_bytes)
    _check_documents(path, firsts, num_sequences, num_indices)
    # A document may have several sequences. They are adjacent, so its tokens reach from the start
    # of its first sequence to the start of the next document's first sequence.
    boundary = np.append(offsets // dtype.itemsize, num_bytes // dtype.itemsize)[firsts]
    start, length = boundary[:-1], np.diff(boundary)
    keep = length > 0
    # Indexing copies both columns, so skip it when there are no empty documents.
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
    """Read the header of one of a store's files, and check its magic bytes and version.

    Args:
        path: The file.
        header: Layout of the header. Its first two fields are the magic and the version.
        magic: Bytes that the file must start with.
        version: The only version that is supported.
        what: For the error message if the magic differs or the file is too short: what is wrong,
            such as "is not an index".
        remedy: For the same message: what to do.

    Returns:
        The fields of the header after the version.

    Raises:
        UserError: The magic or the version differs, or the file is too short.
    """
    with open(path, "rb") as file:
        data = file.read(header.size)
    if len(data) < header.size and data.startswith(magic):
        raise UserError(
            f"{path} {what}: the file has only {len(data)} bytes, but a header has {header.size}; "
            f"{remedy}"
        )
    if not data.startswith(magic):
        raise UserError(
            f"{path} {what}: the file starts with {data[: len(magic)]!r} instead of {magic!r}; "
            f"{remedy}"
        )
    _, found, *values = header.unpack(data)
    if found != version:
        raise UserError(
            f"{path} has format version {found}, but wlb reads only version {version}; prepare "
            f"the store again"
        )
    return tuple(values)


def _read_layout(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Read the header of an index, and check the size of the file.

    Returns:
        The dtype of the tokens, the number of sequences and the number of document indices.
    """
    what = "is not the index of a token store"
    remedy = "prepare the store again with wlb prepare"
    header = read_header(path, _HEADER, _MAGIC, _VERSION, what=what, remedy=remedy)
    code, num_sequences, num_indices = header
    if code not in _DTYPES:
        raise UserError(
            f"{path} has dtype code {code}, but must have one of Megatron's codes "
            f"{sorted(_DTYPES)}; prepare the store again"
        )
    size, expected = path.stat().st_size, _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes, but an index of {num_sequences} sequences and {num_indices} "
            f"document indices must have {expected} bytes; copy or prepare the store again "
            f"(Megatron's multimodal stores are not supported)"
        )
    return _DTYPES[code], num_sequences, num_indices


def _check_sequences(
    path: Path, lengths: IntArray, offsets: IntArray, itemsize: int, num_bytes: int
) -> None:
    """Raise UserError unless the sequences fill the `.bin` file without gaps or overlaps.

    Args:
        path: The index, for error messages.
        lengths: Tokens of each sequence, shape [num_sequences].
        offsets: First byte of each sequence in the `.bin` file, shape [num_sequences].
        itemsize: Bytes of a token.
        num_bytes: Bytes of the `.bin` file.
    """
    if lengths.size and int(lengths.min()) < 0:
        i = int(np.argmin(lengths))
        raise UserError(
            f"{path}: the length of sequence {i} is {lengths[i]}, but must be at least 0; copy the "
            f"store again"
        )
    ends = np.cumsum(lengths) * itemsize
    if (i := first_true(offsets != ends - lengths * itemsize)) is not None:
        raise UserError(
            f"{path}: sequence {i} starts at byte {offsets[i]}, but must start at byte "
            f"{ends[i] - lengths[i] * itemsize}, where the sequence before it ends; prepare the "
            f"store again"
        )
    need = int(ends[-1]) if ends.size else 0
    if num_bytes != need:
        raise UserError(
            f"{path.with_suffix('.bin')} has {num_bytes} bytes, but must have {need} according to "
            f"{path.name}; one of the two files is incomplete or belongs to another store, so copy "
            f"both again"
        )


def _check_documents(path: Path, firsts: IntArray, num_sequences: int, num_indices: int) -> None:
    """Raise UserError unless `firsts` ascends from 0 to the number of sequences.

    Args:
        path: The index, for error messages.
        firsts: First sequence of each document, and then the number of sequences.
        num_sequences: Number of sequences in the index.
        num_indices: Number of entries of `firsts`. A damaged index may have 0.
    """
    if num_indices == 0 or firsts[0] != 0 or firsts[-1] != num_sequences:
        shown = "none" if num_indices == 0 else f"{firsts[0]} ... {firsts[-1]}"
        raise UserError(
            f"{path}: the document indices are {shown}, but the first must be 0 and the last must "
            f"be {num_sequences}, the number of sequences; prepare the store again"
        )
    if (i := first_true(np.diff(firsts) < 0)) is not None:
        raise UserError(
            f"{path}: document {i} starts at sequence {firsts[i]}, but document {i + 1} starts at "
            f"the earlier sequence {firsts[i + 1]}; prepare the store again"
        )
