"""Tests trained tokens of a store: bytes, counts against brute force, damage, plans and labels."""

import json
import os
import pickle
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, TokenStore, TokenStoreWriter, verify_store
from wlb.data.reader import StoreReader
from wlb.packing import (
    BinMethod,
    BoundedPacker,
    CapacityPacker,
    FixedPacker,
    OriginalPacker,
    Packer,
    PackerOptions,
    VarLenPacker,
    WindowCut,
)
from wlb.parallel.rows import rank_labels
from wlb.plan import IGNORE, UNCOUNTED, PlannerState, UserError
from wlb.planner import Planner
from wlb.sharding.paper import per_document


def write(prefix, documents, **options):
    """Writes a store of documents, each (length or tokens, spans or None)."""
    with TokenStoreWriter(prefix, vocab_size=1000, **options) as writer:
        for tokens, spans in documents:
            writer.add(np.arange(tokens) if isinstance(tokens, int) else tokens, spans)
    return TokenStore(prefix)


@st.composite
def masks(draw: st.DrawFn) -> list[np.ndarray]:
    """Draws which tokens are trained, of 1 to 6 documents of 1 to 40 tokens."""
    bits = st.lists(st.booleans(), min_size=1, max_size=40)
    return [np.array(mask) for mask in draw(st.lists(bits, min_size=1, max_size=6))]


def spans_of(mask: np.ndarray) -> np.ndarray:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return edges.reshape(-1, 2)


def store_of(folder: str, all_masks: list[np.ndarray]) -> TokenStore:
    return write(Path(folder, "s"), [(mask.size, spans_of(mask)) for mask in all_masks])


def labels_of(mask: np.ndarray, start: int, stop: int) -> int:
    """Labels token by token: token t of the piece is labelled by token t + 1 of the document."""
    return sum(bool(mask[t + 1]) for t in range(start, stop) if t + 1 < mask.size)


def test_the_bytes_on_disk(tmp_path):
    store = write(tmp_path / "s", [(5, [[1, 2], [3, 5]]), (3, []), (4, [[0, 1], [1, 3]])])
    checksum = bytes.fromhex(json.loads((tmp_path / "s.json").read_text())["checksum"])
    assert (tmp_path / "s.targets").read_bytes() == (
        b"WLBTGTS\0"
        + struct.pack("<QQQQ", 1, 3, 12, 3)  # version, documents, tokens, spans
        + checksum
        + struct.pack("<3q", 1, 3, 9)  # document 2 starts at 8; its first token is never trained
        + struct.pack("<3q", 2, 5, 11)
    )
    assert store.num_targets.tolist() == [3, 0, 2]
    assert store.trained(0).tolist() == [False, True, False, True, True]
    assert store.trained(2, 1, 4).tolist() == [True, True, False]
    assert store.count_targets([0, 0, 2], [0, 2, 3], [2, 5, 4]).tolist() == [1, 2, 0]
    assert pickle.loads(pickle.dumps(store)).num_targets.tolist() == [3, 0, 2]
    verify_store(store.prefix)


@given(masks(), st.data())
def test_counts_are_those_of_a_brute_force(all_masks, data):
    with TemporaryDirectory() as folder:
        store = store_of(folder, all_masks)
        expected = [int(mask[1:].sum()) for mask in all_masks]
        assert store.num_targets.tolist() == expected
        pieces = []
        for row, mask in enumerate(all_masks):
            start = data.draw(st.integers(0, mask.size - 1))
            stop = data.draw(st.integers(start + 1, mask.size))
            pieces.append((row, start, stop))
            real = mask.copy()
            real[0] = False
            assert store.trained(row, start, stop).tolist() == real[start:stop].tolist()
        rows, starts, stops = np.array(pieces).T
        found = store.count_targets(rows, starts, stops).tolist()
        assert found == [labels_of(all_masks[r], a, b) for r, a, b in pieces]


def test_a_store_without_targets_trains_all_but_the_first(tmp_path):
    store = write(tmp_path / "s", [(4, None), (1, None)])
    assert not (tmp_path / "s.targets").exists()
    assert "targets" not in json.loads((tmp_path / "s.json").read_text())
    assert not store.has_targets
    assert store.num_targets.tolist() == [3, 0]
    assert store.trained(0).tolist() == [False, True, True, True]
    assert store.trained(0, 2, 4).tolist() == [True, True]
    assert store.count_targets([0, 0, 1], [0, 2, 0], [2, 4, 1]).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[2, 4], [3, 5]], r"span 1 of trained tokens is \[3, 5\), .* must not start before 4"),
        (
            [[4, 9]],
            r"document 1 of .*: span 0 of trained tokens is \[4, 9\), but must be in \[0, 6\)",
        ),
        ([[3, 2]], r"span 0 of trained tokens is \[3, 2\)"),
        ([[-1, 2]], r"span 0 of trained tokens is \[-1, 2\)"),
        ([1, 2], r"trained. has shape \(2,\)"),
        ([[1.0, 2.0]], "dtype float64, but must be an integer array"),
        (None, "document 1 of .* has no spans of trained tokens, unlike the documents before it"),
    ],
)
def test_writer_refuses_spans_that_cannot_be(tmp_path, spans, message):
    with TokenStoreWriter(tmp_path / "s", vocab_size=10) as writer:
        writer.add(np.arange(3), [[1, 3]])
        with pytest.raises(ValueError, match=message):
            writer.add(np.arange(6), spans)
        writer.add(np.arange(2), [[1, 2]])
    assert TokenStore(tmp_path / "s").num_targets.tolist() == [2, 1]


def test_writer_refuses_spans_after_documents_without(tmp_path):
    with TokenStoreWriter(tmp_path / "s", vocab_size=10) as writer:
        writer.add([1, 2])
        with pytest.raises(ValueError, match=r"document 1 of .* has spans of trained tokens"):
            writer.add([1, 2], [[1, 2]])


def test_damaged_files_are_refused(tmp_path):
    write(tmp_path / "s", [(5, [[1, 2], [3, 5]]), (3, [[1, 2]])])
    good = (tmp_path / "s.targets").read_bytes()

    def refused(data, message):
        (tmp_path / "s.targets").write_bytes(data)
        with pytest.raises(ValueError, match=message):
            TokenStore(tmp_path / "s")

    refused(good[:-8], r"has 112 bytes, but must have 120 bytes for 3 spans; copy")
    refused(good[:20], "is not a list of trained tokens")
    refused(b"x" * len(good), "is not a list of trained tokens")
    refused(good[:8] + b"\x07" + good[9:], "has format version 7")
    crossing = good[:-48] + struct.pack("<6q", 1, 3, 6, 2, 6, 7)
    refused(
        crossing,
        r"span 1 of trained tokens is \[3, 6\), but spans must not be empty, must start after",
    )
    refused(
        good[:-48] + struct.pack("<6q", 1, 2, 6, 2, 5, 7), r"span 1 of trained tokens is \[2, 5\)"
    )
    other = good[:-48] + struct.pack("<6q", 1, 3, 6, 2, 4, 7)  # plausible, but other tokens
    (tmp_path / "s.targets").write_bytes(other)
    with pytest.raises(ValueError, match="the trained tokens changed"):
        verify_store(str(tmp_path / "s"))
    (tmp_path / "s.targets").unlink()
    with pytest.raises(ValueError, match="is missing, so wlb cannot know which tokens"):
        TokenStore(tmp_path / "s")


def test_targets_of_another_store_are_refused(tmp_path):
    write(tmp_path / "s", [([1, 2, 3], [[1, 3]])])
    write(tmp_path / "other", [([1, 2, 4], [[1, 3]])])
    write(tmp_path / "plain", [([1, 2, 3], None)])
    os.replace(tmp_path / "other.targets", tmp_path / "s.targets")
    with pytest.raises(ValueError, match=r"s\.targets belongs to another store"):
        TokenStore(tmp_path / "s")
    os.replace(tmp_path / "s.targets", tmp_path / "plain.targets")
    with pytest.raises(ValueError, match=r"plain\.targets belongs to another store"):
        TokenStore(tmp_path / "plain")


def test_a_plain_store_replaces_one_with_targets(tmp_path):
    write(tmp_path / "s", [(5, [[1, 2]])])
    store = write(tmp_path / "s", [(5, None)])
    assert store.num_targets.tolist() == [4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.bin", "s.idx", "s.json"]


def test_leaving_the_writer_by_an_exception_leaves_no_trace(tmp_path):
    def fail():
        with TokenStoreWriter(tmp_path / "s", vocab_size=10) as writer:
            writer.add([1, 2], [[1, 2]])
            raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_global_batches_leave_targets_to_be_counted(tmp_path):
    store = write(tmp_path / "s", [(5, [[1, 2], [3, 5]]), (3, [])])
    stream = GlobalBatches(store, tokens_per_batch=8, seed=0, epochs=2, shuffle=False)
    for batch, _ in stream.iterate():
        assert batch.documents.num_targets.tolist() == [UNCOUNTED, UNCOUNTED]
    other = write(tmp_path / "s", [(5, [[1, 2]]), (3, [])])
    with pytest.raises(ValueError, match="the checkpoint was made with targets"):
        GlobalBatches(other, tokens_per_batch=8, seed=0, epochs=2, shuffle=False).next(
            stream.start()
        )


def packers(window: int, num: int) -> list[Packer]:
    options = PackerOptions(
        num_micro_batches=num,
        context_window=window,
        cost=FlopsWorkload(quadratic_ns=1, linear_ns_per_token=10),
    )
    s_max = 2 * window
    return [
        *(OriginalPacker(options=options, cut=cut) for cut in WindowCut),
        FixedPacker(options=options, window_batches=2),
        VarLenPacker(options=options, s_max=s_max, queue_thresholds=(window // 2 + 1,)),
        VarLenPacker(options=options, s_max=s_max, queue_thresholds=(), literal=True),
        BoundedPacker(options=options, s_max=s_max),
        *(CapacityPacker(options=options, method=method) for method in BinMethod),
    ]


@pytest.mark.full
@given(masks(), st.integers(2, 16), st.integers(1, 3))
def test_plans_of_every_policy_count_the_labels_of_the_store(all_masks, window, num):
    with TemporaryDirectory() as folder:
        store = store_of(folder, all_masks)
        reader = StoreReader(store.prefix, 1000)
        for packer in packers(window, num):
            source = GlobalBatches(store, tokens_per_batch=window * num, seed=1, epochs=2)
            planner = Planner(
                source=source,
                packer=packer,
                baseline=None,
                cost=FlopsWorkload(quadratic_ns=1, linear_ns_per_token=10),
            )
            total = 0
            for plan in planner.steps():
                total += plan.num_targets
                assert plan.predicted.num_targets == plan.num_targets
                for batch in plan.packing.micro_batches:
                    sharding = per_document(batch.lengths, cp=1)
                    rows = max(1, batch.num_tokens)
                    found = rank_labels(batch, sharding, 0, rows, reader)
                    assert int((found != IGNORE).sum()) == batch.num_targets
            assert total == 2 * int(store.num_targets.sum()), packer


def test_a_state_in_json_and_another_number_of_micro_batches_keep_the_counts(tmp_path):
    rng = np.random.default_rng(0)
    store = store_of(str(tmp_path), [rng.random(n) < 0.3 for n in (40, 7, 33, 5, 21, 18)])
    source = GlobalBatches(store, tokens_per_batch=64, seed=0, epochs=1)
    at = {
        num: Planner(
            source=source,
            packer=packers(16, num)[2],
            baseline=None,
            cost=packers(16, num)[2].options.cost,
        )
        for num in (2, 4)
    }
    plan = at[2].next(at[2].start())
    assert plan is not None
    assert plan.state.ready  # the next plan was made already, and is to be packed again
    state = PlannerState.from_json(json.loads(json.dumps(plan.state.to_json())))
    rest = sum(step.num_targets for step in at[4].steps(state))
    assert plan.num_targets + rest == int(store.num_targets.sum())


def test_labels_are_literal(tmp_path):
    """Of tokens 10..15, cut into [0, 3) and [3, 6), 12, 13 and 15 are trained."""
    tokens = [10, 11, 12, 13, 14, 15]
    store = write(tmp_path / "s", [(tokens, [[2, 4], [5, 6]])])
    source = GlobalBatches(store, tokens_per_batch=6, seed=0, epochs=1)
    packer = packers(3, 2)[0]
    planner = Planner(source=source, packer=packer, baseline=packer, cost=packer.options.cost)
    plan = planner.next(planner.start())
    assert plan is not None
    assert plan.baseline is not None
    assert plan.baseline.num_targets == 3
    assert plan.packing.pieces.num_targets.tolist() == [2, 1]
    reader = StoreReader(store.prefix, 1000)
    rows = [
        rank_labels(batch, per_document(batch.lengths, cp=1), 0, 4, reader).tolist()
        for batch in plan.packing.micro_batches
    ]
    assert rows == [[-100, 12, 13, -100], [-100, 15, -100, -100]]
    assert reader.read(0, 0, 6).tolist() == tokens


def test_a_plan_that_is_not_counted_refuses_to_say_its_labels(tmp_path):
    store = write(tmp_path / "s", [(6, [[2, 4]])])
    batch, _ = next(iter(GlobalBatches(store, tokens_per_batch=6, seed=0, epochs=1).iterate()))
    packer = packers(3, 2)[0]
    (plan,), _ = packer.push(batch, packer.start())
    for counted in (plan, plan.micro_batch(0)):
        with pytest.raises(UserError, match=r"labels of document 0 .* wlb\.planner\.Planner"):
            _ = counted.num_targets
