"""`prepare_store`: against encoding document by document; any processes, any interruption."""

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import pytest

from wlb.corpus import (
    BadRecord,
    DocumentPolicy,
    Encoded,
    EncoderChoice,
    OnError,
    PrepareOptions,
    Skip,
    TokenStore,
    folder_documents,
    load_tokenizer,
    prepare,
    prepare_store,
    verify_store,
)

SUFFIXES = (".bin", ".idx", ".json", "-heldout.bin", "-heldout.idx", "-heldout.json")
TEXTS = [f"document {i} ✓\n" * (1 + i * 7 % 23) for i in range(120)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def options(corpus, out, **changes):
    asked = {"tokenizer": "bytes", "shard_bytes": 3000, "heldout_fraction": 0.2, "seed": 3}
    return PrepareOptions(inputs=(str(corpus),), out=str(out), **{**asked, **changes})


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
    for ours, theirs in ((made.prefix, reference.train), (made.heldout, reference.heldout)):
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


@pytest.mark.dist
def test_one_and_three_processes_write_the_same_bytes(corpus, tmp_path):
    found = []
    for processes in (1, 3):
        out = tmp_path / f"p{processes}" / "x"
        prepare_store(options(corpus, out, processes=processes))
        found.append(contents(out))
    assert found[0] == found[1]


class Interrupt(Exception):
    pass


def interrupted_at(limit):
    calls = []

    def progress(status):
        calls.append(status)
        if len(calls) == limit:
            raise Interrupt

    return progress


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
from wlb.corpus import PrepareOptions, prepare_store
if __name__ == "__main__":
    prepare_store(PrepareOptions(inputs=(sys.argv[1],), out=sys.argv[2], tokenizer="bytes",
                                 shard_bytes=200_000, heldout_fraction=0.2, seed=3, processes=2))
"""


@pytest.mark.dist
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
    deadline = time.monotonic() + 60
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
    with pytest.raises(ValueError, match=r"x is there already.*--overwrite"):
        prepare_store(options(corpus, out, seed=4))
    assert contents(out) == before
    made = prepare_store(options(corpus, out, heldout_fraction=0.0, overwrite=True))
    assert made.num_documents == len(TEXTS)
    assert not (tmp_path / "x-heldout.idx").exists()


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

    with pytest.raises(ValueError, match=r"a\.jsonl changed while it was prepared"):
        prepare_store(options(corpus, tmp_path / "x"), progress=change)
    assert not (tmp_path / "x.idx").exists()


BAD = ['{"text": "good one"}', "{broken", '{"text": ""}', '{"body": "x"}', "", '{"text": 7}']


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
    with pytest.raises(ValueError, match=r"texts/bad: not UTF-8: byte 0xff at byte 2"):
        prepare_store(options(folder, tmp_path / "y", **asked))
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match=r"1 files or folders of .*texts cannot be read"):
        prepare_store(options(folder, tmp_path / "y", overwrite=True, **asked))
    asked["on_error"] = OnError.SKIP
    made = prepare_store(options(folder, tmp_path / "y", overwrite=True, **asked))
    assert made.skipped == {"empty": 1, "not_utf8": 1, "unreadable": 1}


def test_nothing_left(corpus, tmp_path):
    corpus.write_text('{"text": ""}\n' * 3)
    with pytest.raises(ValueError, match=r"no document is left .*'empty': 3"):
        prepare_store(options(corpus, tmp_path / "x"))


@pytest.mark.parametrize(("fraction", "num_held"), [(1e-9, 1), (0.999999999, 119)])
def test_neither_side_is_left_empty(corpus, tmp_path, fraction, num_held):
    made = prepare_store(options(corpus, tmp_path / "x", heldout_fraction=fraction))
    assert made.num_heldout_documents == num_held
    assert Counter(documents(made.prefix) + documents(made.heldout)) == Counter(TEXTS)


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
        ({"tokenizer": "bpe", "vocab_size": 256}, "--vocab-size = 256 must be above 256"),
        ({"processes": 0}, "--processes = 0 must be at least 1"),
        ({"bos": "<s>"}, "--bos and --eos are for a tokenizer"),
        ({"tokenizer": "bpe", "policy": DocumentPolicy.EOS_BOS}, r"--bos '<\|endoftext\|>'"),
        ({"tokenizer": "no/such.json"}, r"no file no/such\.json; give a tokenizer\.json, 'bpe'"),
        ({"inputs": ()}, "there is no input"),
        ({"inputs": (".",), "out": "./sub/x"}, r"--out \./sub/x lies in the input folder \."),
    ],
)
def test_refuses(corpus, tmp_path, changes, message):
    asked = {"inputs": (str(corpus),), "out": str(tmp_path / "x"), "tokenizer": "bytes", **changes}
    with pytest.raises(ValueError, match=message):
        prepare_store(PrepareOptions(**asked))
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_verify_finds_changed_tokens_and_foreign_ones(corpus, tmp_path):
    made = prepare_store(options(corpus, tmp_path / "x"))
    path = tmp_path / "x.bin"
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(ValueError, match="has checksum"):
        verify_store(made.prefix)
    path.write_bytes(good)
    sidecar = tmp_path / "x.json"
    sidecar.write_text(sidecar.read_text().replace('"vocab_size": 258', '"vocab_size": 257'))
    with pytest.raises(ValueError, match=r"is 257, outside the vocabulary \[0, 257\)"):
        verify_store(made.prefix)


@dataclass(frozen=True)
class EveryOther(EncoderChoice):
    """Another kind of records: numbers as tokens, every `step`-th one trained."""

    step: int = 2
    on_too_long: OnError = OnError.SKIP

    def columns(self, names):
        return ("numbers",)

    @property
    def actions(self):
        return {Skip.TOO_LONG: self.on_too_long}

    @property
    def arguments(self):
        return {"step": self.step}

    def spec(self, tokenizer, vocabulary):
        assert (tokenizer, vocabulary.size) == ("", 258)
        return self

    def open(self):
        return self

    def encode(self, record):
        if len(record["numbers"]) > 8:
            raise BadRecord(Skip.TOO_LONG, f"{len(record['numbers'])} documents")
        return [self.document(numbers) for numbers in record["numbers"]]

    def document(self, numbers):
        spans = [[i, i + 1] for i in range(1, len(numbers)) if i % self.step]
        trained = np.array(spans, np.int64).reshape(-1, 2)
        counts = {"numbers": len(numbers)} if len(numbers) > 1 else {}
        return Encoded(tokens=np.array(numbers), trained=trained, counts=counts)


@pytest.mark.dist
def test_another_encoder_and_its_trained_tokens(tmp_path):
    records = [[list(range(1, 2 + i % 9))] * (1 + i % 2) for i in range(60)]
    rows = [row for record in records for row in record]  # every second record is two documents
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"numbers": record}) + "\n" for record in records))
    asked = options(path, tmp_path / "x", shard_bytes=200, processes=2)
    made = prepare_store(asked, encoder=EveryOther())
    assert made.num_shards > 3
    found = []
    for prefix in (made.prefix, made.heldout):
        store = TokenStore(prefix)
        assert store.has_targets
        for i in range(store.num_documents):
            found.append(store.read(i).tolist())
            expected = [n % 2 == 1 for n in range(len(found[-1]))]
            assert store.trained(i).tolist() == expected
        verify_store(prefix)
    assert sorted(found) == sorted(rows)
    with pytest.raises(ValueError, match="is there already and was made of other"):
        prepare_store(asked, encoder=EveryOther(step=3))
    path.write_text('{"numbers": []}')
    with pytest.raises(ValueError, match=r"line 1: the encoder gave neither document nor reason"):
        prepare_store(replace(asked, overwrite=True), encoder=EveryOther())
    with pytest.raises(ValueError, match="--tokenizer bpe: these records have no text to train"):
        prepare_store(replace(asked, out=f"{asked.out}-bpe", tokenizer="bpe"), encoder=EveryOther())
    assert not (tmp_path / "x-bpe.parts").exists()


@pytest.mark.dist
def test_counts_of_an_encoder_are_summed_whoever_encodes_and_however_often(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [[[1] * (1 + i % 3)] * (1 + i % 10) for i in range(200)]
    path.write_text("".join(json.dumps({"numbers": row}) + "\n" for row in rows))
    kept = [row for row in rows if len(row) <= 8]
    expected = {"numbers": sum(len(d) for row in kept for d in row if len(d) > 1)}
    asked = options(path, tmp_path / "one", shard_bytes=400)
    made = [prepare_store(asked, encoder=EveryOther())]
    assert made[0].num_shards > 5
    many = replace(asked, out=str(tmp_path / "many"), processes=3)
    made.append(prepare_store(many, encoder=EveryOther()))
    cut = replace(asked, out=str(tmp_path / "cut"))
    with pytest.raises(Interrupt):
        prepare_store(cut, encoder=EveryOther(), progress=interrupted_at(4))
    made += [prepare_store(cut, encoder=EveryOther()), prepare_store(cut, encoder=EveryOther())]
    for report in made:
        assert report.counts == expected
        assert report.skipped == {"too_long": len(rows) - len(kept)}
        sizes = [len(d) for row in kept for d in row]
        assert report.num_documents + report.num_heldout_documents == len(sizes)
        trained = report.num_targets + report.num_heldout_targets
        assert trained == sum(size // 2 for size in sizes)
        info = TokenStore(report.prefix).info
        assert info is not None
        assert info.preparation["counts"] == expected
    with pytest.raises(ValueError, match=r"line 9: 9 documents\. .*with --on-too-long skip"):
        prepare_store(
            replace(asked, out=str(tmp_path / "no")), encoder=EveryOther(on_too_long=OnError.FAIL)
        )


@pytest.mark.parametrize(("fraction", "num_held"), [(1e-9, 3), (0.999999999, 27)])
def test_documents_of_a_record_change_sides_together(tmp_path, fraction, num_held):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"numbers": [[i]] * 3}) + "\n" for i in range(10)))
    asked = options(path, tmp_path / "x", heldout_fraction=fraction, shard_bytes=100)
    made = prepare_store(asked, encoder=EveryOther())
    assert made.num_heldout_documents == num_held
    held = TokenStore(made.heldout)
    assert set(Counter(int(held.read(i)[0]) for i in range(num_held)).values()) == {3}
    path.write_text('{"numbers": [[1], [2]]}')  # one record is trained
    made = prepare_store(replace(asked, overwrite=True), encoder=EveryOther())
    assert (made.num_documents, made.num_heldout_documents) == (2, 0)


def test_a_store_too_narrow_for_its_vocabulary_is_refused(corpus, tmp_path):
    made = prepare_store(options(corpus, tmp_path / "x"))
    sidecar = tmp_path / "x.json"
    sidecar.write_text(sidecar.read_text().replace('"vocab_size": 258', '"vocab_size": 65537'))
    with pytest.raises(ValueError, match=r"65537 tokens of vocabulary, .*uint16 up to 65535"):
        TokenStore(made.prefix)


@dataclass(frozen=True)
class Dies(EveryOther):
    """Ends its process at the record of 8 documents, as the kernel does when memory is short."""

    def encode(self, record):
        if len(record["numbers"]) == 8 and parent_process() is not None:
            os._exit(9)
        return super().encode(record)


@pytest.mark.dist
def test_a_worker_that_dies_is_said_and_what_is_complete_is_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [[[1, 2]]] * 90 + [[[1]] * 8]
    path.write_text("".join(json.dumps({"numbers": row}) + "\n" for row in rows))
    asked = options(path, tmp_path / "x", shard_bytes=400, processes=2)
    with pytest.raises(RuntimeError, match=r"a worker process died .*run the same command again"):
        prepare_store(asked, encoder=Dies())
    made = prepare_store(replace(asked, processes=1), encoder=Dies())
    assert made.num_kept >= 1
    assert made.num_documents + made.num_heldout_documents == 98
