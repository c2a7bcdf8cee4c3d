r"""Read and write `<prefix>.targets`, which says which tokens of a store are trained.

Only fine-tuning data has this file. It stores half-open spans of trained tokens, as positions in
the whole `.bin` file. No span crosses the end of a document, and spans that touch are merged. A
trained token is predicted from the tokens before it, so the first token of a document is never
trained. All numbers are little-endian:

    magic                  8 bytes, `WLBTGTS\0`
    version                uint64
    number of documents    uint64
    number of tokens       uint64
    number of spans        uint64
    blake2b of the `.bin`  32 bytes
    start of each span     int64
    end of each span       int64

Guarantees: a file that is truncated, damaged or belongs to another store is refused when opened.
Cost: 16 bytes per span in the file and 24 in memory; counting takes two binary searches per piece.
"""

import struct
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from wlb.data.index import read_header
from wlb.plan import BoolArray, IntArray, IntLike, UserError, offsets_of
from wlb.plan.arrays import first_true

_MAGIC = b"WLBTGTS\x00"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQQ32s")


def spans_of(mask: BoolArray) -> IntArray:
    """Return the runs of True in `mask` (shape [n]) as half-open spans, int64 of shape [k, 2]."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges.astype(np.int64).reshape(-1, 2)


class TargetSpans:
    """Collects the trained spans of a store's documents, and writes them as a `.targets` file."""

    def __init__(self) -> None:
        self._start = array("q")
        self._stop = array("q")

    def add(self, spans: IntLike, *, first: int, length: int, name: str) -> None:
        """Add the trained spans of the next document.

        Args:
            spans: Half-open spans of trained tokens, counted from the document's beginning, int64
                of shape [k, 2].
            first: Position of the document's first token in the `.bin` file.
            length: Tokens of the document.
            name: The document's name for error messages.

        Raises:
            UserError: Spans overlap, are out of order, or are outside the document.
        """
        rows = np.asarray(spans)
        if rows.size == 0:
            return
        if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype.kind not in "iu":
            raise UserError(
                f"{name}: `trained` has shape {rows.shape} and dtype {rows.dtype}, but must be an "
                f"integer array of shape [k, 2]; give one row (start, stop) for each span of "
                f"trained tokens"
            )
        start, stop = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
        before = np.concatenate([np.zeros(1, np.int64), stop[:-1]])
        if (i := first_true((start < before) | (stop < start) | (stop > length))) is not None:
            raise UserError(
                f"{name}: span {i} of trained tokens is [{start[i]}, {stop[i]}), but must be in "
                f"[0, {length}) and must not start before {before[i]}, the end of the previous span"
            )
        # Leave out the document's first token. No token comes before it, so it is never a label.
        start = np.maximum(start, 1)
        keep = start < stop
        start, stop = start[keep], stop[keep]
        # Merge spans that touch. A span opens a merged span unless it touches the span before it,
        # and it closes a merged span unless the next span touches it.
        opens = np.ones(start.size, bool)
        opens[1:] = start[1:] > stop[:-1]
        closes = np.append(opens[1:], True)
        self._start.frombytes((start[opens] + first).tobytes())
        self._stop.frombytes((stop[closes[: stop.size]] + first).tobytes())

    def write(self, file: Any, *, num_documents: int, num_tokens: int, checksum: str) -> None:
        """Write all spans to an open binary file.

        Args:
            file: A binary file opened for writing.
            num_documents: Documents of the store.
            num_tokens: Tokens of the store.
            checksum: Hash of the `.bin` file, in hexadecimal.
        """
        num, mark = len(self._start), bytes.fromhex(checksum)
        file.write(_HEADER.pack(_MAGIC, _VERSION, num_documents, num_tokens, num, mark))
        for column in (self._start, self._stop):
            file.write(np.frombuffer(column, np.int64).astype("<i8").tobytes() if num else b"")


class Targets:
    """The trained tokens of a store, read from its `.targets` file.

    Args:
        path: The `.targets` file.
        first: Position of each document's first token in the `.bin` file, shape [num_documents].
        length: Tokens of each document, shape [num_documents].
        checksum: Hash of the `.bin` file, which the `.targets` file must contain.

    Attributes:
        num_targets: Trained tokens of each document, shape [num_documents], read-only.
    """

    def __init__(self, path: Path, *, first: IntArray, length: IntArray, checksum: str) -> None:
        self._first, self._length = first, length
        start, stop = _read(path, length, checksum)
        self._start, self._stop = start, stop
        # Prefix sums: the number of trained tokens in all spans before each span.
        self._running = offsets_of(stop - start)
        ends = first + length
        _check_spans(path, start, stop, first, ends)
        self.num_targets: IntArray = self._before(ends) - self._before(first)
        self.num_targets.flags.writeable = False

    def count(self, document: IntLike, start: IntLike, stop: IntLike) -> IntArray:
        """Count the trained labels of pieces of documents.

        The label of a token is the next token of the document, and the last token has no label. So
        the labels of a piece are the document's tokens [start + 1, min(stop + 1, length)).

        Args:
            document: Index of each piece's document in the store, shape [num_pieces].
            start: First token of each piece, shape [num_pieces].
            stop: End of each piece, shape [num_pieces].

        Returns:
            Number of trained labels of each piece, shape [num_pieces].
        """
        rows = np.asarray(document, np.int64)
        first, length = self._first[rows], self._length[rows]
        begin, end = np.asarray(start, np.int64), np.asarray(stop, np.int64)
        last = np.minimum(end + 1, length)
        return self._before(first + last) - self._before(first + np.minimum(begin + 1, last))

    def trained(self, document: int, start: int, stop: int) -> BoolArray:
        """Return a mask of the trained tokens among tokens [start, stop) of a document.

        Args:
            document: Index of the document in the store.
            start: First token, counted from the document's beginning.
            stop: End of the tokens.

        Returns:
            A mask of shape [stop - start].
        """
        begin = int(self._first[document]) + start
        end = begin + stop - start
        # Select the spans that overlap [begin, end).
        rows = slice(
            int(np.searchsorted(self._stop, begin, side="right")),
            int(np.searchsorted(self._start, end, side="left")),
        )
        # Write +1 where a span starts and -1 where it ends: the running sum is 1 inside of spans.
        steps = np.zeros(stop - start + 1, np.int64)
        steps[np.maximum(self._start[rows], begin) - begin] += 1
        steps[np.minimum(self._stop[rows], end) - begin] -= 1
        return np.cumsum(steps[:-1]) > 0

    def _before(self, position: IntArray) -> IntArray:
        """Return how many trained tokens of the `.bin` file are before each position, shape [n]."""
        opened = np.searchsorted(self._start, position, side="left")
        if not self._stop.size:
            return np.zeros(position.shape, np.int64)
        # Count the tokens of all spans that start before the position. Then subtract the part of
        # the last of these spans that lies after the position.
        last = np.maximum(opened - 1, 0)
        beyond = np.where(opened > 0, np.maximum(self._stop[last] - position, 0), 0)
        return self._running[opened] - beyond


def _read(path: Path, length: IntArray, checksum: str) -> tuple[IntArray, IntArray]:
    """Return start and end of every span of trained tokens, as positions in the `.bin` file.

    Args:
        path: The `.targets` file.
        length: Tokens of each document of the store, shape [num_documents].
        checksum: Hash of the store's `.bin` file.

    Raises:
        UserError: The file is damaged or belongs to another store.
    """
    what, remedy = "is not a list of trained tokens", "prepare the store again"
    header = read_header(path, _HEADER, _MAGIC, _VERSION, what=what, remedy=remedy)
    num_documents, num_tokens, num, mark = header
    size, expected = path.stat().st_size, _HEADER.size + 16 * num
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes, but must have {expected} bytes for {num} spans; copy or "
            f"prepare the store again"
        )
    total = int(length.sum())
    if (num_documents, num_tokens) != (length.size, total) or mark.hex() != checksum:
        raise UserError(
            f"{path} belongs to another store. It was written for {num_documents} documents, "
            f"{num_tokens} tokens and checksum {mark.hex()[:16]}..., but this store has "
            f"{length.size} documents, {total} tokens and checksum {checksum[:16]}...; copy or "
            f"prepare the store again"
        )
    if not num:
        empty = np.zeros(0, np.int64)
        return empty, empty
    rows = np.asarray(np.memmap(path, "<i8", mode="r", offset=_HEADER.size))
    return rows[:num], rows[num:]


def _check_spans(
    path: Path, start: IntArray, stop: IntArray, first: IntArray, ends: IntArray
) -> None:
    """Raise UserError unless spans are ascending, do not touch, and each is inside one document.

    A span must have at least one token, and must not contain the first token of a document.

    Args:
        path: The `.targets` file, for error messages.
        start: First token of each span in the `.bin` file, shape [num_spans].
        stop: End of each span in the `.bin` file, shape [num_spans].
        first: First token of each document in the `.bin` file, shape [num_documents].
        ends: End of each document in the `.bin` file, shape [num_documents].
    """
    if not start.size:
        return
    row = np.minimum(np.searchsorted(ends, start, side="right"), ends.size - 1)
    before = np.concatenate([np.full(1, -1), stop[:-1]])
    wrong = (stop <= start) | (start <= before) | (start <= first[row]) | (stop > ends[row])
    if (i := first_true(wrong)) is not None:
        raise UserError(
            f"{path}: span {i} of trained tokens is [{start[i]}, {stop[i]}), but spans must not be "
            f"empty, must start after the end of the previous span, and must each be inside one "
            f"document and not contain its first token; copy or prepare the store again"
        )
