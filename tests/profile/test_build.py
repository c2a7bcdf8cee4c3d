"""Tests that records which lack what their kind has end a fit with one line."""

import pytest
import torch

from wlb.plan import UserError
from wlb.profile.attention import AttentionGrid, HeadLayout
from wlb.profile.build import SweepOrigin, build
from wlb.profile.tasks import Record
from wlb.spec import load

LAYOUT = HeadLayout(
    backend="sdpa",
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
GRID = AttentionGrid(
    lengths=(8, 16), held_pairs=1, batches=1, held_batches=1, batch_tokens=(16,), budget_s=0.1
)
ENVIRONMENT = {
    "name": "a CPU",
    "device": "cpu",
    "dtype": "float32",
    "starts": [{"date": "2026-01-01", "commit": "", "command": "wlb profile"}],
}


def record(kind: str, **point: int) -> Record:
    return Record(kind=kind, point={**LAYOUT.name, **point}, numbers={"forward_spread": 0.1})


def test_a_record_without_its_time_is_named() -> None:
    records = [record("call"), record("grid", q=8, k=8), record("grid", q=16, k=8)]
    origin = SweepOrigin(name="made", environment=ENVIRONMENT)
    with pytest.raises(UserError, match="a record of the sweep has no entry 'forward_ns'"):
        build(records, model=load("demo").model, layouts=[LAYOUT], grid=GRID, origin=origin)
