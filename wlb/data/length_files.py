"""Read document lengths from a file or from standard input.

Formats are text with one length per line, CSV, JSON, JSONL, NPY, NPZ and Parquet. A binary format
is recognised by its first bytes, whatever the file is called, so it is never read as text. A table
(CSV, JSONL, Parquet, NPZ) must have one column of lengths: either a column whose name is in
`NAMES`, or the only column of integers. Line numbers in error messages count blank lines too.
"""

import csv
import io
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from wlb.data.batches import MOST_LENGTH, LengthSource, checked_lengths
from wlb.plan import UserError
from wlb.plan.numerals import number_of
from wlb.plan.read_file import WRONG_SHAPE, describe_error, load_arrays, parse_json

NAMES = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "tokens", "seq_len", "len")
"""Column names that mean lengths. If a table has several, the first in this list is used."""
STDIN = "-"
# First bytes of files in each binary format, and of compressed files. The latter are refused.
_MAGIC = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz", b"PAR1": ".parquet"}
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
# Suffixes of tables, with the character that separates their columns.
_TABLES = {".csv": ",", ".tsv": "\t"}

MOST_DOCUMENTS = 1 << 27
"""The most lengths that a file may have, which take 1 GiB of memory.

A random sample of a larger file gives nearly the same plans.
"""
MOST_BYTES = 1 << 31
"""The most bytes that a file of lengths may have, because it is read into memory as a whole."""


class _Found(NamedTuple):
    """Lengths as they were read, before they are checked."""

    values: Any  # the lengths, an array or list of shape [n]
    # Returns the name of a value in error messages, such as "length 3", given its index.
    where: Callable[[int], str] = "length {}".format


def lengths_of_file(path: str | Path, *, source_id: int = 0) -> LengthSource:
    """Read the document lengths in a file, or in standard input for "-".

    Args:
        path: The file, or "-".
        source_id: Value of `Documents.source` for these documents.

    Raises:
        UserError: The format is unknown, an entry is not a length (`checked_lengths`), or there are
            more than `MOST_DOCUMENTS` lengths or `MOST_BYTES` bytes.
    """
    if str(path) == STDIN:
        if sys.stdin.isatty():
            raise UserError(
                "--lengths - reads lengths from standard input, but standard input is a terminal; "
                "pipe lengths into the command, or give --lengths FILE"
            )
        name, file, suffix = "standard input", sys.stdin.buffer, ""
        data = file.read(MOST_BYTES + 1)
    else:
        file = Path(path)
        if not file.is_file():
            raise UserError(f"the file of lengths {file} does not exist; give another path")
        name, suffix = str(file), file.suffix.lower()
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UserError(
            f"{name} is too large, because a file of lengths may have at most {MOST_BYTES:,} "
            "bytes; give a random sample of its lengths, which leads to nearly the same plans"
        )
    found = _read(name, data, suffix)
    lengths = checked_lengths(name, found.values, where=found.where)
    short = name if str(path) == STDIN else Path(path).name
    return LengthSource(name=short, lengths=lengths, source_id=source_id)


def _refuse_more(name: str, count: int, what: str = "lengths") -> None:
    """Raise UserError if a file has too many lengths, before they are parsed or copied.

    Args:
        name: Name of the file, for error messages.
        count: The number of lengths, or an upper bound of it, such as the number of lines.
        what: What `count` counts, such as "lines", for error messages.
    """
    if count > MOST_DOCUMENTS:
        raise UserError(
            f"{name} has {count:,} {what}, but must have at most {MOST_DOCUMENTS:,}; give a random "
            f"sample of its lengths, which leads to nearly the same plans"
        )


def _read(name: str, data: bytes, suffix: str) -> _Found:
    for magic, kind in _PACKED.items():
        if data.startswith(magic):
            raise UserError(
                f"{name} is compressed with {kind}, and wlb cannot decompress it; decompress the "
                f"file, or pipe its decompressed content into the command with --lengths -"
            )
    form = next((form for magic, form in _MAGIC.items() if data.startswith(magic)), suffix)
    match form:
        case ".npy":
            return _npy(name, data)
        case ".npz":
            return _npz(name, data)
        case ".parquet":
            return _parquet(name, data)
        case _:
            return _text(name, data, form)


def _npy(name: str, data: bytes) -> _Found:
    remedy = "save lengths with numpy.save"
    where = f"{name} is not a .npy array of integers"
    values = load_arrays(data, where, remedy=remedy)[""]
    _refuse_more(name, values.size)
    return _Found(values)


def _npz(name: str, data: bytes) -> _Found:
    remedy = "save lengths with numpy.savez"
    arrays = load_arrays(data, name, remedy=remedy, most_bytes=MOST_BYTES)
    if not data.startswith(b"PK"):
        # The file has the suffix .npz, but is in the format .npy.
        return _npy(name, data)
    files = list(arrays)
    chosen = _column(name, files, files if len(files) == 1 else (), what="array")
    _refuse_more(name, arrays[chosen].size)
    return _Found(arrays[chosen], f"entry {{}} of array {chosen!r}".format)


def _parquet(name: str, data: bytes) -> _Found:
    try:
        # Import by name, which pyright does not follow, because pyarrow has no type annotations.
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise UserError(
            f"{name} is a Parquet file, but the library pyarrow, which reads Parquet, is not "
            f"installed; run pip install 'wlb-llm[data]'"
        ) from None
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
        schema = file.schema_arrow
        numeric = [f.name for f in schema if arrow.types.is_integer(f.type)]
        chosen = _column(name, schema.names, numeric, what="column")
        _refuse_more(name, file.metadata.num_rows)
        column = file.read(columns=[chosen]).column(0)
        is_plain = arrow.types.is_integer(column.type) and not column.null_count
        values = column.to_numpy() if is_plain else column.to_pylist()
    except (arrow.ArrowException, *WRONG_SHAPE, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{name} is not a Parquet file, or is damaged ({describe_error(error)}); write the "
            f"file again"
        ) from None
    return _Found(values, f"row {{}} of column {chosen!r}".format)


def _text(name: str, data: bytes, suffix: str) -> _Found:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _binary(name, f"byte {error.start} is not UTF-8") from None
    if "\0" in text:
        raise _binary(name, f"byte {data.index(0)} is zero")
    first = next((line.strip() for line in _lines(data) if line.strip()), "")
    if suffix == ".json" or (first[:1] == "[" and suffix != ".jsonl"):
        return _json(name, text)
    # Free the decoded copy, because the other formats are read from `data` line by line.
    del text
    _refuse_more(name, data.count(b"\n"), "lines")
    if suffix == ".jsonl" or first[:1] == "{":
        return _collected(name, _jsonl(name, data))
    separator = _TABLES.get(suffix) or next((c for c in "\t,;" if c in first), None)
    if separator is not None:
        return _collected(name, _csv(name, data, separator))
    return _collected(name, _words(data, has_head=suffix in _TABLES))


def _lines(data: bytes, newline: str | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=newline)


def _binary(name: str, why: str) -> UserError:
    return UserError(
        f"{name} is neither UTF-8 text ({why}) nor a file in the format .npy, .npz or Parquet; "
        f"give lengths in one of these formats"
    )


def _collected(name: str, values: Iterable[tuple[int, Any]]) -> _Found:
    """Collect the lengths of a text file, and check each of them.

    Lengths are stored in a compact array, because a list of Python integers would need several
    times the memory.

    Args:
        name: Name of the file, for error messages.
        values: The line number and the length of each document.
    """
    out = array("q")
    for line, value in values:
        if type(value) is not int or not 1 <= value <= MOST_LENGTH:
            (value,) = checked_lengths(name, [value], where=f"line {line}: length".format)
        out.append(value)
    return _Found(np.frombuffer(out, np.int64) if out else [])


def _words(data: bytes, *, has_head: bool) -> Iterator[tuple[int, Any]]:
    """Yield (line number, document length on the line) for each line of a file with one column.

    Blank lines are skipped.

    Args:
        data: Content of the file.
        has_head: Whether the first line may be the name of the column instead of a length.
    """
    for i, line in enumerate(_lines(data), 1):
        if word := line.strip():
            if not (has_head and _is_name(word)):
                yield i, number_of(word)
            has_head = False


def _json(name: str, text: str) -> _Found:
    _refuse_more(name, text.count(","), "commas")
    values = parse_json(text, name, remedy="write a JSON list of lengths", wide=True)
    if not isinstance(values, list):
        raise UserError(
            f"{name} must be a JSON list of lengths, but is of type {type(values).__name__}"
        )
    return _Found(cast("list[Any]", values))


def _jsonl(name: str, data: bytes) -> Iterator[tuple[int, Any]]:
    chosen = ""
    # Split only at newlines; str.splitlines would split at characters that strings may contain.
    for i, line in enumerate(_lines(data, "\n"), 1):
        if not line.strip():
            continue
        remedy = "correct or remove the line"
        value = parse_json(line, f"{name}: line {i}", remedy=remedy, wide=True)
        if isinstance(value, dict):
            record = cast("dict[str, Any]", value)
            if not chosen:
                counts = [k for k, v in record.items() if type(v) is int]
                chosen = _column(f"{name}: line {i}", list(record), counts, what="key")
            if chosen not in record:
                raise UserError(
                    f"{name}: line {i} has no key {chosen!r}, under which the first record has "
                    f"its length; add the key to this line"
                )
            value = record[chosen]
        yield i, value


def _csv(name: str, data: bytes, separator: str) -> Iterator[tuple[int, Any]]:
    rows = _rows(name, data, separator)
    if (first := next(rows, None)) is None:
        return
    # Find the column of lengths (`_column`): one with a usual name, or else the only one with an
    # integer in the first row of data.
    head = first[1]
    has_head = _is_head(head)
    second = next(rows, None) if has_head else first
    names = head if has_head else [str(i) for i in range(1, len(head) + 1)]
    sample = second[1] if second else []
    numeric = [n for n, c in zip(names, sample, strict=False) if isinstance(number_of(c), int)]
    numeric = names if len(names) == 1 else numeric
    at = names.index(_column(name, names, numeric, what="column"))
    for line, row in chain([second] if second else [], rows):
        if len(row) <= at:
            raise UserError(
                f"{name}: line {line} has only {len(row)} cells, but the first row has "
                f"{len(names)}; correct the line"
            )
        yield line, number_of(row[at])


def _is_name(cell: str) -> bool:
    """Return whether a cell of the first row may be a column's name.

    A cell such as 1_000, 10k or nan is not a name but an invalid length, which an error message
    must report later.
    """
    bare = cell.lstrip("+-.").lower()
    return not bare[:1].isdigit() and bare not in ("nan", "inf", "infinity")


def _is_head(cells: list[str]) -> bool:
    """Return whether the first row of a table contains column names.

    The row contains column names if every cell may be a name (`_is_name`), or if one cell is in
    `NAMES` and no cell is an integer. In the second case, other names may begin with a digit.
    """
    named = any(cell in NAMES for cell in cells)
    return (named and not any(isinstance(number_of(cell), int) for cell in cells)) or all(
        map(_is_name, cells)
    )


def _rows(name: str, data: bytes, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a text table, without blank rows.

    Args:
        name: Name of the file, for error messages.
        data: Content of the file.
        separator: Character between cells.
    """
    reader = csv.reader(_lines(data, ""), delimiter=separator)
    try:
        for row in reader:
            if any(row):
                yield reader.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise UserError(
            f"{name}: line {reader.line_num} is not a valid row of CSV ({error}); correct the line"
        ) from None


def _column(name: str, columns: list[str], numeric: Iterable[str], *, what: str) -> str:
    """Return the name of the column of lengths.

    Args:
        name: Name of the file, for messages.
        columns: Names of all columns.
        numeric: Names of the columns that contain integers.
        what: What the file format calls a column, such as "key", for error messages.

    Raises:
        UserError: No column has lengths, or it is unclear which column has them.
    """
    numeric = list(numeric)
    for known in NAMES:
        if columns.count(known) > 1:
            raise UserError(
                f"{name} has two {what}s {known!r}; rename the one that does not contain the "
                f"lengths"
            )
        if known in columns:
            return known
    if len(numeric) == 1:
        if columns.count(numeric[0]) > 1:
            raise UserError(
                f"{name} has two {what}s {numeric[0]!r}; rename the one that does not contain the "
                f"lengths"
            )
        return numeric[0]
    raise UserError(
        f"{name} has the {what}s {', '.join(columns)}, and it is unclear which {what} contains the "
        f"lengths ({what}s of integers: {', '.join(numeric) or 'none'}); rename the {what} of the "
        f"lengths to {NAMES[0]!r}"
    )
