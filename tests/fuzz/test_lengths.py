"""Fuzzes files of document lengths in every format, and reads back what any tool may write."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import Refused, damaged, fuzzed, misshapen, outcome
from wlb.data import lengths_of_file

SOME = [3, 1, 20, 4096, 7]


def _npy(lengths: list[int]) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(lengths, np.int64))
    return out.getvalue()


def _npz(lengths: list[int]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, lengths=np.array(lengths, np.int64), ids=np.arange(len(lengths)))
    return out.getvalue()


def _parquet(lengths: list[int]) -> bytes:
    out = io.BytesIO()
    ids = [str(i) for i in range(len(lengths))]
    pq.write_table(pa.table({"length": pa.array(lengths, pa.int64()), "id": ids}), out)
    return out.getvalue()


def _lines(lengths: list[int]) -> bytes:
    return "\n".join(map(str, lengths)).encode()


FORMATS: dict[str, Callable[[list[int]], bytes]] = {
    ".txt": _lines,
    "": lambda lengths: _lines(lengths) + b"\n",
    ".crlf": lambda lengths: _lines(lengths).replace(b"\n", b"\r\n") + b"\r\n",
    ".bom": lambda lengths: b"\xef\xbb\xbf" + _lines(lengths) + b"\n",
    ".blank": lambda lengths: b"\n" + _lines(lengths).replace(b"\n", b"\n\n") + b"\n\n",
    ".csv": lambda lengths: b"length\n" + _lines(lengths) + b"\n",
    ".head.csv": lambda lengths: (
        b"\xef\xbb\xbfid,length\r\n"
        + b"".join(b"d%d,%d\r\n" % (i, n) for i, n in enumerate(lengths))
    ),
    ".bare.csv": lambda lengths: _lines(lengths),
    ".quoted.csv": lambda lengths: (
        b'"name","tokens"\n' + b"".join(b'"a, b","%d"\n' % n for n in lengths)
    ),
    ".tsv": lambda lengths: b"text\tnum_tokens\n" + b"".join(b"x y\t%d\n" % n for n in lengths),
    ".json": lambda lengths: json.dumps(lengths).encode(),
    ".wide.json": lambda lengths: json.dumps(lengths, indent=4).encode() + b"\n",
    ".jsonl": lambda lengths: b"".join(b'{"id": 5, "length": %d}\n' % n for n in lengths),
    ".bare.jsonl": lambda lengths: _lines(lengths),
    ".npy": _npy,
    ".npz": _npz,
    ".parquet": _parquet,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lengths")


def read(folder: Path, suffix: str, data: bytes) -> Any:
    path = folder / f"a{suffix}"
    path.write_bytes(data)
    return outcome(lambda: lengths_of_file(path).lengths.tolist())


@pytest.mark.parametrize("suffix", FORMATS)
@fuzzed(0.1, nightly=1000)
@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=30))
def test_lengths_read_back_as_they_were_written(
    folder: Path, suffix: str, lengths: list[int]
) -> None:
    assert read(folder, suffix, FORMATS[suffix](lengths)) == lengths


@pytest.mark.parametrize("suffix", FORMATS)
@fuzzed(0.2, nightly=2000)
@given(st.data())
def test_damaged_lengths_are_lengths_or_refused(
    folder: Path, suffix: str, data: st.DataObject
) -> None:
    made = read(folder, suffix, data.draw(damaged(FORMATS[suffix](SOME))))
    assert isinstance(made, Refused) or (made and all(1 <= n <= 2**62 for n in made))


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
@fuzzed(0.3, nightly=5000)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_under_a_checksum_changes_nothing(
    folder: Path, suffix: str, at: int, bit: int
) -> None:
    """An .npz file has checksums of its arrays; Parquet's page checksums are not written by all."""
    data = bytearray(FORMATS[suffix](SOME))
    data[at % len(data)] ^= 1 << bit
    made = read(folder, suffix, bytes(data))
    if suffix == ".npz":
        assert isinstance(made, Refused) or made in (SOME, list(range(len(SOME))))


@fuzzed(0.5)
@given(st.data())
def test_misshapen_json_is_lengths_or_refused(folder: Path, data: st.DataObject) -> None:
    suffix = data.draw(st.sampled_from([".json", ".jsonl", ".txt"]))
    text = data.draw(misshapen(data.draw(st.sampled_from([SOME, {"length": 3, "id": 5}]))))
    made = read(folder, suffix, text.encode("utf-8", "surrogatepass"))
    assert isinstance(made, Refused) or all(1 <= n <= 2**62 for n in made)


def _header(shape: str, dtype: str = "<i8") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".npy", _header("(1000000000000,)")),
        (".npy", _header("(10000000000000000000000000000000,)")),
        (".npy", _header("(-1,)")),
        (".npy", _header("(3,)", "|O") + b"x" * 24),
        (".npy", _header("(" * 300)),
        (".json", b"[" * 100_000),
        (".jsonl", b'{"a":' * 100_000),
        (".json", b"[" + b"9" * 10_000 + b"]"),
        (".csv", b'length,x\n3,"' + b"x" * 200_000 + b'"\n'),
        (".csv", b"length,length\n1,2\n"),
        (".csv", b"n,n\n1,2\n"),
        (".txt", b"9" * 10_000),
        (".parquet", b"PAR1" + b"\xff" * 100 + b"PAR1"),
        (".npz", b"PK\x03\x04" + b"\x00" * 100),
    ],
)
def test_what_claims_more_than_it_has_is_refused(folder: Path, suffix: str, data: bytes) -> None:
    assert isinstance(read(folder, suffix, data), Refused)


def test_two_columns_of_one_name_are_refused(folder: Path) -> None:
    out = io.BytesIO()
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["length", "length"])
    pq.write_table(table, out)
    made = read(folder, ".parquet", out.getvalue())
    assert isinstance(made, Refused)
    assert "two columns 'length'" in made.message
