"""Document lengths from a file or from standard input: text, CSV, JSON, JSONL, NPY, NPZ, Parquet.

A binary format is known by its first bytes, whatever the file's name says, so that it is never
read as text. Tables (CSV, JSONL, Parquet, NPZ) need one column of lengths: the only one of numbers,
or the first that has a name of `NAMES`. Errors name the line of the file, which counts blank ones.
"""

import csv
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from wlb.data.lengths import LengthSource, checked_lengths
from wlb.plan import UserError
from wlb.plan.read_file import WRONG_SHAPE, load_arrays, parse_json, told

NAMES = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "tokens", "seq_len", "len")
"""Names of columns that hold lengths, the preferred ones first."""
STDIN = "-"
_MAGIC = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz", b"PAR1": ".parquet"}
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_TABLES = {".csv": ",", ".tsv": "\t"}


class _Found(NamedTuple):
    """values: as read, not checked yet. where: names the place of a value by its index."""

    values: Any
    where: Callable[[int], str]


def lengths_of_file(path: str | Path, *, source_id: int = 0) -> LengthSource:
    """The lengths in a file, or in standard input for "-".

    UserError, with the line, for what is no length, and for a format that is not known.
    """
    if str(path) == STDIN:
        if sys.stdin.isatty():
            raise UserError(
                "--lengths - reads standard input, which is this terminal; pipe lengths into it"
            )
        name, data, suffix = "standard input", sys.stdin.buffer.read(), ""
    else:
        file = Path(path)
        if not file.is_file():
            raise UserError(f"no file of lengths at {file}")
        name, data, suffix = str(file), file.read_bytes(), file.suffix.lower()
    found = _read(name, data, suffix)
    lengths = checked_lengths(name, found.values, where=found.where)
    short = name if str(path) == STDIN else Path(path).name
    return LengthSource(name=short, lengths=lengths, source_id=source_id)


def _read(name: str, data: bytes, suffix: str) -> _Found:
    for magic, kind in _PACKED.items():
        if data.startswith(magic):
            raise UserError(f"{name} is compressed ({kind}); decompress it into `--lengths -`")
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
    return _Found(load_arrays(data, where, remedy=remedy)[""], "length {}".format)


def _npz(name: str, data: bytes) -> _Found:
    arrays = load_arrays(data, name, remedy="save lengths with numpy.savez")
    if not data.startswith(b"PK"):  # an .npy file of another name
        return _Found(arrays[""], "length {}".format)
    files = list(arrays)
    chosen = _column(name, files, files if len(files) == 1 else (), what="array")
    return _Found(arrays[chosen], f"entry {{}} of array {chosen!r}".format)


def _parquet(name: str, data: bytes) -> _Found:
    try:
        # pyarrow has no types, so it is imported by name, which pyright does not follow.
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise UserError(
            f"{name}: Parquet needs pyarrow, which is not installed; pip install 'wlb-llm[data]'"
        ) from None
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
        schema = file.schema_arrow
        numeric = [f.name for f in schema if arrow.types.is_integer(f.type)]
        chosen = _column(name, schema.names, numeric, what="column")
        values = file.read(columns=[chosen]).column(0).to_pylist()
    except (arrow.ArrowException, *WRONG_SHAPE, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{name} is not a Parquet file or is corrupt ({told(error)}); write it again"
        ) from None
    return _Found(values, f"row {{}} of column {chosen!r}".format)


def _text(name: str, data: bytes, suffix: str) -> _Found:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _binary(name, f"byte {error.start} is no UTF-8") from None
    if "\0" in text:
        raise _binary(name, f"byte {data.index(0)} is zero")
    begin = text.lstrip()[:1]
    if suffix == ".json" or (begin == "[" and suffix != ".jsonl"):
        return _json(name, text)
    if suffix == ".jsonl" or begin == "{":
        return _jsonl(name, text)
    first = next((line for line in text.splitlines() if line.strip()), "")
    separator = _TABLES.get(suffix) or next((c for c in "\t,;" if c in first), None)
    if separator is not None:
        return _csv(name, text, separator)
    lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if suffix in _TABLES:
        lines = lines[1:] if lines and isinstance(_number(lines[0][1]), str) else lines
    return _lines([i for i, _ in lines], [_number(word) for _, word in lines])


def _binary(name: str, why: str) -> UserError:
    return UserError(
        f"{name} is binary and none of .npy, .npz, Parquet ({why}); give lengths as one of these, "
        f"or as text"
    )


def _lines(numbers: Sequence[int], values: list[Any]) -> _Found:
    def where(i: int) -> str:
        return f"line {numbers[i]}: length"

    return _Found(values, where)


def _json(name: str, text: str) -> _Found:
    values = parse_json(text, name, remedy="it must hold a list of lengths", wide=True)
    if not isinstance(values, list):
        raise UserError(f"{name} holds a {type(values).__name__}; it must hold a list of lengths")
    return _Found(cast("list[Any]", values), "length {}".format)


def _jsonl(name: str, text: str) -> _Found:
    numbers: list[int] = []
    values: list[Any] = []
    chosen = ""
    # Only a newline ends a record: str.splitlines would also split inside of strings.
    for i, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        remedy = "correct or leave out the line"
        value = parse_json(line, f"{name}: line {i}", remedy=remedy, wide=True)
        if isinstance(value, dict):
            record = cast("dict[str, Any]", value)
            if not chosen:
                counts = [k for k, v in record.items() if type(v) is int]
                chosen = _column(f"{name}: line {i}", list(record), counts, what="key")
            if chosen not in record:
                raise UserError(f"{name}: line {i} has no key {chosen!r}, as the first record has")
            value = record[chosen]
        numbers.append(i)
        values.append(value)
    return _lines(numbers, values)


def _csv(name: str, text: str, separator: str) -> _Found:
    reader = csv.reader(io.StringIO(text), delimiter=separator)
    try:
        rows = [(reader.line_num, [c.strip() for c in row]) for row in reader if any(row)]
    except csv.Error as error:
        raise UserError(
            f"{name}: line {reader.line_num} is no row of a table ({error}); correct it"
        ) from None
    if not rows:
        return _lines([], [])
    head = rows[0][1]
    has_head = all(isinstance(_number(cell), str) for cell in head)
    body = rows[1:] if has_head else rows
    names = head if has_head else [str(i) for i in range(1, len(head) + 1)]
    sample = body[0][1] if body else []
    numeric = [n for n, c in zip(names, sample, strict=False) if isinstance(_number(c), int)]
    at = names.index(_column(name, names, numeric, what="column"))
    for line, row in body:
        if len(row) <= at:
            raise UserError(f"{name}: line {line} has {len(row)} of {len(names)} columns")
    return _lines([line for line, _ in body], [_number(row[at]) for _, row in body])


def _column(name: str, columns: list[str], numeric: Iterable[str], *, what: str) -> str:
    """The column that holds lengths; UserError where that is not clear."""
    numeric = list(numeric)
    for known in NAMES:
        if columns.count(known) > 1:
            raise UserError(f"{name} has two {what}s {known!r}; rename the one of no lengths")
        if known in columns:
            return known
    if len(numeric) == 1:
        if columns.count(numeric[0]) > 1:
            raise UserError(f"{name} has two {what}s {numeric[0]!r}; rename the one of no lengths")
        return numeric[0]
    raise UserError(
        f"{name} has the {what}s {', '.join(columns)}, of which "
        f"{'none' if not numeric else ' and '.join(numeric)} may be lengths in tokens; call the "
        f"{what} of lengths {NAMES[0]!r}"
    )


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
