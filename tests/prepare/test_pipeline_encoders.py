"""Tests `prepare_store` with a custom encoder: its records, counts, and a worker that dies."""

import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing import parent_process

import numpy as np
import pytest

from tests.prepare.pipeline_case import Interrupt, interrupted_at, options
from wlb.data import TokenStore, verify_store
from wlb.prepare import BadRecord, Encoded, EncoderChoice, OnError, Skip, prepare_store


@dataclass(frozen=True)
class EveryOther(EncoderChoice):
    """Encodes another kind of records: numbers as tokens, every `step`-th one trained."""

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

    def open(self, tokenizer, vocabulary):
        assert (tokenizer, vocabulary.size) == ("", 258)
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


@pytest.mark.process
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
    with pytest.raises(ValueError, match="already exists and was made of other"):
        prepare_store(asked, encoder=EveryOther(step=3))
    path.write_text('{"numbers": []}')
    with pytest.raises(
        ValueError, match=r"line 1: RecordEncoder.encode must return at least one document"
    ):
        prepare_store(replace(asked, overwrite=True), encoder=EveryOther())
    with pytest.raises(
        ValueError,
        match="--tokenizer bpe cannot train a BPE, because records of this kind have no text",
    ):
        prepare_store(replace(asked, out=f"{asked.out}-bpe", tokenizer="bpe"), encoder=EveryOther())
    assert not (tmp_path / "x-bpe.parts").exists()


@pytest.mark.process
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


@dataclass(frozen=True)
class Dies(EveryOther):
    """Ends its process at the record of 8 documents, as the kernel does when memory is short."""

    def encode(self, record):
        if len(record["numbers"]) == 8 and parent_process() is not None:
            os._exit(9)
        return super().encode(record)


@pytest.mark.process
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
