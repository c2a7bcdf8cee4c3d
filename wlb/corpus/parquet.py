"""Parquet files as records, some rows at a time.

pyarrow (extra `[data]`) is imported where a Parquet file is met. Strings are taken as bytes and
decoded here, because a string column may hold invalid UTF-8.
Cost: memory of one batch of rows, and of the compressed pages that they lie in.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

_PARQUET_ROWS = 256
_BUFFER_BYTES = 1 << 20


def _pyarrow(module: str = "") -> Any:
    return import_module(f"pyarrow{module}")  # untyped, hence not a statement


def open_parquet(path: str) -> Any:
    """`pyarrow.parquet.ParquetFile`; ValueError without pyarrow or for what is no Parquet file."""
    try:
        pa, pq = _pyarrow(), _pyarrow(".parquet")
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, which is not installed; pip install 'wlb-llm[data]'"
        ) from None
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file or is corrupt ({error})") from None


def row_groups(path: str, *, shard_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first, stop, bytes) of runs of row groups of about `shard_bytes` uncompressed bytes each."""
    metadata = open_parquet(path).metadata
    first, size = 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= shard_bytes or group == metadata.num_row_groups - 1:
            yield first, group + 1, size
            first, size = group + 1, 0


def parquet_records(
    path: str, *, groups: range, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row in the file, values of `columns`) of the rows of row groups; text as bytes."""
    pa = _pyarrow()
    file = open_parquet(path)
    row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
    try:
        for batch in file.iter_batches(
            batch_size=_PARQUET_ROWS, row_groups=list(groups), columns=list(columns)
        ):
            values = [_values(batch.column(batch.schema.names.index(name))) for name in columns]
            for items in zip(*values, strict=True):
                yield row, dict(zip(columns, items, strict=True))
                row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is corrupt near row {row} ({error}); get it again") from None


def _values(column: Any) -> list[Any]:
    pa = _pyarrow()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return column.to_pylist()
