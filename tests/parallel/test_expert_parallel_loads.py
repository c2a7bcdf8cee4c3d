"""Tests how loads of experts are counted, with two EP ranks of which one is written down here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wlb.model import ExpertRows, Llama
from wlb.parallel import expert_parallel
from wlb.parallel.mesh import EP, Coordinates
from wlb.plan import ExpertLoad
from wlb.spec import ExpertsSpec, ModelSpec, ParallelSpec
from wlb.train.reduce import StepReducer

MODEL = ModelSpec(
    vocab_size=256,
    num_layers=3,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    experts=ExpertsSpec(num=4, per_token=1, hidden_size=8),
)
OWN = ([3, 1, 0, 0], [0, 0, 2, 2])
"""Rows of each expert from this rank, by micro-batch."""
OTHER = ([1, 0, 1, 0], [0, 1, 1, 1])


def test_ranks_wait_for_the_most_loaded_one_of_each_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EP rank 0 has experts 0 and 1: 5 and 1 rows of 6 and 7, so that 5 + 6 are waited for."""
    with torch.device("meta"):
        stage = Llama(MODEL, layers=range(1, 2), is_first=False, is_last=False)
    (mixture,) = expert_parallel.mixtures_of(stage)
    rows: list[Any] = []
    for counts in OWN:
        told = ExpertRows(num=4)
        told.counts[mixture] = torch.tensor(counts)
        rows.append(SimpleNamespace(experts=told))
    groups = {axis: SimpleNamespace(size=lambda n=2 - (axis != EP): n) for axis in ("ep", "other")}
    mesh: Any = SimpleNamespace(
        parallel=ParallelSpec(dp=2, ep=2),
        world_size=2,
        expert_axes=("expert_shard", "ep"),
        at=Coordinates(0, 0, 0, 0),
        experts=SimpleNamespace(get_group=lambda axis: groups.get(axis, groups["other"])),
    )
    others = [*torch.tensor([*OTHER]).sum(0).tolist(), 1, 1, 1, 2]
    calls: list[int] = []

    def all_reduce(own: torch.Tensor, group: Any) -> torch.Tensor:
        calls.append(own.numel())
        return own + torch.tensor(others)

    monkeypatch.setattr(expert_parallel, "all_reduce", all_reduce)
    expert_parallel.add_up_loads([stage], rows, mesh)
    assert calls == [4 + 2 * 2]
    assert mixture.load is not None
    assert mixture.load.tolist() == [4, 2, 4, 3]
    values = expert_parallel.load_values([stage], MODEL.num_layers, mesh)
    assert values is not None
    assert values.tolist() == pytest.approx([0, 4 / 3.25, 0, 0, 11 / 6.5, 0, 6, 7])
    reducer = StepReducer(mesh, ("per_document",), MODEL)
    load = reducer._expert_load(values.tolist())
    assert load is not None
    assert load.layers == (1,)
    assert load.rank == pytest.approx((11 / 6.5,))
    assert load.ranks == pytest.approx((6 / 6.5, 7 / 6.5))
    assert ExpertLoad.from_json(load.to_json()).rank == (1.6923,)
    assert reducer._expert_load([0.0] * len(values)) is None
