"""Tests reading inputs: every record once for any shards, positions in messages, refusals."""

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.prepare import BadRecord, TextUnit, json_list, records
from wlb.prepare.encode import TextChoice
from wlb.prepare.records import check_columns, list_inputs, list_shards, read_shard

LINES = st.lists(
    st.binary(max_size=12).filter(lambda line: b"\n" not in line and b"\r" not in line), min_size=1
)


COLUMNS = TextChoice().columns


def read(*paths, shard_bytes=1 << 20, columns=COLUMNS, **options):
    files, skipped, _ = list_inputs([str(path) for path in paths], **options)
    shards = list_shards(files, shard_bytes=shard_bytes)
    out = [r for s in shards for r in read_shard(s, text_key="text", columns=columns)]
    return out, dict(skipped), shards


def texts(items):
    return [str(item.reason) if isinstance(item, BadRecord) else item["text"] for _, item in items]


def write_lines(path, *values):
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


@given(lines=LINES, shard_bytes=st.integers(1, 40), ends=st.booleans())
def test_every_line_is_in_one_shard(tmp_path_factory, lines, shard_bytes, ends):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    path.write_bytes(data)
    if not data:
        return
    files, *_ = list_inputs([str(path)], text_unit=TextUnit.LINE)
    shards = list_shards(files, shard_bytes=shard_bytes)
    assert sum(shard.size for shard in shards) == len(data)
    found = [r for s in shards for r in read_shard(s, text_key="t", columns=COLUMNS)]
    reference = data.decode("latin-1").split("\n")
    if reference[-1] == "":
        reference.pop()
    offsets, at = [], 0
    for line in reference:
        offsets.append(at)
        at += len(line) + 1
    assert [position.offset for position, _ in found] == offsets
    for (_, item), line in zip(found, reference, strict=True):
        raw = line.encode("latin-1")
        if offsets[0] == 0 and raw.startswith(b"\xef\xbb\xbf"):
            continue
        if isinstance(item, BadRecord):
            assert str(item.reason) in ("blank_line", "not_utf8")
            assert not raw.strip() or raw.decode("utf-8", "ignore").encode() != raw
        else:
            assert item["t"].encode() == raw


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    """This holds for lines and JSONL alike."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\xef\xbb\xbf")
    found, _, _ = read(path)
    assert texts(found) == ["hello\ufeff"]


def test_jsonl_positions_and_reasons(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n'
        b"\n"
        b'{"text": "two"\n'
        b'["text"]\n'
        b'{"text": "\xff"}\n'
        b'{"text": ' + b"[" * 100000 + b"\n"
        b'{"text": "three"}'
    )
    found, skipped, _ = read(path, shard_bytes=7)
    assert texts(found) == [
        "one",
        "blank_line",
        "not_json",
        "not_an_object",
        "not_utf8",
        "not_json",
        "three",
    ]
    assert skipped == {}
    where = [position.describe() for position, _ in found]
    assert where == [f"{path}, line {number}" for number in range(1, 8)]
    assert "not JSON: Expecting ',' delimiter at character 14" in str(found[2][1])
    assert "0xff" in str(found[4][1])


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_files(tmp_path, suffix, pack):
    plain = write_lines(tmp_path / "a.jsonl", *(f"text {i}" * 50 for i in range(100)))
    packed = tmp_path / f"b.jsonl{suffix}"
    packed.write_bytes(pack(plain.read_bytes()))
    found, _, shards = read(packed, shard_bytes=10)
    assert len(shards) == 1
    assert texts(found) == texts(read(plain)[0])
    assert found[7][0].describe() == f"{packed}, line 8"
    (tmp_path / f"one.txt{suffix}").write_bytes(pack(b"whole\ntext"))
    assert texts(read(tmp_path / f"one.txt{suffix}")[0]) == ["whole\ntext"]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"b\.jsonl.* cannot be read to its end .*truncated"):
        read(packed)


def write_table(path, *, values, row_group_size=10, name="text", kind=None):
    table = pa.table({"other": list(range(len(values))), name: pa.array(values, kind)})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_rows_by_row_group(tmp_path, kind):
    values = [f"row {i}" for i in range(95)]
    path = write_table(tmp_path / "a.parquet", values=values, kind=kind)
    for shard_bytes, num in ((1, 10), (1 << 20, 1)):
        found, _, shards = read(path, shard_bytes=shard_bytes)
        assert len(shards) == num
        assert [item["text"].decode() for _, item in found] == values
        assert [position.offset for position, _ in found] == list(range(95))
        assert set(found[0][1]) == {"text"}  # other columns are not read
    assert found[40][0].describe() == f"{path}, row 40"
    assert found[40][0].name == "a.parquet:40"


def test_parquet_strings_that_are_not_utf8_come_as_bytes(tmp_path):
    broken = pa.array([b"good", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    found, _, _ = read(tmp_path / "a.parquet")
    assert [item["text"] for _, item in found] == [b"good", b"\xff"]


def test_parquet_strings_inside_lists_and_structs_come_as_bytes_too(tmp_path):
    message = pa.struct([("role", pa.string()), ("weight", pa.int64())])
    rows = [[{"role": "é", "weight": None}], None, [None, {"role": None, "weight": 0}]]
    expected = [[{"role": "é".encode(), "weight": None}], None, [None, {"role": None, "weight": 0}]]
    for kind in (pa.list_(message), pa.large_list(message)):
        pq.write_table(pa.table({"m": pa.array(rows, kind)}), tmp_path / "a.parquet")
        found, _, _ = read(tmp_path / "a.parquet", columns=lambda names: ("m",))
        assert [item["m"] for _, item in found] == expected
    bad = pa.array([b"\xff"], pa.binary()).view(pa.string())
    nested = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), bad)
    pq.write_table(pa.table({"m": nested}), tmp_path / "a.parquet")
    found, _, _ = read(tmp_path / "a.parquet", columns=lambda names: ("m",))
    assert found[0][1] == {"m": [b"\xff"]}


def test_parquet_refusals(tmp_path):
    path = write_table(tmp_path / "a.parquet", values=["x"], name="body")
    files, *_ = list_inputs([str(path)])
    with pytest.raises(ValueError, match=r"no column 'text', but the columns other, body"):
        check_columns(files, COLUMNS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file, or is damaged"):
        read(path)


def test_a_folder_is_read_recursively_with_every_kind_of_records(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "deep" / "b.json").write_text('[{"text": "item"}]')
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("x")
    write_lines(tmp_path / "sub" / "c.jsonl", "line 1", "line 2")
    write_table(tmp_path / "z.parquet", values=["row"])
    found, skipped, _ = read(tmp_path)
    assert [text if isinstance(text, str) else text.decode() for text in texts(found)] == [
        "line 1",
        "line 2",
        "item",
        "row",
    ]
    assert [p.name for p, _ in found][:3:2] == ["sub/c.jsonl:0", "sub/deep/b.json:0"]
    assert skipped == {"empty": 1, "hidden": 1}


def test_text_beside_records_is_refused_not_trained(tmp_path):
    """The card and the configuration of a data set lie beside its records."""
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("# A data set")
    (tmp_path / "empty.md").touch()
    (tmp_path / "about.json").write_text('{"default": {}}')
    write_lines(tmp_path / "data" / "a.jsonl", "line")
    message = (
        r"has 2 files of records, such as data/a\.jsonl, and 1 files that .* as README\.md, so .*; "
    )
    with pytest.raises(ValueError, match=message + r".*'.*/\*\*/\*\.jsonl'"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"has 2 files of records, such as a\.jsonl"):
        read(f"{tmp_path}/**")
    assert texts(read(f"{tmp_path}/**/*.jsonl")[0]) == ["line"]
    named, _, _ = read(tmp_path / "data", f"{tmp_path}/*.md")
    assert texts(named) == ["line", "# A data set"]


@pytest.mark.parametrize("blanks", ["", "\ufeff", " \n\t"])
@pytest.mark.parametrize(("indent", "pack"), [(None, None), (1, None), (None, gzip.compress)])
def test_a_json_list_gives_its_items(tmp_path, blanks, indent, pack):
    items = [{"text": f'é {i} [{{"\\', "n": [i]} for i in range(50)]
    path = tmp_path / ("a.json.gz" if pack else "a.json")
    data = (blanks + json.dumps([*items, 7, {"text": "last"}], indent=indent) + "\n").encode()
    path.write_bytes(pack(data) if pack else data)
    found, _, shards = read(path, shard_bytes=10)
    assert len(shards) == 1
    assert [item for _, item in found[:50]] == items
    assert texts(found[50:]) == ["not_an_object", "last"]
    assert found[50][0].describe() == f"{path}, record 50"
    assert found[50][0].name == f"{path.name}:50"


def test_items_of_every_kind():
    items = ["é\n\U0001f600", -1.5e10, 1234567, True, None, {"a": [{}, "]"]}, [], "\\"]
    for text in (json.dumps(items), json.dumps(items, ensure_ascii=False, indent=2)):
        assert list(json_list.list_items(io.BytesIO(text.encode()), most=200)) == items
    assert list(json_list.list_items(io.BytesIO(b" [ ] "), most=100)) == []


def test_json_lines_named_json_are_lines(tmp_path):
    path = write_lines(tmp_path / "a.json", "one", "two")
    found, _, _ = read(path, shard_bytes=4)
    assert texts(found) == ["one", "two"]
    assert found[1][0].describe() == f"{path}, line 2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{\n "data": []\n}',
            r"a\.json must be a JSON list .* or have one JSON object in each line; .*jq",
        ),
        (b"words", "must be a JSON list of records"),
        (b" \n", "must be a JSON list of records"),
        (b'[{"text": "a"}, {"text" "b"}]', "record 1 cannot be read: Expecting ':'"),
        (b'[{"text": "a"}', "record 0 must be followed by a comma or by ], but is not"),
        (b'[{"text": "a"}, ', "record 1 cannot be read: Expecting value"),
        (b'[{"text": "a"},]', "record 1 cannot be read: Expecting value"),
        (b'[{"text": "a', "record 0 cannot be read: Unterminated string"),
        (b'["a"]\n["b"]\n', "there is text after the end of the list of 1 records"),
        (b'[{"text": "\xff"}]', "the file is not UTF-8, because of byte 11"),
        (b"[" * 100_000, "record 0 cannot be read: maximum recursion"),
        (b"[1" + b"0" * 9000 + b"]", "record 0 cannot be read: Exceeds the limit"),
        (b"[" + b" " * 110_000 + b"]", "a JSON list must have at most 100001 bytes, .*JSON Lines"),
    ],
)
def test_json_that_holds_no_records_is_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(records, "_MOST_LIST_BYTES", 100_001)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.json")


def test_patterns_and_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write_lines(tmp_path / name, name)
    assert texts(read(tmp_path / "*.jsonl")[0]) == ["a.jsonl", "b.jsonl"]
    in_order = read(tmp_path / "b.jsonl", tmp_path / "a.jsonl")[0]
    assert texts(in_order) == ["b.jsonl", "a.jsonl"]
    (tmp_path / "[odd].txt").write_text("odd")  # a file that is there is no pattern
    assert texts(read(tmp_path / "[odd].txt")[0]) == ["odd"]


def test_text_files_are_grouped(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}").write_text("12345")
    _, _, shards = read(tmp_path, shard_bytes=12)
    assert [len(shard.files) for shard in shards] == [3, 3, 3, 1]
    assert [shard.size for shard in shards] == [15, 15, 15, 5]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["missing.txt"], r"the input .*missing\.txt cannot be read: No such file"),
        (["d.txt.old"], r"the input .*d\.txt\.old cannot be read: a link to gone, which does not"),
        (
            ["*.old"],
            r"\*\.old has no file to read .*not read: .*d\.txt\.old \(a link to gone, which",
        ),
        (
            ["folder"],
            r"folder has no file to read \(skipped files: none\); give files, or folders or pat",
        ),
        (["*.nothing"], r"no file matches '.*\*\.nothing'"),
        (["a.txt", "a.txt"], r"name .*a\.txt twice.*data\.blend"),
        (["a.txt", "*.txt"], r"name .*a\.txt twice"),
        (["b.zst"], r"b\.zst: wlb cannot read \.zst files; unpack the file, or compress"),
        (["c.parquet.gz"], "is a Parquet file that was compressed as a whole, which wlb cannot"),
        (["circle"], "the input .*circle cannot be read: Too many levels of symbolic links"),
    ],
)
def test_refuses(tmp_path, names, message):
    for name in ("a.txt", "b.zst", "c.parquet.gz"):
        (tmp_path / name).write_text("x")
    (tmp_path / "d.txt.old").symlink_to("gone")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        list_inputs([str(tmp_path / name) for name in names])


def test_two_parquet_columns_of_the_name_that_is_read_are_refused(tmp_path):
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"]), pa.array([1, 2])]
    for names in (["text", "text", "n"], ["text", "n", "n"]):
        pq.write_table(pa.table(columns, names=names), tmp_path / "a.parquet")
        files, *_ = records.list_inputs([str(tmp_path / "a.parquet")])
        if names.count("text") == 1:
            records.check_columns(files, lambda names: ("text",))
            continue
        with pytest.raises(ValueError, match=r"a\.parquet has 2 columns named 'text'; rename all"):
            records.check_columns(files, lambda names: ("text",))
        with pytest.raises(ValueError, match="has 2 columns named 'text'; rename all"):
            read(tmp_path / "a.parquet")


def test_a_parquet_footer_whose_counts_lose_rows_is_refused(tmp_path):
    """The last row group is said to have another number of rows, in one bit."""
    values = pa.array([f"text {i}" for i in range(600)])
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet", row_group_size=100)
    whole = (tmp_path / "a.parquet").read_bytes()
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(begin, len(whole) - 8):
        changed = bytearray(whole)
        changed[at] ^= 4
        (tmp_path / "a.parquet").write_bytes(changed)
        try:
            found, _, _ = read(tmp_path / "a.parquet")
        except ValueError:
            continue
        assert len(found) == 600


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = write_table(tmp_path / "a.parquet", values=["x"])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'wlb-llm\[data\]'"):
        read(path)


def test_a_file_that_is_gone_is_a_bad_record(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    files, *_ = list_inputs([str(tmp_path)])
    Path(tmp_path / "a.txt").unlink()
    (shard,) = list_shards(files, shard_bytes=9)
    ((_, item),) = read_shard(shard, text_key="text", columns=COLUMNS)
    assert isinstance(item, BadRecord)
    assert str(item.reason) == "unreadable"


def test_blanks_without_end_are_refused(tmp_path, monkeypatch):
    """A compressed file of megabytes holds gigabytes of them."""
    monkeypatch.setattr(records, "_MOST_BLANK", 3)
    (tmp_path / "a.jsonl").write_text('\n\n\n{"text": "a"}\n\n\n\n{"text": "b"}\n')
    found, _, _ = read(tmp_path / "a.jsonl")
    assert [r["text"] for _, r in found if not isinstance(r, BadRecord)] == ["a", "b"]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n\n\n\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="more than 3 consecutive blank lines before byte 17"):
        read(tmp_path / "a.jsonl")
