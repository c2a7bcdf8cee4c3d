"""Read the rows of Parquet files as records, one batch of rows at a time.

pyarrow is imported only when a Parquet file is read. Strings are returned as bytes, also inside
lists and structs: a column may contain invalid UTF-8, and then only that row must be refused.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

from wlb.plan import UserError
from wlb.plan.read_file import WRONG_SHAPE, describe_error

Columns = Callable[[Sequence[str]], tuple[str, ...]]
"""Chooses which of a table's columns to read; raises UserError if it lacks one."""

_PARQUET_ROWS = 256
_BUFFER_BYTES = 1 << 20


def _pyarrow(module: str = "") -> Any:
    # Import by name, which pyright does not follow, because pyarrow has no type annotations.
    return import_module(f"pyarrow{module}")


def open_parquet(path: str) -> Any:
    """Open a file as a `pyarrow.parquet.ParquetFile`.

    Raises:
        UserError: pyarrow is missing, or the file is damaged or not Parquet.
    """
    try:
        pa, pq = _pyarrow(), _pyarrow(".parquet")
    except ModuleNotFoundError:
        raise UserError(
            f"{path} is a Parquet file, but the library pyarrow, which reads Parquet, is not "
            f"installed; run pip install 'wlb-llm[data]'"
        ) from None
    try:
        file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        _check_footer(file)
        return file
    # WRONG_SHAPE includes the errors that invalid UTF-8 in a damaged footer's column names causes.
    except (pa.ArrowException, *WRONG_SHAPE, OSError) as error:
        raise UserError(
            f"{path} is not a Parquet file, or is damaged ({describe_error(error)}); download or "
            f"write the file again"
        ) from None


def _check_footer(file: Any) -> None:
    """Raise ValueError if the footer of an open Parquet file is damaged.

    It is damaged if the numbers of rows of the row groups do not add up to that of the file (rows
    would be lost), if a number or size is negative, or if the name of a column is not text.
    """
    names, metadata = file.schema_arrow.names, file.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows = [group.num_rows for group in groups]
    sizes = [group.total_byte_size for group in groups]
    if min(*rows, *sizes, 0, 0) < 0 or sum(rows) != metadata.num_rows:
        raise ValueError(
            f"the file has {metadata.num_rows} rows, but its row groups have {sum(rows)}"
        )
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"the names of the columns must be text, but are {names}")


def columns_of(file: Any, columns: Columns) -> tuple[str, ...]:
    """Return the names of the columns to read from an open Parquet file.

    Args:
        file: The file.
        columns: Returns which columns to read, given the names of all columns.

    Raises:
        UserError: A column is absent or exists twice. The caller puts the path in front of the
            message.
    """
    names: list[str] = file.schema_arrow.names
    chosen = columns(names)
    if twice := next((name for name in chosen if names.count(name) > 1), None):
        raise UserError(
            f"has {names.count(twice)} columns named {twice!r}; rename all of them except the one "
            f"to read"
        )
    return chosen


def group_sizes(path: str) -> list[int]:
    """Return the uncompressed size in bytes of each row group of a file."""
    metadata = open_parquet(path).metadata
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def parquet_records(
    path: str, *, groups: range, columns: Columns
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of some row groups as records.

    Args:
        path: The file.
        groups: Numbers of the row groups.
        columns: Returns which columns to read, given the names of all columns.

    Yields:
        The number of the row in the file, and its values by column. Strings are bytes.
    """
    pa = _pyarrow()
    file = open_parquet(path)
    begins = [0, *accumulate(file.metadata.row_group(i).num_rows for i in range(groups.stop))]
    row = begins[groups.start]
    try:
        names = columns_of(file, columns)
        chosen: dict[str, Any] = {"row_groups": list(groups), "columns": list(names)}
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, **chosen):
            values = [_values(batch.column(batch.schema.names.index(name))) for name in names]
            for items in zip(*values, strict=True):
                yield row, dict(zip(names, items, strict=True))
                row += 1
        if row != begins[groups.stop]:
            raise ValueError(f"there must be {begins[groups.stop]} rows up to here")
    except (pa.ArrowException, *WRONG_SHAPE, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} is damaged near row {row} ({describe_error(error)}); download or write the "
            f"file again"
        ) from None


def _values(column: Any) -> list[Any]:
    pa = _pyarrow()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = _with_bytes(column.type)
    return (column if kind == column.type else column.cast(kind)).to_pylist()


def _with_bytes(kind: Any) -> Any:
    """Return a pyarrow type with bytes in place of strings, also inside lists and structs."""
    pa = _pyarrow()
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_field.with_type(_with_bytes(kind.value_type))
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    if pa.types.is_struct(kind):
        inner = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in inner])
    return kind
