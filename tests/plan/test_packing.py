"""Tests packing plans and carries: views of micro-batches, JSON and files."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.plan.case import plan
from wlb.plan import Carry, PackingPlan


def test_micro_batches_are_views() -> None:
    first, empty, last = plan().micro_batches
    assert first.lengths.tolist() == [5, 2]
    assert first.cu_seqlens.tolist() == [0, 5, 7]
    assert first.num_targets == 5
    assert (empty.num_tokens, empty.cu_seqlens.tolist()) == (0, [0])
    assert (last.num_tokens, last.workload_ns) == (9, 90)
    assert plan().tokens.tolist() == [7, 0, 9]


def test_plan_offsets_must_divide_the_pieces() -> None:
    with pytest.raises(ValueError, match="must increase from 0 to 3, the number of pieces"):
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
