"""Inputs to records: text files, JSONL, JSON and Parquet in shards that any process can read.

JSONL and line files are divided at line ends, Parquet by row groups, text files into groups; a JSON
list is one shard. Shards in order give every line, item, row and file once, in the order of the
inputs; invalid records are given as `BadRecord`, and reading continues after them. Reading holds
one line, item or file, or 256 rows.
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
_CORRUPT = (OSError, EOFError, zlib.error, lzma.LZMAError)
_MOST_FILES = 4096
_MOST_BYTES = 1 << 28
"""Longest text or line; a compressed file of megabytes may hold gigabytes."""
_MOST_LIST_BYTES = 1 << 30
"""Longest JSON list, whose text is held in memory."""
_MOST_BLANK = 1 << 20
"""Blank lines that may follow each other; a compressed file may hold billions."""
_BOM = b"\xef\xbb\xbf"


class FileKind(StrEnum):
    """How a file is read."""

    TEXT = "text"
    LINES = "lines"
    JSONL = "jsonl"
    JSON = "json"
    PARQUET = "parquet"

    @property
    def is_text(self) -> bool:
        """Whether documents are the file's text as it is, not the values of records."""
        return self in (FileKind.TEXT, FileKind.LINES)


class TextUnit(StrEnum):
    """Unit of a text file that is one document."""

    FILE = "file"
    LINE = "line"


class OnError(StrEnum):
    """Whether a record that is no document stops the preparation or is skipped and counted."""

    FAIL = "fail"
    SKIP = "skip"


class BadRecord(UserError):
    """A line, row or file that is no document; it is counted under `reason`."""

    def __init__(self, reason: Skip, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file to read. name: relative to the input it was found in; documents are named after it."""

    path: str
    name: str
    kind: FileKind
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part of one file, or several whole text files.

    start, stop: bytes of a JSONL or line file (lines that start in [start, stop) belong to it),
    row groups of a Parquet file, not used for whole files and JSON lists. size: bytes, for
    progress.
    """

    files: tuple[InputFile, ...]
    start: int = 0
    stop: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPosition:
    """Position of a record. offset: bytes before a line, rows or items before a row or an item;
    None for a whole file. name: text that the held-out rule hashes; it does not depend on the
    corpus's folder.
    """

    file: InputFile
    offset: int | None = None

    @property
    def name(self) -> str:
        return self.file.name if self.offset is None else f"{self.file.name}:{self.offset}"

    def spoken(self) -> str:
        """The place as messages show it: path, with line (from 1), or row or record (from 0)."""
        if self.offset is None:
            return self.file.path
        if self.file.kind == FileKind.PARQUET:
            return f"{self.file.path}, row {self.offset}"
        if self.file.kind == FileKind.JSON:
            return f"{self.file.path}, record {self.offset}"
        return f"{self.file.path}, line {_line_number(self.file.path, self.offset)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentShard:
    """Consecutive documents of a listing."""

    documents: TextDocuments
    rows: range
    size: int


AnyShard = Shard | DocumentShard
Read = tuple[RecordPosition, Record | BadRecord]


def list_inputs(
    inputs: Sequence[str], *, text_unit: TextUnit = TextUnit.FILE, out: str = ""
) -> tuple[list[InputFile], Counter[Skip], list[str]]:
    """Files of paths, folders and glob patterns, in the order given, counts of files left out, and
    the first ones that cannot be read, each with the reason.

    out: prefix of the store that is written. UserError for an input that is absent, a file named
    twice, a file of that store, compression that is not read, JSON that holds no records, and a
    folder or pattern that finds records and text.
    """
    own = _files_of_store(out) if out else frozenset[str]()
    found: dict[str, InputFile] = {}
    skipped: Counter[Skip] = Counter()
    examples: list[str] = []
    for text in inputs:
        new: list[InputFile] = []
        for path, name in _expand(text, skipped, examples):
            # Path.resolve raises a RuntimeError for a link that leads back to itself.
            resolved = os.path.realpath(path)
            if resolved in found:
                raise UserError(
                    f"{path} is in the inputs twice; to repeat data give its store a larger weight "
                    f"in data.blend"
                )
            if resolved in own:
                raise UserError(
                    f"the inputs hold {path}, which --out {out} writes: it would be read as text; "
                    f"write it elsewhere"
                )
            found[resolved] = _input_file(path, name, text_unit)
            new.append(found[resolved])
        _refuse_mixed(text, [file for file in new if file.size])
    if not found:
        counts = {str(reason): count for reason, count in skipped.items() if count}
        shown = f"; not read: {', '.join(examples[:MOST_EXAMPLES])}" if examples else ""
        raise UserError(
            f"no file in {', '.join(inputs) or 'the inputs'} (left out: {counts or 'none'}"
            f"{shown}); give files, or folders or patterns with files"
        )
    filled = [file for file in found.values() if file.size]
    skipped[Skip.EMPTY] += len(found) - len(filled)
    return filled, +skipped, examples[:MOST_EXAMPLES]


def _files_of_store(out: str) -> frozenset[str]:
    """Files that an earlier call may have written and that a pattern may find."""
    parts = (".bin", ".idx", ".json", ".targets")
    ends = [*parts, *(f"-heldout{part}" for part in parts), "-tokenizer.json"]
    return frozenset(os.path.realpath(f"{out}{end}") for end in ends)


def _refuse_mixed(text: str, files: Sequence[InputFile]) -> None:
    """UserError for records beside text, such as the README of a data set, in one input."""
    texts = [file for file in files if file.kind.is_text]
    records = [file for file in files if not file.kind.is_text]
    if not texts or not records:
        return
    # A .json file beside others is more likely to describe them than to hold the data.
    named = min(records, key=lambda file: ".json" in Path(file.path).suffixes)
    first = Path(named.path)
    suffix = "".join(first.suffixes[-2 if first.suffix.lower() in _OPENERS else -1 :])
    folder = text if Path(text).is_dir() else first.parent
    raise UserError(
        f"{text} has {len(records)} files of records, such as {named.name}, and {len(texts)} "
        f"that would be trained as text, such as {texts[0].name}; name the files that are meant, "
        f"or give a pattern for each kind, such as '{Path(folder, '**', f'*{suffix}')}'"
    )


def _expand(text: str, skipped: Counter[Skip], examples: list[str]) -> Iterator[tuple[Path, str]]:
    """(path, name) of the files that an input names; what is left out goes to the other two."""
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
            raise UserError(f"no file matches {text!r}; give files, folders or patterns that do")
        yield from ((file, file.name) for file in files)


def _input_file(path: Path, name: str, text_unit: TextUnit) -> InputFile:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"the input {path} cannot be read: {reason_of(path, error)}") from None
    if not path.is_file():
        raise UserError(f"the input {path} is not a file or folder; pipes cannot be read again")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _UNREAD_SUFFIXES:
        raise UserError(
            f"{path}: {suffixes[-1]} is not read; unpack it, or use {', '.join(_OPENERS)}"
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
            raise UserError(f"{path}: a Parquet file is compressed inside; unpack it")
    return InputFile(
        path=str(path), name=name, kind=kind, size=status.st_size, mtime_ns=status.st_mtime_ns
    )


def _json_kind(path: Path) -> FileKind:
    """How a .json file is read; UserError for one that holds neither a list nor a record a line."""
    with _unpacked(str(path)) as file:
        first, line = first_bytes(file, most=_MOST_BYTES)
    if first == b"[":
        return FileKind.JSON
    if not isinstance(_json_record(line), BadRecord):
        return FileKind.JSONL
    raise UserError(
        f"{path} holds neither a JSON list of records nor a JSON object a line; write it as JSON "
        f"Lines (for a list under a key: jq -c '.KEY[]'), or name it .txt to train its text"
    )


def list_shards(files: Sequence[InputFile], *, shard_bytes: int) -> list[Shard]:
    """`files` in order as shards of about `shard_bytes` each."""
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
    """Consecutive rows of about `most_bytes` together, with their bytes."""
    first = held = 0
    for row, size in enumerate(sizes):
        held += size
        stop = row + 1
        if held >= most_bytes or stop - first == most_rows or stop == len(sizes):
            yield range(first, stop), held
            first, held = stop, 0


def _divided(file: InputFile, shard_bytes: int) -> Iterator[Shard]:
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
    """The documents in order, as shards of about `shard_bytes`."""
    return [
        DocumentShard(documents=documents, rows=rows, size=size)
        for rows, size in runs_of(documents.sizes, shard_bytes)
    ]


def read_shard(shard: AnyShard, *, text_key: str, columns: Columns) -> Iterator[Read]:
    """(position, record or BadRecord) of everything in a shard.

    text_key: the key that the text of a file or line gets. columns: chooses columns of Parquet.
    UserError, with the path, for a file that is corrupt as a whole.
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
            record = BadRecord(Skip.BLANK_LINE, "blank")
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
        record = BadRecord(text, "no UTF-8 text") if is_left_out else {text_key: text}
        yield RecordPosition(file=file), record


def _open(path: str) -> IO[bytes]:
    return _OPENERS.get(Path(path).suffix.lower(), open)(path, "rb")


def _text_record(file: InputFile, text_key: str) -> Record | BadRecord:
    try:
        with _open(file.path) as source:
            data = source.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return BadRecord(Skip.UNREADABLE, f"more than {_MOST_BYTES} bytes; divide it")
    except _CORRUPT as error:
        return BadRecord(Skip.UNREADABLE, f"cannot be read to its end ({error})")
    return _text(data.removeprefix(_BOM), text_key)


def _text(data: bytes, text_key: str) -> Record | BadRecord:
    try:
        return {text_key: data.decode("utf-8")}
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _not_utf8(error: UnicodeDecodeError) -> BadRecord:
    return BadRecord(
        Skip.NOT_UTF8,
        f"not UTF-8: byte {error.object[error.start]:#04x} at byte {error.start}; convert it",
    )


def _lines(path: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its end) of the lines that start in [start, stop)."""
    with _unpacked(path) as file:
        offset, num_blank = start, 0
        if start:
            file.seek(start - 1)
            offset += len(file.readline()) - 1
        while offset < stop and (line := file.readline(_MOST_BYTES + 1)):
            if len(line) > _MOST_BYTES:
                raise UserError(
                    f"{path}: the line at byte {offset} has more than {_MOST_BYTES} bytes; "
                    f"divide it into documents"
                )
            num_blank = 0 if line.strip() else num_blank + 1
            if num_blank > _MOST_BLANK:
                raise UserError(
                    f"{path}: more than {_MOST_BLANK} blank lines follow each other up to byte "
                    f"{offset}; remove them"
                )
            text = line if offset else line.removeprefix(_BOM)
            yield offset, text.removesuffix(b"\n").removesuffix(b"\r")
            offset += len(line)


def _items(path: str) -> Iterator[object]:
    """The items of a JSON list, each read when it is asked for."""
    with _unpacked(path) as file:
        try:
            yield from list_items(file, most=_MOST_LIST_BYTES)
        except ValueError as error:
            raise UserError(
                f"{path}: {error}; correct it, or write it as JSON Lines, of which damaged lines "
                f"can be left out"
            ) from None


@contextmanager
def _unpacked(path: str) -> Generator[IO[bytes]]:
    """The file's bytes; UserError where they end early or are corrupt."""
    try:
        with _open(path) as file:
            yield file
    except _CORRUPT as error:
        raise UserError(
            f"{path} cannot be read to its end ({error}); if it is truncated or corrupt, get it "
            f"again"
        ) from None


def _json_record(line: bytes) -> Record | BadRecord:
    try:
        value: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except json.JSONDecodeError as error:
        return BadRecord(Skip.NOT_JSON, f"not JSON: {error.msg} at character {error.pos}")
    # The JSON is nested too deeply, or has a number of too many digits.
    except (RecursionError, ValueError) as error:
        return BadRecord(Skip.NOT_JSON, f"not JSON: {error}")
    return _object(value)


def _object(value: object) -> Record | BadRecord:
    try:
        check_depth(value, "it", remedy="flatten it")
    except UserError as error:
        return BadRecord(Skip.NOT_JSON, str(error))
    if not isinstance(value, dict):
        return BadRecord(Skip.NOT_AN_OBJECT, f"not a JSON object but {type(value).__name__}")
    return cast("Record", value)


def _line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line at a byte offset; reads the file up to it."""
    number, at = 1, 0
    with _open(path) as file:
        while at < offset and (block := file.read(min(1 << 20, offset - at))):
            number += block.count(b"\n")
            at += len(block)
    return number


def check_columns(files: Sequence[InputFile], columns: Columns) -> None:
    """UserError for the first Parquet file that lacks columns that `columns` needs."""
    for file in files:
        if file.kind == FileKind.PARQUET:
            opened = open_parquet(file.path)
            try:
                columns_of(opened, columns)
            except UserError as error:
                raise UserError(f"{file.path} {error}") from None
