"""List input files, divide them into shards, and read the records of a shard.

A shard is a part of the input that any process can read on its own:

    JSONL and lines of text   the lines that start in bytes [start, stop) of one file
    Parquet                   some row groups of one file
    text files                several whole files
    JSON list, compressed     one whole file

Guarantees: the shards, in order, have every record once, in the order of the inputs. A record that
is invalid becomes a `BadRecord`, and reading continues after it.
Cost: reading keeps one line or text file in memory, or 256 rows of Parquet, or the whole text of a
JSON list.
"""

import bz2
import glob
import gzip
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

from wlb.plan import UserError
from wlb.plan.read_file import check_depth
from wlb.prepare.json_list import first_bytes, list_items
from wlb.prepare.parquet import Columns, columns_of, group_sizes, open_parquet, parquet_records
from wlb.prepare.text import MOST_EXAMPLES, Skip, TextDocuments, list_folder, reason_of, size_of

Record = Mapping[str, Any]

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNREAD_SUFFIXES = (".zst", ".zip", ".tar", ".tgz", ".7z", ".lz4")
# Errors that reading a truncated or damaged file raises.
_CORRUPT = (OSError, EOFError, zlib.error, lzma.LZMAError)
# The most text files in one shard.
_MOST_FILES = 4096
# The longest text or line in bytes. The limit bounds the memory, because a small compressed file
# may contain gigabytes.
_MOST_BYTES = 1 << 28
# The longest JSON list in bytes. The limit is needed because its whole text is read into memory.
_MOST_LIST_BYTES = 1 << 30
# The most consecutive blank lines. A small compressed file may contain billions, which would take
# very long to read.
_MOST_BLANK = 1 << 20
# The byte-order mark of UTF-8.
_BOM = b"\xef\xbb\xbf"


class FileKind(StrEnum):
    """The format of an input file, which says how it is read."""

    TEXT = "text"  # the file is one document
    LINES = "lines"  # each line of text is one document
    JSONL = "jsonl"  # each line is one record
    JSON = "json"  # the file is a JSON list of records
    PARQUET = "parquet"  # each row is one record

    @property
    def is_text(self) -> bool:
        """Whether the file is plain text instead of records (JSONL, JSON or Parquet)."""
        return self in (FileKind.TEXT, FileKind.LINES)


class TextUnit(StrEnum):
    """What becomes one document: a whole text file, or each line of it."""

    FILE = "file"
    LINE = "line"


class OnError(StrEnum):
    """What to do with a record that is not a document."""

    FAIL = "fail"  # stop the preparation with an error
    SKIP = "skip"  # skip the record and count it in the report


class BadRecord(UserError):
    """Raised for a record that is not a document. `OnError` says whether it stops the preparation.

    Args:
        reason: The reason under which reports count the record.
        detail: What is wrong with the record, for error messages.
    """

    def __init__(self, reason: Skip, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file, with the size and time by which a change of the file is noticed."""

    path: str
    name: str  # path relative to the input folder, from which names of records are made
    kind: FileKind
    size: int  # bytes
    mtime_ns: int  # time of the last modification in ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of the input that one worker encodes: a part of one file, or several text files."""

    files: tuple[InputFile, ...]
    # The range [start, stop) of a single file. For Parquet, these are row groups. For a file of
    # lines, these are bytes, and lines that start in the range belong to the shard. Not used for
    # whole files.
    start: int = 0
    stop: int = 0
    size: int = 0  # bytes of input, for the progress report


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPosition:
    """Where a record is in the inputs."""

    file: InputFile
    # Position of a line's first byte in the file, or number of a row or list item. None if the
    # record is a whole file.
    offset: int | None = None

    @property
    def name(self) -> str:
        """Name of the record, which decides whether it is held out.

        It does not contain the input folder, so records of a copied folder keep their names.
        """
        return self.file.name if self.offset is None else f"{self.file.name}:{self.offset}"

    def describe(self) -> str:
        """Describe the position in words: the path, and the line (from 1), row or item (from 0)."""
        if self.offset is None:
            return self.file.path
        if self.file.kind == FileKind.PARQUET:
            return f"{self.file.path}, row {self.offset}"
        if self.file.kind == FileKind.JSON:
            return f"{self.file.path}, record {self.offset}"
        return f"{self.file.path}, line {_line_number(self.file.path, self.offset)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentShard:
    """Some consecutive documents of a `TextDocuments`, as the input of one worker."""

    documents: TextDocuments
    rows: range  # indices of the documents
    size: int  # bytes of input, for the progress report


AnyShard = Shard | DocumentShard
Read = tuple[RecordPosition, Record | BadRecord]
"""The position of a record in the inputs, and the record, or what is wrong with it."""


def list_inputs(
    inputs: Sequence[str], *, text_unit: TextUnit = TextUnit.FILE, out: str = ""
) -> tuple[list[InputFile], Counter[Skip], list[str]]:
    """List the files that paths, folders and glob patterns name.

    Args:
        inputs: Paths, folders and glob patterns.
        text_unit: Whether a text file is one document, or each line is.
        out: Prefix of the store to write, whose files must not be inputs.

    Returns:
        The files in the order of the inputs, the number of skipped files by reason, and the first
        files that cannot be read, each with the reason.

    Raises:
        UserError: An input does not exist, a file is named twice, belongs to the store or has an
            unsupported format, or a folder or pattern contains both records and text.
    """
    files_of_out = _files_of_store(out) if out else frozenset[str]()
    found: dict[str, InputFile] = {}
    skipped: Counter[Skip] = Counter()
    examples: list[str] = []
    for text in inputs:
        new: list[InputFile] = []
        for path, name in _expand(text, skipped, examples):
            # Unlike Path.resolve, realpath does not raise for links that form a circle.
            resolved = os.path.realpath(path)
            if resolved in found:
                raise UserError(
                    f"the inputs name {path} twice; remove one of them (to train the file more "
                    f"often, give its store a larger weight in data.blend)"
                )
            if resolved in files_of_out:
                raise UserError(
                    f"the inputs contain {path}, which is a file of the store --out {out}; give "
                    f"another --out"
                )
            found[resolved] = _input_file(path, name, text_unit)
            new.append(found[resolved])
        _refuse_mixed(text, [file for file in new if file.size])
    if not found:
        counts = {str(reason): count for reason, count in skipped.items() if count}
        shown = f"; not read: {', '.join(examples[:MOST_EXAMPLES])}" if examples else ""
        raise UserError(
            f"{', '.join(inputs) or 'the input'} has no file to read (skipped files: "
            f"{counts or 'none'}{shown}); give files, or folders or patterns with files"
        )
    filled = [file for file in found.values() if file.size]
    skipped[Skip.EMPTY] += len(found) - len(filled)
    return filled, +skipped, examples[:MOST_EXAMPLES]


def _files_of_store(out: str) -> frozenset[str]:
    """Return the paths of all files that a store with the prefix `out` may have."""
    parts = (".bin", ".idx", ".json", ".targets")
    ends = [*parts, *(f"-heldout{part}" for part in parts), "-tokenizer.json"]
    return frozenset(os.path.realpath(f"{out}{end}") for end in ends)


def _refuse_mixed(text: str, files: Sequence[InputFile]) -> None:
    """Raise UserError if an input has both files of records and files of text.

    The text files are probably not meant as documents, for example the README of a data set.

    Args:
        text: The input, as the user gave it.
        files: The files that the input names.
    """
    texts = [file for file in files if file.kind.is_text]
    records = [file for file in files if not file.kind.is_text]
    if not texts or not records:
        return
    # For the example in the message, prefer a file that is not .json, because .json files often
    # only describe the data.
    named = min(records, key=lambda file: ".json" in Path(file.path).suffixes)
    first = Path(named.path)
    suffix = "".join(first.suffixes[-2 if first.suffix.lower() in _OPENERS else -1 :])
    folder = text if Path(text).is_dir() else first.parent
    raise UserError(
        f"{text} has {len(records)} files of records, such as {named.name}, and {len(texts)} files "
        f"that would be read as plain text, such as {texts[0].name}, so it is unclear which are "
        f"documents; give the files to prepare, or a pattern that only they match, "
        f"such as '{Path(folder, '**', f'*{suffix}')}'"
    )


def _expand(text: str, skipped: Counter[Skip], examples: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield the path and the name of each file that an input names.

    Args:
        text: The input: a path, a folder or a pattern.
        skipped: Counts the files that are skipped, by reason. Updated in place.
        examples: Receives descriptions of files that cannot be read.
    """
    path = Path(text)
    if path.is_dir():
        listing = list_folder(path, description=text)
        skipped.update(listing.skipped)
        examples += listing.examples
        yield from ((path / name, name) for name in listing.names)
    elif path.exists() or not glob.has_magic(text):
        yield path, path.name
    else:
        found = [Path(match) for match in sorted(glob.glob(text, recursive=True))]
        files: list[Path] = []
        for file in (path for path in found if not path.is_dir()):
            try:
                size_of(file)
            except OSError as error:
                skipped[Skip.UNREADABLE] += 1
                examples.append(f"{file} ({reason_of(file, error)})")
            else:
                files.append(file)
        if not files and not examples:
            raise UserError(
                f"no file matches {text!r}; give a file, a folder or a pattern that matches files"
            )
        yield from ((file, file.name) for file in files)


def _input_file(path: Path, name: str, text_unit: TextUnit) -> InputFile:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"the input {path} cannot be read: {reason_of(path, error)}") from None
    if not path.is_file():
        raise UserError(
            f"the input {path} must be a file or folder, but is a pipe or device, which wlb cannot "
            f"read twice; write its content to a file"
        )
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _UNREAD_SUFFIXES:
        raise UserError(
            f"{path}: wlb cannot read {suffixes[-1]} files; unpack the file, or compress it as "
            f"{' or '.join(_OPENERS)}"
        )
    inner = suffixes[:-1] if suffixes and suffixes[-1] in _OPENERS else suffixes
    kind = FileKind.TEXT if text_unit == TextUnit.FILE else FileKind.LINES
    if inner and inner[-1] in (".jsonl", ".ndjson"):
        kind = FileKind.JSONL
    elif inner and inner[-1] == ".json" and status.st_size:
        kind = _json_kind(path)
    elif inner and inner[-1] == ".parquet":
        kind = FileKind.PARQUET
        if inner is not suffixes:
            raise UserError(
                f"{path} is a Parquet file that was compressed as a whole, which wlb cannot read; "
                f"unpack the file (Parquet already compresses its content)"
            )
    return InputFile(
        path=str(path), name=name, kind=kind, size=status.st_size, mtime_ns=status.st_mtime_ns
    )


def _json_kind(path: Path) -> FileKind:
    """Return whether a .json file is a JSON list or JSONL; raise UserError if it is neither."""
    with _unpacked(str(path)) as file:
        first, line = first_bytes(file, most=_MOST_BYTES)
    if first == b"[":
        return FileKind.JSON
    if not isinstance(_json_record(line), BadRecord):
        return FileKind.JSONL
    raise UserError(
        f"{path} must be a JSON list of records or have one JSON object in each line; write JSON "
        f"Lines (if the list is under a key, with jq -c '.KEY[]'), or rename the file to .txt to "
        f"train it as plain text"
    )


def list_shards(files: Sequence[InputFile], *, shard_bytes: int) -> list[Shard]:
    """Divide files into shards of about `shard_bytes` each, in order."""
    shards: list[Shard] = []
    for is_text, together in groupby(files, lambda file: file.kind == FileKind.TEXT):
        group = tuple(together)
        if not is_text:
            shards += (shard for file in group for shard in _divided(file, shard_bytes))
            continue
        for rows, size in runs_of([file.size for file in group], shard_bytes, _MOST_FILES):
            shards.append(Shard(files=group[rows.start : rows.stop], size=size))
    return shards


def runs_of(
    sizes: Sequence[int], most_bytes: int, most_rows: int | None = None
) -> Iterator[tuple[range, int]]:
    """Divide a list of items into runs of consecutive items, each of about `most_bytes`.

    Args:
        sizes: Bytes of each item (a file, a document or a row group).
        most_bytes: A run ends with the item that brings it to this many bytes.
        most_rows: The most items of a run, None for any number.

    Yields:
        The range of the items of a run, and their bytes.
    """
    first = total = 0
    for row, size in enumerate(sizes):
        total += size
        stop = row + 1
        if total >= most_bytes or stop - first == most_rows or stop == len(sizes):
            yield range(first, stop), total
            first, total = stop, 0


def _divided(file: InputFile, shard_bytes: int) -> Iterator[Shard]:
    """Divide one file of records or of lines into shards of about `shard_bytes` each."""
    if file.kind == FileKind.PARQUET:
        for rows, size in runs_of(group_sizes(file.path), shard_bytes):
            yield Shard(files=(file,), start=rows.start, stop=rows.stop, size=size)
    elif file.kind == FileKind.JSON or Path(file.path).suffix.lower() in _OPENERS:
        yield Shard(files=(file,), start=0, stop=1 << 62, size=file.size)
    else:
        for start in range(0, file.size, shard_bytes):
            stop = min(file.size, start + shard_bytes)
            yield Shard(files=(file,), start=start, stop=stop, size=stop - start)


def document_shards(documents: TextDocuments, *, shard_bytes: int) -> list[DocumentShard]:
    """Divide documents into shards of about `shard_bytes` each, in order."""
    return [
        DocumentShard(documents=documents, rows=rows, size=size)
        for rows, size in runs_of(documents.sizes, shard_bytes)
    ]


def read_shard(shard: AnyShard, *, text_key: str, columns: Columns) -> Iterator[Read]:
    """Read all records of a shard.

    Args:
        shard: The part of the input to read.
        text_key: A text file, or a line of one, becomes a record with its text under this key.
        columns: Returns which columns of a Parquet file to read, given all their names.

    Yields:
        The position of each record, and the record or a `BadRecord` if it is invalid.

    Raises:
        UserError: A file is damaged, so that reading cannot continue.
    """
    if isinstance(shard, DocumentShard):
        yield from _listed_records(shard, text_key)
        return
    if shard.files[0].kind == FileKind.TEXT:
        for file in shard.files:
            yield RecordPosition(file=file), _text_record(file, text_key)
        return
    file = shard.files[0]
    if file.kind == FileKind.PARQUET:
        groups = range(shard.start, shard.stop)
        for row, record in parquet_records(file.path, groups=groups, columns=columns):
            yield RecordPosition(file=file, offset=row), record
        return
    if file.kind == FileKind.JSON:
        for number, item in enumerate(_items(file.path)):
            yield RecordPosition(file=file, offset=number), _object(item)
        return
    for offset, line in _lines(file.path, shard.start, shard.stop):
        if not line.strip():
            record = BadRecord(Skip.BLANK_LINE, "the line is blank")
        else:
            is_json = file.kind == FileKind.JSONL
            record = _json_record(line) if is_json else _text(line, text_key)
        yield RecordPosition(file=file, offset=offset), record


def _listed_records(shard: DocumentShard, text_key: str) -> Iterator[Read]:
    documents = shard.documents
    for row in shard.rows:
        name, size = documents.names[row], documents.sizes[row]
        path = f"{name} of {documents.description}"
        file = InputFile(path=path, name=name, kind=FileKind.TEXT, size=size, mtime_ns=0)
        text = documents.read(row)
        is_left_out = isinstance(text, Skip)
        record = BadRecord(text, f"no UTF-8 text ({text})") if is_left_out else {text_key: text}
        yield RecordPosition(file=file), record


def _open(path: str) -> IO[bytes]:
    return _OPENERS.get(Path(path).suffix.lower(), open)(path, "rb")


def _text_record(file: InputFile, text_key: str) -> Record | BadRecord:
    try:
        with _open(file.path) as source:
            data = source.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return BadRecord(
                Skip.UNREADABLE, f"the file has more than {_MOST_BYTES} bytes; split the file"
            )
    except _CORRUPT as error:
        return BadRecord(Skip.UNREADABLE, f"the file cannot be read to its end ({error})")
    return _text(data.removeprefix(_BOM), text_key)


def _text(data: bytes, text_key: str) -> Record | BadRecord:
    try:
        return {text_key: data.decode("utf-8")}
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _not_utf8(error: UnicodeDecodeError) -> BadRecord:
    return BadRecord(
        Skip.NOT_UTF8,
        f"not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}; convert the "
        f"text to UTF-8",
    )


def _lines(path: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the first byte's position and the bytes of each line that starts in [start, stop)."""
    with _unpacked(path) as file:
        offset, num_blank = start, 0
        # A line that begins before `start` belongs to the previous shard. So skip the rest of the
        # line that contains the byte before `start`. If a line begins exactly at `start`, this
        # skips nothing.
        if start:
            file.seek(start - 1)
            offset += len(file.readline()) - 1
        while offset < stop and (line := file.readline(_MOST_BYTES + 1)):
            if len(line) > _MOST_BYTES:
                raise UserError(
                    f"{path}: the line at byte {offset} has more than {_MOST_BYTES} bytes; split "
                    f"it into several documents"
                )
            num_blank = 0 if line.strip() else num_blank + 1
            if num_blank > _MOST_BLANK:
                raise UserError(
                    f"{path}: there are more than {_MOST_BLANK} consecutive blank lines before "
                    f"byte {offset}; remove them"
                )
            text = line if offset else line.removeprefix(_BOM)
            yield offset, text.removesuffix(b"\n").removesuffix(b"\r")
            offset += len(line)


def _items(path: str) -> Iterator[object]:
    """Yield the items of a JSON list in a file, one parsed item at a time."""
    with _unpacked(path) as file:
        try:
            yield from list_items(file, most=_MOST_LIST_BYTES)
        except ValueError as error:
            raise UserError(
                f"{path}: {error}; correct the file, or write the records as JSON Lines, because "
                "--on-error skip can leave out single damaged lines of such a file"
            ) from None


@contextmanager
def _unpacked(path: str) -> Generator[IO[bytes]]:
    """Open a file, decompressing it if needed; raise UserError if it is truncated or damaged."""
    try:
        with _open(path) as file:
            yield file
    except _CORRUPT as error:
        raise UserError(
            f"{path} cannot be read to its end ({error}); if the file is truncated or damaged, "
            f"download or write it again"
        ) from None


def _json_record(line: bytes) -> Record | BadRecord:
    try:
        value: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except json.JSONDecodeError as error:
        return BadRecord(Skip.NOT_JSON, f"not JSON: {error.msg} at character {error.pos}")
    # Python refuses JSON that is nested too deeply, and numbers that have too many digits.
    except (RecursionError, ValueError) as error:
        return BadRecord(Skip.NOT_JSON, f"cannot be read as JSON: {error}")
    return _object(value)


def _object(value: object) -> Record | BadRecord:
    try:
        check_depth(value, "the record", remedy="flatten the record")
    except UserError as error:
        return BadRecord(Skip.NOT_JSON, str(error))
    if not isinstance(value, dict):
        return BadRecord(
            Skip.NOT_AN_OBJECT,
            f"the record must be a JSON object, but is of type {type(value).__name__}",
        )
    return cast("Record", value)


def _line_number(path: str, offset: int) -> int:
    """Return the number (from 1) of the line at a byte offset, by reading the file up to it."""
    number, at = 1, 0
    with _open(path) as file:
        while at < offset and (block := file.read(min(1 << 20, offset - at))):
            number += block.count(b"\n")
            at += len(block)
    return number


def check_columns(files: Sequence[InputFile], columns: Columns) -> None:
    """Raise UserError if a Parquet file lacks a column that `columns` needs."""
    for file in files:
        if file.kind == FileKind.PARQUET:
            opened = open_parquet(file.path)
            try:
                columns_of(opened, columns)
            except UserError as error:
                raise UserError(f"{file.path} {error}") from None
