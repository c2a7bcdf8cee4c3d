"""Tests `prepare_store` against encoding one by one, with any processes and any interruption."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.prepare.pipeline_case import Interrupt, interrupted_at, options
from wlb.data import TokenStore, verify_store
from wlb.prepare import (
    DocumentPolicy,
    OnError,
    PrepareOptions,
    folder_documents,
    load_tokenizer,
    pipeline,
    prepare,
    prepare_store,
)

SUFFIXES = (".bin", ".idx", ".json", "-heldout.bin", "-heldout.idx", "-heldout.json")
TEXTS = [f"document {i} ✓\n" * (1 + i * 7 % 23) for i in range(120)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def contents(prefix, suffixes=SUFFIXES):
    return [(prefix.parent / f"{prefix.name}{suffix}").read_bytes() for suffix in suffixes]


def documents(prefix):
    store = TokenStore(prefix)
    return [bytes(store.read(i)[:-1].astype(np.uint8)).decode() for i in range(store.num_documents)]


def test_every_document_in_order_with_its_end(corpus, tmp_path):
    made = prepare_store(options(corpus, tmp_path / "out" / "x", heldout_fraction=0.0))
    store = TokenStore(made.prefix)
    assert documents(made.prefix) == TEXTS
    assert all(store.read(i)[-1] == 257 for i in range(store.num_documents))
    assert store.info is not None
    assert (store.info.eos_id, store.info.vocab_size, store.info.tokenizer) == (257, 258, None)
    sizes = sorted(len(text.encode()) + 1 for text in TEXTS)
    assert (made.num_documents, made.num_tokens) == (len(TEXTS), sum(sizes))
    assert (made.longest, made.heldout, made.checksum) == (sizes[-1], "", store.info.checksum)
    assert made.lengths_p50 == int(np.percentile(sizes, 50))
    assert made.num_shards > 5
    assert sorted(os.listdir(tmp_path / "out")) == ["x.bin", "x.idx", "x.json", "x.lock"]
    verify_store(made.prefix)


def test_held_out_documents_are_those_of_the_hash_and_stay_so(corpus, tmp_path):
    made = prepare_store(options(corpus, tmp_path / "x"))
    train, held = documents(made.prefix), documents(made.heldout)
    assert sorted(train + held) == sorted(TEXTS)
    assert 10 < len(held) < 40
    assert (made.num_documents, made.num_heldout_documents) == (len(train), len(held))
    with open(corpus, "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    more = prepare_store(options(corpus, tmp_path / "y"))
    assert [text for text in documents(more.heldout) if text != "one more"] == held


def test_a_folder_of_text_gives_the_tokens_of_prepare(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(TEXTS[:40]):
        (folder / f"{i:03}.txt").write_text(text)
    asked = {"heldout_fraction": 0.2, "seed": 1}
    reference = prepare(folder_documents(folder), tmp_path / "ref", vocab_size=300, **asked)
    made = prepare_store(
        options(folder, tmp_path / "x", tokenizer=reference.tokenizer, shard_bytes=500, **asked)
    )
    for ours, theirs in ((made.prefix, reference.prefix), (made.heldout, reference.heldout)):
        assert contents_of(ours) == contents_of(theirs)


def contents_of(prefix):
    return contents(Path(prefix), (".bin", ".idx"))


def test_trained_bpe_comes_back_as_text(corpus, tmp_path):
    asked = {"tokenizer": "bpe", "vocab_size": 290, "sample_bytes": 5000}
    made = prepare_store(options(corpus, tmp_path / "x", **asked))
    tokenizer, found = load_tokenizer(made.tokenizer), []
    for prefix in (made.prefix, made.heldout):
        store = TokenStore(prefix)
        assert store.info is not None
        assert store.info.tokenizer == "x-tokenizer.json"
        for i in range(store.num_documents):
            assert store.read(i)[-1] == store.eos_id
            found.append(tokenizer.decode(store.read(i)[:-1].tolist(), skip_special_tokens=False))
    assert sorted(found) == sorted(TEXTS)
    assert made.vocab_size == 290


def test_policies(corpus, tmp_path):
    for policy, eos, tokens in (
        (DocumentPolicy.NONE, None, [100]),
        (DocumentPolicy.SEPARATOR, 257, [100, 257]),
        (DocumentPolicy.EOS_BOS, 257, [256, 100, 257]),
    ):
        corpus.write_text('{"text": "d"}\n')
        changes = {"policy": policy, "heldout_fraction": 0.0}
        made = prepare_store(options(corpus, tmp_path / policy, **changes))
        store = TokenStore(made.prefix)
        assert store.read(0).tolist() == tokens
        assert store.eos_id == eos


@pytest.mark.process
def test_one_and_three_processes_write_the_same_bytes(corpus, tmp_path):
    found = []
    for processes in (1, 3):
        out = tmp_path / f"p{processes}" / "x"
        prepare_store(options(corpus, out, processes=processes))
        found.append(contents(out))
    assert found[0] == found[1]


def test_an_interruption_anywhere_changes_nothing(corpus, tmp_path):
    reference = tmp_path / "ref" / "x"
    calls, asked = [], {"shard_bytes": 9000}
    made = prepare_store(options(corpus, reference, **asked), progress=calls.append)
    assert (made.num_shards, made.num_kept) == (4, 0)
    assert {c.stage for c in calls} == {"tokenizer", "encode", "merge"}
    assert calls[-1].done == calls[-1].size == corpus.stat().st_size
    for at in range(1, len(calls) + 1):
        out = tmp_path / f"at{at}" / "x"
        with pytest.raises(Interrupt):
            prepare_store(options(corpus, out, **asked), progress=interrupted_at(at))
        assert not out.with_suffix(".idx").exists()
        again = prepare_store(options(corpus, out, **asked))
        assert again.num_kept == min(max(0, at - 1), made.num_shards)
        assert contents(out) == contents(reference)
        assert not out.with_suffix(".parts").exists()


def test_an_interrupted_overwrite_goes_on_with_the_same_command(corpus, tmp_path):
    """The store that is replaced stays until its parts are merged."""
    asked = {"shard_bytes": 9000, "seed": 4}
    calls = []
    made = prepare_store(options(corpus, tmp_path / "ref", **asked), progress=calls.append)
    for at in range(1, len(calls) + 1):
        out = tmp_path / f"at{at}" / "x"
        prepare_store(options(corpus, out))
        before, again = contents(out), options(corpus, out, overwrite=True, **asked)
        with pytest.raises(Interrupt):
            prepare_store(again, progress=interrupted_at(at))
        assert contents(out) == before
        assert prepare_store(again).num_kept == min(max(0, at - 1), made.num_shards)
        assert contents(out) == contents(tmp_path / "ref")
        assert prepare_store(again).reused
        assert not out.with_suffix(".parts").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_parts_whose_manifest_is_lost_are_made_again(corpus, tmp_path, overwrite):
    """They may be of other arguments."""
    with pytest.raises(Interrupt):
        prepare_store(options(corpus, tmp_path / "x"), progress=interrupted_at(5))
    (tmp_path / "x.parts" / "manifest.json").unlink()
    made = prepare_store(options(corpus, tmp_path / "x", seed=4, overwrite=overwrite))
    assert made.num_kept == 0
    prepare_store(options(corpus, tmp_path / "ref", seed=4))
    assert contents(tmp_path / "x") == contents(tmp_path / "ref")


def test_a_second_preparation_waits_although_the_lock_file_is_gone(corpus, tmp_path, monkeypatch):
    out, second, waits = tmp_path / "x", [], threading.Event()
    lock_folder = pipeline.locked_folder

    def noted(path):
        if threading.current_thread() is not threading.main_thread():
            waits.set()
        return lock_folder(path)

    def start_second(status):
        if not second:
            out.with_suffix(".lock").unlink()
            pool = ThreadPoolExecutor(1)
            second.append(pool.submit(prepare_store, options(corpus, out, processes=1)))
            assert waits.wait(600)

    monkeypatch.setattr(pipeline, "locked_folder", noted)
    first = prepare_store(options(corpus, out), progress=start_second)
    assert not first.reused
    assert second[0].result(600).reused
    assert not out.with_suffix(".parts").exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "summary"])
def test_a_damaged_part_is_made_again(corpus, tmp_path, damage):
    reference = tmp_path / "ref" / "x"
    prepare_store(options(corpus, reference))
    out = tmp_path / "x"
    with pytest.raises(Interrupt):
        prepare_store(options(corpus, out), progress=interrupted_at(4))
    path = tmp_path / "x.parts" / "000001-train.bin"
    data = path.read_bytes()
    if damage == "summary":
        (tmp_path / "x.parts" / "000001.json").write_text("{")
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-2] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    assert prepare_store(options(corpus, out)).num_kept == 2
    assert contents(out) == contents(reference)


SCRIPT = """
import sys
from wlb.prepare import PrepareOptions, prepare_store
if __name__ == "__main__":
    prepare_store(PrepareOptions(inputs=(sys.argv[1],), out=sys.argv[2], tokenizer="bytes",
                                 shard_bytes=200_000, heldout_fraction=0.2, seed=3, processes=2))
"""


@pytest.mark.full
@pytest.mark.process
def test_a_killed_preparation_goes_on(tmp_path):
    corpus = tmp_path / "a.jsonl"
    with open(corpus, "w") as file:
        for i in range(6000):
            file.write(json.dumps({"text": f"{i} " * 300}) + "\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out" / "x"
    child = subprocess.Popen([sys.executable, str(script), str(corpus), str(out)])
    parts = tmp_path / "out" / "x.parts"
    deadline = time.monotonic() + 600
    while not list(parts.glob("0*[0-9].json")) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    made = prepare_store(options(corpus, out, shard_bytes=200_000, processes=2))
    assert made.num_kept >= 1
    prepare_store(options(corpus, tmp_path / "ref", shard_bytes=200_000))
    assert contents(out) == contents(tmp_path / "ref")
    assert sorted(p.name for p in out.parent.iterdir()) == sorted(
        ["x.lock", *(f"x{suffix}" for suffix in SUFFIXES)]
    )


def test_a_second_call_finds_the_store(corpus, tmp_path):
    first = prepare_store(options(corpus, tmp_path / "x"))
    calls = []
    again = prepare_store(options(corpus, tmp_path / "x", processes=7), progress=calls.append)
    assert again.reused
    assert not first.reused
    assert calls == []
    for name in ("num_tokens", "checksum", "skipped", "longest", "heldout", "num_heldout_tokens"):
        assert getattr(first, name) == getattr(again, name)


def test_other_arguments_never_replace_a_store_unless_told(corpus, tmp_path):
    out = tmp_path / "x"
    prepare_store(options(corpus, out))
    before = contents(out)
    with pytest.raises(ValueError, match=r"x already exists and .*--overwrite"):
        prepare_store(options(corpus, out, seed=4))
    assert contents(out) == before
    made = prepare_store(options(corpus, out, heldout_fraction=0.0, overwrite=True))
    assert made.num_documents == len(TEXTS)
    assert not (tmp_path / "x-heldout.idx").exists()


@pytest.mark.parametrize("fraction", [0.0, 0.25])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_store_of_ones_own_in_the_held_out_place_stays(corpus, tmp_path, fraction, overwrite):
    """It is validation data of another origin, named as held-out data are."""
    theirs, out = tmp_path / "mix-heldout", tmp_path / "mix"
    prepare_store(options(corpus, theirs, heldout_fraction=0.0))
    before = contents(theirs, SUFFIXES[:3])
    asked = {"heldout_fraction": fraction, "overwrite": overwrite}
    with pytest.raises(
        ValueError,
        match=r"would replace or remove the store .*mix-heldout, which was not made with it",
    ):
        prepare_store(options(corpus, out, **asked))
    assert contents(theirs, SUFFIXES[:3]) == before
    assert not out.with_name("mix.idx").exists()


def test_going_on_with_something_else_names_the_difference(corpus, tmp_path):
    out = tmp_path / "x"
    with pytest.raises(Interrupt):
        prepare_store(options(corpus, out), progress=interrupted_at(3))
    with pytest.raises(ValueError, match=r"seed was 3, is 4; text_key was 'text', is 'body'"):
        prepare_store(options(corpus, out, seed=4, text_key="body"))
    size = corpus.stat().st_size
    with open(corpus, "a") as file:
        file.write('{"text": "new"}\n')
    message = rf"a\.jsonl: size was {size}, is {size + 16}.*--overwrite"
    with pytest.raises(ValueError, match=message):
        prepare_store(options(corpus, out))
    made = prepare_store(options(corpus, out, overwrite=True))
    assert made.num_kept == 0
    assert made.num_documents + made.num_heldout_documents == len(TEXTS) + 1


def test_inputs_that_change_meanwhile_are_refused(corpus, tmp_path):
    def change(status):
        if status.stage == "encode" and status.done == status.size:
            corpus.write_text("{}\n")

    with pytest.raises(ValueError, match=r"a\.jsonl changed while wlb read it"):
        prepare_store(options(corpus, tmp_path / "x"), progress=change)
    assert not (tmp_path / "x.idx").exists()


BAD = ['{"text": "good one"}', "{broken", '{"text": ""}', '{"body": "x"}', "", '{"text": 7}']


@pytest.mark.process
def test_a_bad_line_stops_with_its_number(corpus, tmp_path):
    corpus.write_text("\n".join(['{"text": "fine"}'] * 500 + BAD))
    for processes in (1, 2):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 502: not JSON: .*--on-error skip"):
            prepare_store(options(corpus, tmp_path / "x", processes=processes))


def test_bad_lines_are_left_out_and_counted(corpus, tmp_path):
    corpus.write_text("\n".join(BAD * 5))
    asked = {"on_error": OnError.SKIP, "heldout_fraction": 0.0, "shard_bytes": 60}
    made = prepare_store(options(corpus, tmp_path / "x", **asked))
    assert documents(made.prefix) == ["good one"] * 5
    expected = {"blank_line": 5, "empty": 5, "no_text": 5, "not_json": 5, "not_text": 5}
    expected["blank_line"] = corpus.read_text().split("\n").count("")
    assert made.skipped == expected
    assert made.num_documents + sum(made.skipped.values()) == 30
    assert [line.split(": not JSON")[0] for line in made.examples["not_json"]] == [
        f"{corpus}, line {2 + 6 * i}" for i in range(3)
    ]
    info = TokenStore(made.prefix).info
    assert info is not None
    assert info.preparation["skipped"] == expected


def test_empty_and_unreadable_files_of_a_folder(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a").write_text("text")
    (folder / "none").touch()
    asked = {"heldout_fraction": 0.0}
    made = prepare_store(options(folder, tmp_path / "x", **asked))
    assert made.skipped == {"empty": 1}
    (folder / "bad").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"texts/bad: not UTF-8: byte 0xff at position 2"):
        prepare_store(options(folder, tmp_path / "y", **asked))
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match=r"cannot read .*/texts/pipe \(neither a file nor a"):
        prepare_store(options(folder, tmp_path / "y", overwrite=True, **asked))
    asked["on_error"] = OnError.SKIP
    made = prepare_store(options(folder, tmp_path / "y", overwrite=True, **asked))
    assert made.skipped == {"empty": 1, "not_utf8": 1, "unreadable": 1}
    assert made.examples["unreadable"] == [f"{folder}/pipe (neither a file nor a folder)"]


def test_a_link_that_a_pattern_finds_and_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("gone.txt")
    found = options(tmp_path / "*.txt", tmp_path / "x", heldout_fraction=0.0)
    with pytest.raises(ValueError, match=r"cannot read .*/b.txt \(a link to gone.txt, which"):
        prepare_store(found)
    made = prepare_store(replace(found, on_error=OnError.SKIP))
    assert (made.num_documents, made.skipped) == (1, {"unreadable": 1})


def test_nothing_left(corpus, tmp_path):
    corpus.write_text('{"text": ""}\n' * 3)
    with pytest.raises(
        ValueError, match=r"has no document, because all records were skipped: .*'empty': 3"
    ):
        prepare_store(options(corpus, tmp_path / "x"))


def test_a_table_without_rows_and_a_list_without_items_are_named(tmp_path):
    path = tmp_path / "zero.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match=r"zero.parquet has no rows; give files that have rows"):
        prepare_store(options(path, tmp_path / "x"))
    items = tmp_path / "none.json"
    items.write_text("[]")
    with pytest.raises(ValueError, match=r"none.json has no records; give files that have records"):
        prepare_store(options(items, tmp_path / "y"))


@pytest.mark.parametrize(("fraction", "num_held"), [(1e-9, 1), (0.999999999, 119)])
def test_neither_side_is_left_empty(corpus, tmp_path, fraction, num_held):
    made = prepare_store(options(corpus, tmp_path / "x", heldout_fraction=fraction))
    assert made.num_heldout_documents == num_held
    assert Counter(documents(made.prefix) + documents(made.heldout)) == Counter(TEXTS)


@pytest.mark.full
def test_memory_does_not_grow_with_the_input(tmp_path):
    peaks = []
    for num in (2000, 8000):
        corpus = tmp_path / f"{num}.jsonl"
        with open(corpus, "w") as file:
            for i in range(num):
                file.write(json.dumps({"text": f"{i:06} " * 300}) + "\n")
        tracemalloc.start()
        prepare_store(options(corpus, tmp_path / f"x{num}", shard_bytes=0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert corpus.stat().st_size > 16_000_000
    assert peaks[1] < 6_000_000  # the store's buffers of 1 MiB each, not its documents
    assert peaks[1] < peaks[0] + 500_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout_fraction": 1.0}, r"--heldout-fraction = 1.0 must be in \[0, 1\)"),
        ({"tokenizer": "bpe", "vocab_size": 256}, "--vocab-size = 256 must be at least 257"),
        ({"processes": 0}, "--processes = 0 must be at least 1"),
        ({"bos": "<s>"}, "--bos and --eos apply only to a tokenizer"),
        ({"tokenizer": "bpe", "policy": DocumentPolicy.EOS_BOS}, r"--bos '<\|endoftext\|>'"),
        (
            {"tokenizer": "no/such.json"},
            r"the file no/such\.json does not exist; give a tokenizer\.json, 'bpe'",
        ),
        ({"inputs": ()}, "there is no input"),
        ({"inputs": (".",), "out": "./sub/x"}, r"--out \./sub/x is in the input folder \."),
    ],
)
def test_refuses(corpus, tmp_path, changes, message):
    asked = {"inputs": (str(corpus),), "out": str(tmp_path / "x"), "tokenizer": "bytes", **changes}
    with pytest.raises(ValueError, match=message):
        prepare_store(PrepareOptions(**asked))
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_a_store_is_not_its_own_input(tmp_path):
    """A pattern would find it the next time."""
    (tmp_path / "a.txt").write_text("one")
    asked = options(tmp_path / "*", tmp_path / "mix", heldout_fraction=0.0)
    prepare_store(asked)
    before = contents(tmp_path / "mix", SUFFIXES[:3])
    for again in (asked, replace(asked, overwrite=True, on_error=OnError.SKIP)):
        with pytest.raises(
            ValueError,
            match=r"contain .*mix\.(bin|idx|json), which is a file of the store --out .*mix",
        ):
            prepare_store(again)
    assert contents(tmp_path / "mix", SUFFIXES[:3]) == before


def test_a_damaged_store_is_called_that(corpus, tmp_path):
    prepare_store(options(corpus, tmp_path / "x"))
    path = tmp_path / "x.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"x already exists and cannot be used \(.*x\.bin"):
        prepare_store(options(corpus, tmp_path / "x"))
    made = prepare_store(options(corpus, tmp_path / "x", overwrite=True))
    verify_store(made.prefix)


def test_a_bpe_of_no_record_is_refused(tmp_path):
    """A Parquet file may have no row group."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "none.parquet"
    pq.ParquetWriter(path, pa.schema([("text", pa.string())])).close()
    with pytest.raises(ValueError, match=r"--tokenizer bpe cannot .*none.parquet has no record"):
        prepare_store(options(path, tmp_path / "x", tokenizer="bpe"))
    assert not (tmp_path / "x.parts").exists()


def test_verify_finds_changed_tokens_and_foreign_ones(corpus, tmp_path):
    made = prepare_store(options(corpus, tmp_path / "x"))
    path = tmp_path / "x.bin"
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(ValueError, match="has checksum"):
        verify_store(made.prefix)
    path.write_bytes(good)
    sidecar = tmp_path / "x.json"
    text = sidecar.read_text().replace('"vocab_size": 258', '"vocab_size": 257')
    sidecar.write_text(text)
    with pytest.raises(ValueError, match=r"eos_id = 257 must be at most 256"):
        verify_store(made.prefix)
    sidecar.write_text(text.replace('"eos_id": 257', '"eos_id": null'))
    with pytest.raises(ValueError, match=r"is 257, outside the vocabulary \[0, 257\)"):
        verify_store(made.prefix)


def test_a_store_too_narrow_for_its_vocabulary_is_refused(corpus, tmp_path):
    made = prepare_store(options(corpus, tmp_path / "x"))
    sidecar = tmp_path / "x.json"
    sidecar.write_text(sidecar.read_text().replace('"vocab_size": 258', '"vocab_size": 65537'))
    with pytest.raises(
        ValueError, match=r"vocab_size = 65537, .*uint16, whose largest value is 65535"
    ):
        TokenStore(made.prefix)
