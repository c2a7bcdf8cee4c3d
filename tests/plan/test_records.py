"""Records: literal splits, cuts, views, digests, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb.plan import (
    Carry,
    DocumentIds,
    Documents,
    PackingPlan,
    Pieces,
    PlannerState,
    ShardingPlan,
    StepMetrics,
    StepPlan,
    cut_at,
    digest,
    imbalance,
    int_array,
    local_tokens,
    merge,
    predict,
    ranges,
    row_multiple,
    split_long,
)


def spans(pieces: Pieces) -> list[tuple[int, int, int]]:
    columns = (pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist())
    return list(zip(*columns, strict=True))


def test_long_documents_become_pieces_of_a_window() -> None:
    pieces = split_long(Documents.from_lengths([5, 12, 10]), window=5, long_documents="split")
    assert spans(pieces) == [(0, 0, 5), (1, 0, 5), (1, 5, 10), (1, 10, 12), (2, 0, 5), (2, 5, 10)]
    # A part that ends before its document is labelled to its end; a document's last token is not.
    assert pieces.num_targets.tolist() == [4, 5, 5, 1, 5, 4]


def test_long_documents_can_be_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 12 tokens, more than the context window"):
        split_long(Documents.from_lengths([5, 12]), window=5, long_documents="refuse")
    with pytest.raises(ValueError, match="'truncate'"):
        split_long(Documents.from_lengths([5, 12]), window=5, long_documents="truncate")


def test_a_document_with_labels_on_some_tokens_is_not_cut() -> None:
    zero = [0]
    documents = Documents(id=[7], length=[12], num_targets=[3], source=zero)
    with pytest.raises(ValueError, match="document 7 has 3 labels on 12 tokens"):
        split_long(documents, window=5, long_documents="split")


def test_cut_keeps_every_token_and_label() -> None:
    pieces = split_long(Documents.from_lengths([4, 6]), window=9, long_documents="split")
    cut = cut_at(pieces, [2, 4, 9, 100])
    assert spans(cut) == [(0, 0, 2), (0, 2, 4), (1, 0, 5), (1, 5, 6)]
    assert cut.num_targets.tolist() == [2, 1, 5, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([3, 0], r"lengths\[1\] = 0 must be at least 1"),
        ([3, -2], r"= -2 must be at least 1"),
        ([3.0, float("nan")], r"\[1\] = nan is not a whole number"),
        ([2.5], r"\[0\] = 2.5 is not a whole number"),
        ([[1, 2]], "one axis"),
        (["a"], "must hold integers"),
    ],
)
def test_bad_lengths_are_named(bad: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Documents.from_lengths(bad)


def test_columns_are_read_only_and_of_one_length() -> None:
    documents = Documents.from_lengths([3, 4])
    with pytest.raises(ValueError, match="read-only"):
        documents.length[0] = 9
    with pytest.raises(ValueError, match="differ in length"):
        Documents(id=[1], length=[1, 2], num_targets=[0], source=[0])


def plan() -> PackingPlan:
    return PackingPlan(
        step=3,
        policy="literal",
        pieces=split_long(Documents.from_lengths([5, 2, 9]), window=9, long_documents="split"),
        offsets=[0, 2, 2, 3],
        workload_ns=[30, 0, 90],
        num_held_tokens=4,
    )


def test_micro_batches_are_views() -> None:
    first, empty, last = plan().micro_batches
    assert first.lengths.tolist() == [5, 2]
    assert first.cu_seqlens.tolist() == [0, 5, 7]
    assert first.num_targets == 5
    assert (empty.num_tokens, empty.cu_seqlens.tolist()) == (0, [0])
    assert (last.num_tokens, last.workload_ns) == (9, 90)
    assert plan().tokens.tolist() == [7, 0, 9]


def test_plan_offsets_must_divide_the_pieces() -> None:
    with pytest.raises(ValueError, match="do not divide 3 pieces"):
        PackingPlan(step=0, policy="x", pieces=plan().pieces, offsets=[0, 2], workload_ns=[1])


def test_plans_and_carries_survive_json() -> None:
    again = PackingPlan.from_json(json.loads(json.dumps(plan().to_json())))
    assert again.digest() == plan().digest()
    assert again.pieces == plan().pieces
    carry = Carry(policy="p", pieces=plan().pieces, slot=[0, 1, 1], next_step=7)
    back = Carry.from_json(json.loads(json.dumps(carry.to_json())))
    assert back.pieces == carry.pieces
    assert back.slot.tolist() == [0, 1, 1]
    assert back.in_slot(1).document.tolist() == [1, 2]


def test_files_from_before_columns_were_renamed_are_read(tmp_path: Path) -> None:
    columns = {"document": [3], "start": [0], "stop": [4], "num_targets": [3], "source": [0]}
    data = {"policy": "p", "pieces": {**columns, "arrival": [2]}, "slot": [0], "next_step": 5}
    carry = Carry.from_json(data)
    assert carry.pieces.arrival_step.tolist() == [2]
    assert carry.to_json() == data
    carry.save(tmp_path / "carry.npz")
    assert "arrival" in np.load(tmp_path / "carry.npz").files
    assert Carry.load(tmp_path / "carry.npz").pieces == carry.pieces


def test_ids_count_on_from_epoch_to_epoch() -> None:
    ids = DocumentIds(num_documents=10)
    assert ids.of(2, int_array("row", [0, 7])).tolist() == [20, 27]
    assert ids.row(27) == 7


@pytest.mark.parametrize("kind", [Carry, PackingPlan, PlannerState, ShardingPlan, StepPlan])
@pytest.mark.parametrize(
    "data", [{}, [], None, 3, {"pieces": {}}, {"pieces": 3}, {"more": 1}, {"carry": [1]}]
)
def test_what_is_no_record_is_refused_by_its_name(kind: Any, data: Any) -> None:
    with pytest.raises(ValueError, match=r"this is no [a-z ]+ as `to_json` writes it \(.+\); give"):
        kind.from_json(data)


def test_a_record_that_lacks_a_value_is_refused_with_its_name() -> None:
    data = plan().to_json()
    del data["offsets"]
    with pytest.raises(ValueError, match=r"no packing plan .* missing .* 'offsets'"):
        PackingPlan.from_json(data)
    with pytest.raises(
        ValueError, match=r"no carry as `to_json` writes it \('pieces' is missing\)"
    ):
        Carry.from_json({"policy": "p", "slot": [], "next_step": 0})
    with pytest.raises(ValueError, match="do not divide 3 pieces"):  # the record's own words
        PackingPlan.from_json({**plan().to_json(), "offsets": [0, 2]})
    with pytest.raises(ValueError, match="no packing plan"):
        PackingPlan.from_json({**plan().to_json(), "offsets": []})


def test_predicted_metrics() -> None:
    metrics = predict(plan(), num_padding_tokens=2)
    assert metrics.imbalance == pytest.approx(90 * 3 / 120)
    assert (metrics.mean_delay, metrics.max_delay) == (3.0, 3)
    assert (metrics.num_documents, metrics.num_tokens, metrics.num_targets) == (3, 16, 13)
    assert StepMetrics.from_json(json.loads(json.dumps(metrics.to_json()))) == metrics
    assert imbalance(int_array("w", [0, 0])) == 1.0


def test_a_token_that_is_trained_early_does_not_cancel_another_ones_delay() -> None:
    # At step 3: 5 tokens a step late, 2 in time, 9 two steps early.
    pieces = replace(plan().pieces, arrival_step=int_array("arrival_step", [2, 3, 5]))
    metrics = predict(replace(plan(), pieces=pieces))
    assert (metrics.mean_delay, metrics.max_delay) == (5 / 16, 1)
    early = replace(plan(), pieces=replace(plan().pieces, arrival_step=[4, 4, 4]))
    assert (predict(early).mean_delay, predict(early).max_delay) == (0.0, 0)


def test_digest_sees_bytes_order_and_kind() -> None:
    a, b = int_array("a", [1, 2]), int_array("b", [2, 1])
    assert digest(a) == digest(int_array("again", np.array([1, 2], np.int32)))
    assert len({digest(a), digest(b), digest(a, b), digest(b, a), digest("1"), digest(1)}) == 6
    assert digest(a) < 2**60


@pytest.mark.parametrize(
    ("tokens", "cp", "q", "rows"),
    [(0, 4, 2, 2), (1, 1, 1, 1), (16, 2, 4, 8), (17, 2, 4, 12), (131072, 2, 128, 65536)],
)
def test_rows_of_a_rank(tokens: int, cp: int, q: int, rows: int) -> None:
    assert local_tokens(tokens, cp=cp, row_multiple=q) == rows


def test_quantum_is_the_least_common_multiple() -> None:
    assert row_multiple(4, 6) == 12
    with pytest.raises(ValueError, match="tp = 0"):
        row_multiple(0, 1)


def test_ranges() -> None:
    start, stop = int_array("a", [3, 0, 7]), int_array("b", [5, 1, 7])
    assert ranges(start, stop).tolist() == [3, 4, 0]


@pytest.mark.parametrize("values", [[1e300], [float(2**63)], np.array([2**63 + 5], np.uint64)])
def test_numbers_beyond_64_bits_are_refused(values) -> None:
    with pytest.raises(ValueError, match="beyond 64-bit integers"):
        int_array("n", values)


def test_steps_merge_into_one() -> None:
    other = PackingPlan(
        step=4, policy="literal", pieces=plan().pieces, offsets=[0, 1, 2, 3], workload_ns=[40] * 3
    )
    both = merge(predict(plan()), predict(other))
    assert merge(None, predict(plan())) == predict(plan())
    assert (both.step, both.num_tokens, both.num_documents) == (4, 32, 6)
    assert both.max_workload_ns == 90 + 40
    assert both.imbalance == pytest.approx((90 + 40) / (40 + 40))
    assert (both.mean_delay, both.max_delay) == (3.5, 4)
