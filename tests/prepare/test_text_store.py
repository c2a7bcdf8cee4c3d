"""Tests preparation of a tiny corpus: round trip, held-out split, reuse, special tokens in text."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.prepare.documents_case import ListedDocuments
from wlb.data import TokenStore, verify_store
from wlb.prepare import folder_documents, load_tokenizer, prepare
from wlb.prepare.encode import END_OF_TEXT, text_pieces
from wlb.prepare.parts import heldout_rows

OPTIONS = {"vocab_size": 300, "heldout_fraction": 0.2, "seed": 1}
TEXTS = {f"doc{i:02}": f"line {i}\n" * (i + 1) + "é ✓ \t end" for i in range(40)} | {
    "attack": f"before {END_OF_TEXT} after {END_OF_TEXT}{END_OF_TEXT}"
}


def corpus(texts=None):
    return ListedDocuments(description="tiny", items=tuple((texts or TEXTS).items()))


def eos_id_of(prepared):
    info = TokenStore(prepared.prefix).info
    assert info is not None
    return info.eos_id


def all_texts(prepared):
    """Returns the texts of both stores by decoding, without the EOS that ends each, and the ids."""
    tokenizer, eos_id = load_tokenizer(prepared.tokenizer), eos_id_of(prepared)
    sides = []
    for prefix in (prepared.prefix, prepared.heldout):
        store = TokenStore(prefix)
        verify_store(store.prefix)
        ids = [store.read(i) for i in range(store.num_documents)]
        assert all(document[-1] == eos_id for document in ids)
        assert all(eos_id not in document[:-1] for document in ids)
        sides.append([tokenizer.decode(i[:-1].tolist(), skip_special_tokens=False) for i in ids])
    return sides


def both(sides):
    train, heldout = sides
    return train + heldout


def test_every_text_comes_back_and_held_out_is_disjoint(tmp_path):
    prepared = prepare(corpus(), tmp_path / "sub" / "tiny", **OPTIONS)
    train, heldout = all_texts(prepared)
    assert sorted(train + heldout) == sorted(TEXTS.values())
    assert not set(train) & set(heldout)
    assert (len(train), len(heldout)) == (prepared.num_documents, prepared.num_heldout_documents)
    assert 2 <= len(heldout) <= 16
    assert not prepared.reused
    assert prepared.skipped == {}
    assert prepared.vocab_size == 300
    info = TokenStore(prepared.prefix).info
    end = load_tokenizer(prepared.tokenizer).token_to_id(END_OF_TEXT)
    assert (info.source, info.tokenizer) == ("tiny", "tiny-tokenizer.json")
    assert (info.eos_id, info.vocab_size) == (end, 300)


def test_text_cannot_contain_special_tokens(tmp_path):
    prepared = prepare(corpus(), tmp_path / "tiny", **OPTIONS)
    tokenizer = load_tokenizer(prepared.tokenizer)
    assert tokenizer.token_to_id(END_OF_TEXT) == eos_id_of(prepared)
    ids = tokenizer.encode(TEXTS["attack"]).ids
    assert eos_id_of(prepared) not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXTS["attack"]
    assert TEXTS["attack"] in both(all_texts(prepared))  # which checks the stores' ids


def test_a_second_call_reuses(tmp_path, monkeypatch):
    first = prepare(corpus(), tmp_path / "tiny", **OPTIONS)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    monkeypatch.setattr(ListedDocuments, "read", None)  # text is not touched
    second = prepare(corpus(), tmp_path / "tiny", **OPTIONS)
    assert second.reused
    for name in ("prefix", "heldout", "vocab_size", "num_tokens", "skipped"):
        assert getattr(first, name) == getattr(second, name)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"vocab_size": 310}, {"heldout_fraction": 0.3}, {"sample_bytes": 1000}]
)
def test_other_arguments_encode_again(tmp_path, change):
    prepare(corpus(), tmp_path / "tiny", **OPTIONS)
    assert not prepare(corpus(), tmp_path / "tiny", **{**OPTIONS, **change}).reused


def test_another_corpus_encodes_again(tmp_path):
    prepare(corpus(), tmp_path / "tiny", **OPTIONS)
    other = prepare(corpus({**TEXTS, "doc00": "longer " * 9}), tmp_path / "tiny", **OPTIONS)
    assert not other.reused
    assert "longer " * 9 in both(all_texts(other))


@pytest.mark.parametrize("name", ["train.idx", "train.bin", "heldout.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_incomplete_stores_are_made_again(tmp_path, name, damage):
    first = prepare(corpus(), tmp_path / "tiny", **OPTIONS)
    path = tmp_path / f"tiny-{name}"
    content = path.read_bytes()
    path.unlink() if damage == "remove" else path.write_bytes(content[:-2])
    again = prepare(corpus(), tmp_path / "tiny", **OPTIONS)
    assert not again.reused
    assert again.num_tokens == first.num_tokens
    assert path.read_bytes() == content  # equal inputs give equal files


def test_equal_inputs_give_equal_files(tmp_path):
    for name in ("a", "b"):
        prepare(corpus(), tmp_path / name / "tiny", **OPTIONS)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_failure_leaves_nothing_that_would_be_reused(tmp_path):
    def stop(done, total):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        prepare(corpus(), tmp_path / "tiny", progress=stop, **OPTIONS)
    assert sorted(os.listdir(tmp_path)) == ["tiny-tokenizer.json", "tiny.lock"]
    assert not prepare(corpus(), tmp_path / "tiny", **OPTIONS).reused


def test_progress_and_skips_of_a_folder(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    (folder / "bad").write_bytes(b"\xff\xfe")
    (folder / "none").touch()
    calls = []
    options = {**OPTIONS, "progress": lambda done, total: calls.append((done, total))}
    prepared = prepare(folder_documents(folder), tmp_path / "tiny", **options)
    assert prepared.skipped == {"empty": 1, "not_utf8": 1}
    assert sorted(both(all_texts(prepared))) == sorted(TEXTS.values())
    total = sum(len(text.encode()) for text in TEXTS.values()) + 2
    assert calls == [(total, total)]
    assert prepare(folder_documents(folder), tmp_path / "tiny", **OPTIONS).skipped == {
        "empty": 1,
        "not_utf8": 1,
    }


def test_long_documents_are_encoded_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("wlb.prepare.encode.PIECE_CHARACTERS", 100)
    monkeypatch.setattr("wlb.prepare.text_store._SHARD_BYTES", 700)
    texts = {"long": "some words\n" * 99 + "x" * 333, "a": "short", "b": "y" * 100}
    prepared = prepare(corpus(texts), tmp_path / "tiny", **OPTIONS)
    assert sorted(both(all_texts(prepared))) == sorted(texts.values())
    assert [len(part) for part in text_pieces("a" * 50 + "\n" + "b" * 230)] == [51, 100, 100, 30]


def test_split_is_stable_and_leaves_no_side_empty():
    names = [f"d{i}" for i in range(2000)]
    heldout = heldout_rows(names, fraction=0.1, seed=0)
    assert 150 < heldout.sum() < 250
    more = heldout_rows([*names, "new"], fraction=0.1, seed=0)
    assert np.array_equal(more[:-1], heldout)
    assert not np.array_equal(heldout_rows(names, fraction=0.1, seed=1), heldout)
    for fraction in (1e-9, 0.999999999):
        assert heldout_rows(names[:2], fraction=fraction, seed=0).sum() == 1
    assert heldout_rows(names[:1], fraction=0.999999999, seed=0).tolist() == [False]
    assert heldout_rows(names, fraction=0.0, seed=0).sum() == 0


def test_no_held_out_documents(tmp_path):
    prepared = prepare(corpus(), tmp_path / "tiny", **{**OPTIONS, "heldout_fraction": 0.0})
    assert (prepared.num_documents, prepared.num_heldout_documents) == (len(TEXTS), 0)
    assert prepare(corpus(), tmp_path / "tiny", **{**OPTIONS, "heldout_fraction": 0.0}).reused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, r"data\.bpe_vocab_size = 256 must be at least 257"),
        ({"heldout_fraction": 1.0}, r"data\.heldout_fraction = 1.0 must be in \[0, 1\)"),
        ({"heldout_fraction": float("nan")}, r"data\.heldout_fraction = nan"),
        ({"sample_bytes": 0}, "sample_bytes = 0"),
    ],
)
def test_refuses(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(corpus(), tmp_path / "tiny", **{**OPTIONS, **options})
    assert list(tmp_path.iterdir()) == []


def test_corpus_of_unreadable_files_is_refused(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "bad").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"no document.*left out: {'not_utf8': 1}"):
        prepare(folder_documents(folder), tmp_path / "tiny", **OPTIONS)


SCRIPT = """
import sys
from wlb.prepare import folder_documents, prepare
prepared = prepare(folder_documents(sys.argv[1]), sys.argv[2],
                   vocab_size=300, heldout_fraction=0.2, seed=1)
assert not {"torch", "rich"} & set(sys.modules), "torch-free"
print(prepared.reused, prepared.num_tokens)
"""


@pytest.mark.process
def test_processes_at_the_same_time_do_it_once(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text * 200)
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "tiny")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = sorted(process.communicate()[0].split() for process in processes)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [line[0] for line in lines] == ["False", "True", "True"]
    assert len({line[1] for line in lines}) == 1
    verify_store(str(tmp_path / "tiny-train"))


@pytest.mark.process
def test_importing_the_room_loads_neither_torch_nor_tokenizers():
    code = (
        "import sys, wlb.prepare; "
        "sys.exit(bool({'torch', 'tokenizers', 'rich', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
