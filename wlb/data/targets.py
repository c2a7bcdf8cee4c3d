r"""Which tokens of a store are trained: `<prefix>.targets`, for fine-tuning data.

Trained tokens are labels, so the first token of a document never is one. They are half-open spans
of positions in the whole `.bin`, none across a document's end; spans that touch are one.
Little-endian: magic `WLBTGTS\\0`, uint64 version, uint64 number of documents, of tokens and of
spans, 32 bytes blake2b of the `.bin`, int64 first token of every span, int64 end of every span.
Guarantees: a file that is cut short, damaged or of another store is refused when it is opened.
Cost: 16 bytes a span in the file and 24 in memory; a count takes two binary searches.
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
    """Half-open runs of True in `mask` (shape [n]), int64 [k, 2]."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges.astype(np.int64).reshape(-1, 2)


class TargetSpans:
    """Collects the trained spans of documents in order, and writes them."""

    def __init__(self) -> None:
        self._start = array("q")
        self._stop = array("q")

    def add(self, spans: IntLike, *, first: int, length: int, name: str) -> None:
        """Spans (int64 [k, 2]) of the next document: `length` tokens from token `first` on.

        UserError, with `name`, for spans that overlap, are out of order or outside the document.
        """
        rows = np.asarray(spans)
        if rows.size == 0:
            return
        if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype.kind not in "iu":
            raise UserError(
                f"{name}: trained has shape {rows.shape} and dtype {rows.dtype}; it is int64 "
                f"[k, 2], a half-open span of trained tokens a row"
            )
        start, stop = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
        before = np.concatenate([np.zeros(1, np.int64), stop[:-1]])
        if (i := first_true((start < before) | (stop < start) | (stop > length))) is not None:
            raise UserError(
                f"{name}: span {i} of trained is [{start[i]}, {stop[i]}); spans lie in [0, "
                f"{length}), in order, and do not overlap (the one before ends at {before[i]})"
            )
        # The first token is never a label.
        start = np.maximum(start, 1)
        keep = start < stop
        start, stop = start[keep], stop[keep]
        opens = np.ones(start.size, bool)
        opens[1:] = start[1:] > stop[:-1]
        closes = np.append(opens[1:], True)
        self._start.frombytes((start[opens] + first).tobytes())
        self._stop.frombytes((stop[closes[: stop.size]] + first).tobytes())

    def write(self, file: Any, *, num_documents: int, num_tokens: int, checksum: str) -> None:
        """checksum: of the `.bin`, in hexadecimal."""
        num, mark = len(self._start), bytes.fromhex(checksum)
        file.write(_HEADER.pack(_MAGIC, _VERSION, num_documents, num_tokens, num, mark))
        for column in (self._start, self._stop):
            file.write(np.frombuffer(column, np.int64).astype("<i8").tobytes() if num else b"")


class Targets:
    """The trained tokens of a store, by positions in its `.bin`.

    first, length: int64 [documents], where each document lies there.
    """

    def __init__(self, path: Path, *, first: IntArray, length: IntArray, checksum: str) -> None:
        self._first, self._length = first, length
        start, stop = _read(path, length, checksum)
        self._start, self._stop = start, stop
        self._running = offsets_of(stop - start)
        ends = first + length
        _check_spans(path, start, stop, first, ends)
        self.num_targets: IntArray = self._before(ends) - self._before(first)
        self.num_targets.flags.writeable = False

    def count(self, document: IntLike, start: IntLike, stop: IntLike) -> IntArray:
        """Labels of the pieces [start, stop) of `document`, shape [num_pieces] each.

        The label of a piece's last token is the document's token `stop`, if it has one.
        """
        rows = np.asarray(document, np.int64)
        first, length = self._first[rows], self._length[rows]
        begin, end = np.asarray(start, np.int64), np.asarray(stop, np.int64)
        last = np.minimum(end + 1, length)
        return self._before(first + last) - self._before(first + np.minimum(begin + 1, last))

    def trained(self, document: int, start: int, stop: int) -> BoolArray:
        """Whether each of the tokens [start, stop) of a document is trained, shape [stop-start]."""
        begin = int(self._first[document]) + start
        end = begin + stop - start
        rows = slice(
            int(np.searchsorted(self._stop, begin, side="right")),
            int(np.searchsorted(self._start, end, side="left")),
        )
        steps = np.zeros(stop - start + 1, np.int64)
        steps[np.maximum(self._start[rows], begin) - begin] += 1
        steps[np.minimum(self._stop[rows], end) - begin] -= 1
        return np.cumsum(steps[:-1]) > 0

    def _before(self, position: IntArray) -> IntArray:
        """Trained tokens at positions below each `position` (shape [n])."""
        opened = np.searchsorted(self._start, position, side="left")
        if not self._stop.size:
            return np.zeros(position.shape, np.int64)
        last = np.maximum(opened - 1, 0)
        beyond = np.where(opened > 0, np.maximum(self._stop[last] - position, 0), 0)
        return self._running[opened] - beyond


def _read(path: Path, length: IntArray, checksum: str) -> tuple[IntArray, IntArray]:
    """Start and stop of every span, mapped; UserError for a file of another store."""
    what, remedy = "does not hold trained tokens", "prepare the store again"
    header = read_header(path, _HEADER, _MAGIC, _VERSION, what=what, remedy=remedy)
    num_documents, num_tokens, num, mark = header
    size, expected = path.stat().st_size, _HEADER.size + 16 * num
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes, {num} spans need {expected}; copy or prepare the store again"
        )
    total = int(length.sum())
    if (num_documents, num_tokens) != (length.size, total) or mark.hex() != checksum:
        raise UserError(
            f"{path} is of another store: it has {num_documents} documents, {num_tokens} tokens "
            f"and checksum {mark.hex()[:16]}..., the store has {length.size}, {total} and "
            f"{checksum[:16]}...; copy or prepare the store again"
        )
    if not num:
        empty = np.zeros(0, np.int64)
        return empty, empty
    rows = np.asarray(np.memmap(path, "<i8", mode="r", offset=_HEADER.size))
    return rows[:num], rows[num:]


def _check_spans(
    path: Path, start: IntArray, stop: IntArray, first: IntArray, ends: IntArray
) -> None:
    """Spans must be non-empty, ordered, apart, and inside one document but not at its start."""
    if not start.size:
        return
    row = np.minimum(np.searchsorted(ends, start, side="right"), ends.size - 1)
    before = np.concatenate([np.full(1, -1), stop[:-1]])
    wrong = (stop <= start) | (start <= before) | (start <= first[row]) | (stop > ends[row])
    if (i := first_true(wrong)) is not None:
        raise UserError(
            f"{path}: span {i} is [{start[i]}, {stop[i]}), which overlaps the one before or lies "
            f"in no single document; copy or prepare the store again"
        )
