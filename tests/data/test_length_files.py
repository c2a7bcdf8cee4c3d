"""Tests files of lengths: formats, what is no length, and where the file has it."""

import io
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from wlb import Planner
from wlb.data import LengthSource, length_files, lengths_of_file
from wlb.data.length_files import NAMES
from wlb.plan import UserError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "3\n1\n\n  20 \n"),
        ("a.txt", "3\n1.0\n2e1"),
        ("a.json", "[3, 1, 20.0]"),
        ("noending", "3\n1\n20"),
        ("a.txt", "\ufeff3\r\n1\r\n20\r\n"),
        ("a.csv", "3\n1\n20\n"),
        ("a.csv", "length\n3\n1\n20\n"),
        ("a.csv", "id,num_tokens\na,3\nb,1\n\nc,20\n"),
        ("a.csv", "3,one\n1,two\n20,three\n"),
        ("a.tsv", "size\tname\n3\ta\n1\tb\n20\tc"),
        ("noending", "name;len\na;3\nb;1\nc;20"),
        ("a.jsonl", "3\n1\n\n20\n"),
        ("a.jsonl", '{"text": "a\\u2028b", "n": 3}\n{"n": 1}\n{"n": 20}\n'),
        ("a.txt", '{"id": 5, "length": 3}\n{"id": 6, "length": 1}\n{"length": 20}'),
    ],
)
def test_reads_text_and_json(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    source = lengths_of_file(tmp_path / name, source_id=7)
    assert source.lengths.tolist() == [3, 1, 20]
    assert (source.num_documents, source.num_tokens, source.source_id) == (3, 24, 7)
    assert source.lengths.dtype == np.int64
    assert not source.lengths.flags.writeable


@pytest.mark.parametrize("dtype", ["u1", "i4", ">i8", "f2", "f4"])
def test_reads_npy(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([3, 1, 20], dtype))
    assert lengths_of_file(tmp_path / "a.npy").lengths.tolist() == [3, 1, 20]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([3, 0], "length 1 is 0, but must be from 1"),
        ([3, -2, 0], "length 1 is -2, "),
        ([3, 1.5], "length 1 is 1.5, but must be a whole number"),
        ([3, float("nan")], "length 1 is nan, but must be a whole number"),
        ([3, float("inf")], "length 1 is inf, but must be a whole number"),
        ([3, 10**400], "length 1 is 1000.*, but must be a whole number"),
        ([3, 2**63 - 1], "length 1 is 9223372036854775807"),
        ([True], "length 0 is True, but must be a whole number"),
        (["3"], "length 0 is '3', but must be a whole number"),
        ([[3]], r"length 0 is \[3\], but must be a whole number"),
        ([None], "length 0 is None, but must be a whole number"),
        ([], "has no lengths; give the length of"),
        ({"lengths": [3]}, "must be a JSON list of lengths, but is of type dict"),
    ],
)
def test_json_that_holds_no_lengths_is_refused(tmp_path, values, message):
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as error:
        lengths_of_file(tmp_path / "a.json")
    assert "a.json" in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([3.0, np.nan]), "length 1 is nan, but must be a whole number"),
        (np.array([[3]]), r"an array of dtype int64 and shape \(1, 1\)"),
        (np.array(["3"]), "an array of dtype <U1"),
        (np.array([True]), "an array of dtype bool"),
        (np.array([2**64 - 1], np.uint64), "length 0 is 18446744073709551615"),
        (np.zeros(0, np.int64), "has no lengths"),
    ],
)
def test_npy_that_holds_no_lengths_is_refused(tmp_path, values, message):
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(ValueError, match=message):
        lengths_of_file(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.npy", b"no numpy", "is not a .npy array of integers"),
        ("a.npy", b"", "is not a .npy array of integers"),
        ("a.json", b"{", "is not JSON"),
        ("a.txt", b"3\n\nx4\n", "line 3: length is 'x4', but must be a whole number"),
        ("a.csv", b"id,length\n7,3\n8,0\n", "line 3: length is 0, but must be from 1"),
        (
            "a.csv",
            b'id,length\n"a\nb",3\n8,x\n',
            "line 4: length is 'x', but must be a whole number",
        ),
        ("a.csv", b"id,length\n7,3\n8\n", "line 3 has only 1 cells, but the first row has 2"),
        ("a.csv", b"a,b\n1,2\n", "columns a, b, and .* .columns of integers: a, b.; .* 'length'"),
        ("a.jsonl", b'{"num_tokens": 3}\n\n{"num_tokens": 2.5}\n', "line 3: length is 2.5"),
        ("a.jsonl", b'{"num_tokens": 3}\n{"text": 2}\n', "line 2 has no key 'num_tokens'"),
        ("a.jsonl", b'{"text": "a"}\n', "line 1 has the keys text, and .* .keys of integers: none"),
        ("a.jsonl", b"3\n{\n", "line 2 is not JSON"),
        ("a.parquet", b"3\n4\n", "a.parquet is not a Parquet file"),
        ("a.txt", b"\x1f\x8b123", r"compressed with gzip"),
        ("a.txt", b"1\n2\x00\n", "is neither UTF-8 text .byte 3 is zero"),
        ("a.txt", b"\n \n", "has no lengths"),
        (
            "a.txt",
            b"12\xff\xfe",
            "is neither UTF-8 text .byte 2 is not UTF-8. nor a file in the format .npy",
        ),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        lengths_of_file(tmp_path / name)


@pytest.mark.parametrize(
    "word",
    [
        *("1_000", "١٢", "１２", "²", "0x10", "1 000", "inf", "nan", "1e1_0", "12.5", "-5", "0"),
        *("3.00000000000000000001", "1e999999999", "1e30", "4611686018427387905", "9" * 5000),
    ],
)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "{}\n3\n"),
        ("a.csv", "{}\n3\n"),  # which is no name of a column
        ("a.csv", "{},a\n3,b\n"),
        ("a.tsv", "length\tid\n{}\ta\n"),
        ("noending", "id;len\na;{}"),
    ],
)
def test_a_length_in_text_is_ascii_digits_of_a_whole_number(tmp_path, name, text, word):
    (tmp_path / name).write_text(text.format(word), "utf-8")
    with pytest.raises(UserError):
        lengths_of_file(tmp_path / name)


@pytest.mark.parametrize("head", ["length,2nd", "2nd place,length", "1_000,num_tokens", "x,y2"])
def test_names_of_columns_may_begin_with_digits_beside_that_of_lengths(tmp_path, head):
    at = next((i for i, name in enumerate(head.split(",")) if name in NAMES), 1)
    row = ["a", "a"]
    row[at] = "12"
    (tmp_path / "a.csv").write_text(f"{head}\n{','.join(row)}\n")
    assert lengths_of_file(tmp_path / "a.csv").lengths.tolist() == [12]


@pytest.mark.parametrize(
    ("word", "length"),
    [
        *(("+5", 5), ("007", 7), ("12.", 12), ("12.0", 12), ("1e3", 1000), ("50e-1", 5)),
        *(("9007199254740993.0", 9007199254740993), ("4611686018427387904", 2**62)),
    ],
)
def test_a_length_in_text_is_read_exactly(tmp_path, word, length):
    (tmp_path / "a.txt").write_text(f" {word} \n3\n")
    assert lengths_of_file(tmp_path / "a.txt").lengths.tolist() == [length, 3]


@pytest.mark.parametrize("bad", [True, "3", None, 2.5, 2.0**53, -1, 2**62 + 1, [3]])
def test_all_readers_hold_lengths_to_one_rule(tmp_path, monkeypatch, bad):
    records = f'{{"length": 3}}\n{{"length": {json.dumps(bad)}}}'.encode()
    (tmp_path / "a.json").write_text(json.dumps([3, bad]))
    (tmp_path / "a.jsonl").write_bytes(records)
    monkeypatch.setattr(sys, "stdin", Piped(records))
    for source in (tmp_path / "a.json", tmp_path / "a.jsonl", "-"):
        with pytest.raises(UserError, match=r"whole number|must be from 1"):
            lengths_of_file(source)
    with pytest.raises(UserError, match=r"whole number|must be from 1"):
        LengthSource(name="given", lengths=[3, bad])
    if isinstance(bad, int | float):
        np.save(tmp_path / "a.npy", np.array([3, bad]) if bad is not True else np.array([True]))
        with pytest.raises(UserError, match=r"whole number|must be from 1|array of dtype bool"):
            lengths_of_file(tmp_path / "a.npy")
    with pytest.raises(UserError):
        Planner.for_lengths([3, bad], context_window=16, num_micro_batches=1)


def test_more_lengths_than_are_planned_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(length_files, "MOST_DOCUMENTS", 3)
    many = np.full(4, 7, np.uint8)
    np.save(tmp_path / "a.npy", many)
    np.savez_compressed(tmp_path / "a.npz", length=many)
    pq.write_table(pa.table({"n": many}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("7\n" * 4)
    (tmp_path / "a.csv").write_text("n\n" + "7\n" * 3)
    (tmp_path / "a.jsonl").write_text('{"n": 7}\n' * 4)
    (tmp_path / "a.json").write_text("[7, 7, 7, 7, 7]")
    unread = {"checked_lengths", "number_of", "parse_json"}
    for name in unread:
        monkeypatch.setattr(length_files, name, None)
    for ending in ("npy", "npz", "parquet", "txt", "csv", "jsonl", "json"):
        said = r"has 4 (lengths|lines|commas), but must have at most 3; give a random sample"
        with pytest.raises(UserError, match=said):
            lengths_of_file(tmp_path / f"a.{ending}")


def test_files_larger_than_are_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(length_files, "MOST_BYTES", 1000)
    (tmp_path / "a.txt").write_text("3\n" * 501)
    monkeypatch.setattr(sys, "stdin", Piped(b"3\n" * 501))
    for source in (tmp_path / "a.txt", "-"):
        with pytest.raises(UserError, match="may have at most 1,000 bytes; give a random sample"):
            lengths_of_file(source)
    np.savez_compressed(tmp_path / "a.npz", length=np.full(5000, 7, np.uint8))
    with pytest.raises(UserError, match="has 5128 bytes, but may have at most 1000"):
        lengths_of_file(tmp_path / "a.npz")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"the file of lengths .*a\.npy"):
        lengths_of_file(tmp_path / "a.npy")


@pytest.mark.parametrize("ending", [".npz", ".txt"])
def test_reads_npz_by_its_first_bytes(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    with path.open("wb") as file:
        np.savez(file, mask=np.ones(3), lengths=np.array([3, 1, 20], np.int32))
    assert lengths_of_file(path).lengths.tolist() == [3, 1, 20]
    with path.open("wb") as file:
        np.savez(file, a=np.ones(3), b=np.ones(3))
    with pytest.raises(ValueError, match=r"arrays a, b, and .*arrays of integers: none"):
        lengths_of_file(path)
    with path.open("wb") as file:
        np.savez(file, only=np.array([4, 0]))
    with pytest.raises(ValueError, match="entry 1 of array 'only' is 0"):
        lengths_of_file(path)


def test_reads_parquet(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "n": [3, 20]}), path)
    assert lengths_of_file(path).lengths.tolist() == [3, 20]
    pq.write_table(pa.table({"length": [3, None]}), path)
    with pytest.raises(ValueError, match="row 1 of column 'length' is None"):
        lengths_of_file(path)

    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(length_files, "import_module", absent)
    with pytest.raises(ValueError, match=r"the library pyarrow, .*pip install 'wlb-llm\[data\]'"):
        lengths_of_file(path)


class Piped:
    """Stands for standard input."""

    def __init__(self, data, *, is_terminal=False):
        self.buffer = io.BytesIO(data)
        self.isatty = lambda: is_terminal


def test_reads_standard_input(monkeypatch):
    stored = io.BytesIO()
    np.save(stored, np.array([3, 1]))
    for data in (b"3\n1\n", b"[3, 1]", b'{"length": 3}\n{"length": 1}', stored.getvalue()):
        monkeypatch.setattr(sys, "stdin", Piped(data))
        source = lengths_of_file("-")
        assert (source.name, source.lengths.tolist()) == ("standard input", [3, 1])
    monkeypatch.setattr(sys, "stdin", Piped(b"\x00\x01\x02"))
    with pytest.raises(ValueError, match="standard input is neither UTF-8 text"):
        lengths_of_file("-")
    monkeypatch.setattr(sys, "stdin", Piped(b"", is_terminal=True))
    with pytest.raises(ValueError, match="is a terminal; pipe lengths into the command"):
        lengths_of_file("-")
