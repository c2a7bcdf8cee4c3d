"""Tests token stores: bytes on disk, stores that Megatron wrote, damage, crashes while writing."""

import json
import os
import pickle
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.data import BlendedStore, TokenStore, TokenStoreWriter, verify_store
from wlb.data import store as store_module
from wlb.plan import UserError

IDX = (
    b"MMIDIDX\x00\x00"  # magic
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version 1
    b"\x08"  # uint16
    b"\x02\x00\x00\x00\x00\x00\x00\x00"  # 2 sequences
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # 3 document indices
    b"\x03\x00\x00\x00"  # lengths 3, 1
    b"\x01\x00\x00\x00"
    b"\x00\x00\x00\x00\x00\x00\x00\x00"  # byte offsets 0, 6
    b"\x06\x00\x00\x00\x00\x00\x00\x00"
    b"\x00\x00\x00\x00\x00\x00\x00\x00"  # documents start at sequence 0, 1; 2 sequences
    b"\x01\x00\x00\x00\x00\x00\x00\x00"
    b"\x02\x00\x00\x00\x00\x00\x00\x00"
)
BIN = b"\x05\x00\x01\x02\xff\xff\x07\x00"  # [5, 513, 65535], [7]


def write(prefix, documents, **options):
    options.setdefault("vocab_size", 1 << 16)
    with TokenStoreWriter(prefix, **options) as writer:
        for document in documents:
            writer.add(document)
    return TokenStore(prefix)


def raw_store(folder: Path, *, idx: bytes = IDX, tokens: bytes = BIN) -> Path:
    (folder / "s.idx").write_bytes(idx)
    (folder / "s.bin").write_bytes(tokens)
    return folder / "s"


def index_bytes(lengths, offsets, documents, *, code=8, version=1, counts=None):
    num_sequences, num_indices = counts or (len(lengths), len(documents))
    return (
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, num_sequences, num_indices)
        + np.array(lengths, "<i4").tobytes()
        + np.array(offsets, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )


def test_writes_the_bytes_of_megatron(tmp_path):
    write(tmp_path / "s", [[5, 513, 65535], [7]])
    assert (tmp_path / "s.idx").read_bytes() == IDX
    assert (tmp_path / "s.bin").read_bytes() == BIN


def test_reads_the_bytes_of_megatron(tmp_path):
    store = TokenStore(raw_store(tmp_path))
    assert store.lengths.tolist() == [3, 1]
    assert store.read(0).tolist() == [5, 513, 65535]
    assert store.read(0, 1, 2).tolist() == [513]
    assert store.read(1).tolist() == [7]
    assert store.read(1, 1, 1).tolist() == []
    assert (store.num_documents, store.num_tokens, store.dtype) == (2, 4, np.dtype("<u2"))
    assert store.vocab_size is None
    assert store.eos_id is None


def test_document_of_several_sequences_reads_as_one(tmp_path):
    idx = index_bytes([1, 2, 1], [0, 2, 6], [0, 2, 3])
    store = TokenStore(raw_store(tmp_path, idx=idx))
    assert store.lengths.tolist() == [3, 1]
    assert [store.read(0).tolist(), store.read(1).tolist()] == [[5, 513, 65535], [7]]


def test_documents_without_tokens_are_left_out_and_counted(tmp_path):
    # sequence 1 is empty; document 0 has no sequence, document 2 only the empty one
    idx = index_bytes([3, 0, 1], [0, 6, 6], [0, 0, 1, 2, 3])
    store = TokenStore(raw_store(tmp_path, idx=idx))
    assert store.lengths.tolist() == [3, 1]
    assert store.num_empty_documents == 2
    assert store.summary == "2 documents, 4 tokens, 2 empty documents left out"
    assert store.summary in repr(store)
    assert BlendedStore([store, store], [1, 1]).summary.endswith("4 empty documents left out")
    assert [store.read(0).tolist(), store.read(1).tolist()] == [[5, 513, 65535], [7]]


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
def test_dtype_codes(tmp_path, code, dtype):
    tokens = np.array([1, 2, 100], dtype)
    idx = index_bytes([1, 2], [0, tokens.itemsize], [0, 1, 2], code=code)
    store = TokenStore(raw_store(tmp_path, idx=idx, tokens=tokens.tobytes()))
    assert store.dtype == np.dtype(dtype)
    assert store.read(1).tolist() == [2, 100]


@pytest.mark.parametrize(("code", "dtype"), [(6, "<f8"), (7, "<f4")])
def test_tokens_that_are_no_integers_are_refused(tmp_path, code, dtype):
    tokens = np.array([1, 2, 100], dtype)
    idx = index_bytes([1, 2], [0, tokens.itemsize], [0, 1, 2], code=code)
    with pytest.raises(UserError, match="tokens must be integers"):
        TokenStore(raw_store(tmp_path, idx=idx, tokens=tokens.tobytes()))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<i4"), (300, "<u2"), (1 << 31, "<i4")]
)
def test_dtype_holds_the_largest_id(tmp_path, vocab_size, dtype):
    store = write(tmp_path / "s", [[vocab_size - 1, 0]], vocab_size=vocab_size)
    assert store.dtype == np.dtype(dtype)
    assert store.read(0).tolist() == [vocab_size - 1, 0]


@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=9), max_size=9),
    vocab_size=st.sampled_from([65_536, 70_000]),
)
def test_round_trip(tmp_path_factory, documents, vocab_size):
    documents = [[token % vocab_size for token in document] for document in documents]
    store = write(tmp_path_factory.mktemp("s") / "s", documents, vocab_size=vocab_size)
    assert [store.read(i).tolist() for i in range(store.num_documents)] == documents
    assert store.lengths.tolist() == [len(document) for document in documents]
    verify_store(store.prefix)


def test_reads_copy_nothing_and_cannot_write(tmp_path):
    store = write(tmp_path / "s", [[1, 2, 3], [4]])
    assert np.shares_memory(store.read(0), store.read(0, 1))
    with pytest.raises(ValueError, match="read-only"):
        store.read(0)[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        store.lengths[0] = 9


def test_pickle_holds_no_tokens(tmp_path):
    store = write(tmp_path / "s", [[1] * 100_000])
    store = TokenStore(tmp_path / "s", source_id=3)
    data = pickle.dumps(store)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert (again.prefix, again.source_id) == (store.prefix, 3)
    assert np.array_equal(again.read(0), store.read(0))


def test_prefix_may_contain_dots(tmp_path):
    assert write(tmp_path / "v1.5-train", [[1]]).read(0).tolist() == [1]
    (tmp_path / "v1.5-train.bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"v1\.5-train\.bin has 0 bytes, but must have 2 according"
    ):
        TokenStore(tmp_path / "v1.5-train")


def test_an_empty_store_opens(tmp_path):
    store = write(tmp_path / "s", [])
    assert (store.num_documents, store.num_tokens) == (0, 0)
    verify_store(store.prefix)


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (b"", "not the index of a token store"),
        (b"PK\x03\x04" + IDX[4:], "not the index of a token store"),
        (
            index_bytes([3, 1], [0, 6], [0, 1, 2], version=2),
            "version 2, but wlb reads only version 1",
        ),
        (index_bytes([3, 1], [0, 6], [0, 1, 2], code=9), "has dtype code 9, but must have"),
        (IDX[:-1], "has 81 bytes, but .* 2 sequences and 3 document indices must have 82 bytes"),
        (
            IDX + b"\0\0",
            "has 84 bytes, but .* 2 sequences and 3 document indices must have 82 bytes",
        ),
        (index_bytes([3, 1], [0, 6], [0, 1, 2], counts=(2**62, 3)), "4611686018427387904 seq"),
        (index_bytes([3, -1], [0, 6], [0, 1, 2]), "the length of sequence 1 is -1"),
        (
            index_bytes([3, 1], [0, 4], [0, 1, 2]),
            "sequence 1 starts at byte 4, but must start at byte 6",
        ),
        (
            index_bytes([3, 1], [2, 8], [0, 1, 2]),
            "sequence 0 starts at byte 2, but must start at byte 0",
        ),
        (index_bytes([3, 2], [0, 6], [0, 1, 2]), "has 8 bytes, but must have 10 according to"),
        (
            index_bytes([3, 1], [0, 6], [0, 1]),
            "document indices are 0 ... 1, but the first must be 0",
        ),
        (
            index_bytes([3, 1], [0, 6], [1, 1, 2]),
            "document indices are 1 ... 2, but the first must be 0",
        ),
        (index_bytes([3, 1], [0, 6], []), "document indices are none, but the first must be 0"),
        (
            index_bytes([3, 1], [0, 6], [0, 5, 2]),
            "document 1 starts at sequence 5, but document 2 starts",
        ),
    ],
)
def test_damaged_index_is_refused(tmp_path, idx, message):
    with pytest.raises(ValueError, match=message) as error:
        TokenStore(raw_store(tmp_path, idx=idx))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("tokens", [BIN[:-1], BIN[:-2], BIN + b"\0\0", b""])
def test_bin_of_the_wrong_size_is_refused(tmp_path, tokens):
    with pytest.raises(ValueError, match=f"has {len(tokens)} bytes, but must have 8 according"):
        TokenStore(raw_store(tmp_path, tokens=tokens))


def test_missing_store_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no token store at .*nothing: .*nothing\.bin is missing"):
        TokenStore(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ((2,), "document 2 is not in"),
        ((-1,), "document -1 is not in"),
        ((0, 0, 4), r"tokens \[0, 4\) are outside document 0"),
        ((0, -1, 2), r"tokens \[-1, 2\) are outside"),
        ((0, 2, 1), r"tokens \[2, 1\) are outside"),
    ],
)
def test_reads_stay_inside_their_document(tmp_path, read, message):
    store = TokenStore(raw_store(tmp_path))
    with pytest.raises(ValueError, match=message):
        store.read(*read)


def test_sidecar(tmp_path):
    store = write(
        tmp_path / "s", [[1, 2], [3]], vocab_size=300, eos_id=0, tokenizer="t.json", source="mine"
    )
    described = json.loads((tmp_path / "s.json").read_text())
    assert len(described.pop("checksum")) == 64
    assert described == {
        "vocab_size": 300,
        "num_documents": 2,
        "num_tokens": 3,
        "eos_id": 0,
        "tokenizer": "t.json",
        "source": "mine",
        "preparation": {},
    }
    assert (store.vocab_size, store.eos_id) == (300, 0)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"vocab_size": 300}'])
def test_unusable_sidecar_is_refused(tmp_path, text):
    write(tmp_path / "s", [[1]])
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=r"s\.json is not the description of a token store"):
        TokenStore(tmp_path / "s")


def test_sidecar_of_another_store_is_refused(tmp_path):
    write(tmp_path / "s", [[1]])
    write(tmp_path / "other", [[1, 2]])
    os.replace(tmp_path / "other.json", tmp_path / "s.json")
    with pytest.raises(ValueError, match=r"describes 2 tokens, .* has 1"):
        TokenStore(tmp_path / "s")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_documents", 2, "describes 2 documents, .* has 1"),
        ("eos_id", 300, "eos_id = 300 must be"),
        ("eos_id", -1, "eos_id = -1 must be"),
    ],
)
def test_a_description_that_is_wrong_is_refused(tmp_path, key, value, said):
    write(tmp_path / "s", [[1, 2]], vocab_size=300)
    path = tmp_path / "s.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=said):
        TokenStore(tmp_path / "s")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], r"document 1 of .* has shape \(0,\)"),
        ([[1, 2]], r"document 1 of .* has shape \(1, 2\)"),
        ([1, 300], r"document 1 of .*: token 1 is 300, outside the vocabulary \[0, 300\)"),
        ([-1], "token 0 is -1"),
        ([1.0], "document 1 of .* has dtype float64"),
        ([2**64 - 1], "token 0 is 18446744073709551615"),
    ],
)
def test_writer_refuses_what_is_no_document(tmp_path, document, message):
    with TokenStoreWriter(tmp_path / "s", vocab_size=300) as writer:
        writer.add([299, 0])
        with pytest.raises(ValueError, match=message):
            writer.add(np.array(document))
        writer.add([1])
    assert TokenStore(tmp_path / "s").lengths.tolist() == [2, 1]


def test_failure_while_writing_leaves_the_old_store(tmp_path):
    write(tmp_path / "s", [[1, 2]])
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="token 0 is 300"):
        write(tmp_path / "s", [[9], [300]], vocab_size=300)
    assert sorted(os.listdir(tmp_path)) == before
    assert TokenStore(tmp_path / "s").read(0).tolist() == [1, 2]


def test_crash_at_any_rename_leaves_no_half_store(tmp_path, monkeypatch):
    """A process that stops at its n-th rename leaves no store or the new one."""
    replace, seen = os.replace, set()
    for stop_at in range(4):
        prefix = tmp_path / str(stop_at) / "s"
        write(prefix, [[1, 2]])
        calls = []

        def crash(source, target, calls=calls, stop_at=stop_at):
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            calls.append(target)
            replace(source, target)

        monkeypatch.setattr(store_module.os, "replace", crash)
        with suppress(KeyboardInterrupt):
            write(prefix, [[7, 8, 9]])
        monkeypatch.setattr(store_module.os, "replace", replace)
        if (prefix.parent / "s.idx").exists():
            seen.add(tuple(TokenStore(prefix).read(0).tolist()))
        else:
            seen.add("none")
    assert seen == {"none", (7, 8, 9)}


def test_an_open_store_survives_its_replacement(tmp_path):
    old = write(tmp_path / "s", [[1, 2]])
    new = write(tmp_path / "s", [[3, 4, 5]])
    assert (old.read(0).tolist(), new.read(0).tolist()) == ([1, 2], [3, 4, 5])


def test_finish_may_be_called_inside_the_block(tmp_path):
    with TokenStoreWriter(tmp_path / "s", vocab_size=300) as writer:
        writer.add([1])
        info = writer.finish()
    assert info.num_tokens == TokenStore(tmp_path / "s").num_tokens == 1
