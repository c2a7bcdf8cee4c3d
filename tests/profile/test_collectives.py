"""Tests collectives between local ranks, under a launcher's ranks, and their fit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from wlb.cost.profile import Collective, CollectiveCost, Provenance, ProvenanceKind, Scope
from wlb.launch.local import run_local
from wlb.parallel import world as worlds
from wlb.profile import SweepOrigin, collectives
from wlb.profile.build import collectives as build_collectives
from wlb.profile.collectives import (
    _points,
    _scopes,
    collective_tasks,
    default_sizes,
    fit_alpha_beta,
)
from wlb.profile.tasks import Record

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SIZES = (4096, 65536)


def _times(alpha: float, rate: float, op: Collective, ranks: int, sizes: Sequence[int]):
    return [alpha + size * op.wire_share(ranks) / rate * 1e9 for size in sizes]


@pytest.mark.parametrize("op", list(Collective))
def test_the_fit_finds_what_the_cost_model_prices(op: Collective):
    cost = CollectiveCost(
        op=op,
        scope=Scope.INTRA_NODE,
        alpha_ns=20_000,
        bytes_per_s=250e9,
        provenance=Provenance(kind=ProvenanceKind.ASSUMED, source="a test"),
    )
    sizes = [4096 << i for i in range(0, 19, 2)]
    times = [cost.time_ns(size, num_ranks=8) for size in sizes]
    fit = fit_alpha_beta(sizes, times, op, 8)
    assert fit.alpha_ns == pytest.approx(20_000, rel=1e-6)
    assert fit.bytes_per_s == pytest.approx(250e9, rel=1e-6)
    assert dict(fit.residuals) == pytest.approx(
        {"fit_median": 0, "fit_max": 0, "leave_one_out_median": 0, "leave_one_out_max": 0}, abs=1e-6
    )


def test_small_and_large_sizes_count_alike():
    sizes = [1 << 12, 1 << 14, 1 << 28, 1 << 30]
    times = np.array(_times(10_000, 1e11, Collective.P2P, 2, sizes)) * [1, 1.1, 1, 1.1]
    fit = fit_alpha_beta(sizes, times.tolist(), Collective.P2P, 2)
    # An absolute fit would leave alpha to chance: 10 us against millisecond errors.
    assert 10_000 <= fit.alpha_ns <= 11_000
    assert 0.045 < dict(fit.residuals)["fit_max"] < 0.06


def test_a_negative_latency_becomes_none():
    sizes = [1 << 12, 1 << 16, 1 << 20]
    times = [size * 1e-1 * (1 + i) for i, size in enumerate(sizes)]
    fit = fit_alpha_beta(sizes, times, Collective.P2P, 2)
    assert fit.alpha_ns == 0
    assert fit.bytes_per_s > 0


def test_a_time_left_out_is_predicted_by_the_others():
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
    times = _times(10_000, 1e10, Collective.ALL_GATHER, 4, sizes)
    times[0] *= 2
    residuals = dict(fit_alpha_beta(sizes, times, Collective.ALL_GATHER, 4).residuals)
    # The others know the truth, so they miss the doubled time by half; a fit to it comes nearer.
    assert residuals["leave_one_out_max"] > residuals["fit_max"]
    assert residuals["leave_one_out_max"] >= 0.4


@pytest.mark.parametrize(
    ("sizes", "times", "ranks", "message"),
    [
        ([4096, 8192], [1.0, 2.0], 2, "at least 3 different sizes"),
        ([4096, 4096, 8192], [1.0, 1.0, 2.0], 2, "at least 3 different sizes"),
        ([4096, 8192, 16384], [1.0, 0.0, 2.0], 2, "with times above 0"),
        ([4096, 8192, 16384], [1.0, 1.0, 2.0], 1, "on 1 ranks"),
        ([4096, 8192, 16384], [3.0, 2.0, 1.0], 2, "do not grow with the buffers' sizes"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    sizes: list[int], times: list[float], ranks: int, message: str
):
    with pytest.raises(ValueError, match=message):
        fit_alpha_beta(sizes, times, Collective.ALL_GATHER, ranks)


def test_times_that_do_not_grow_are_noted_and_do_not_lose_the_sweep():
    def record(op: Collective, size: int, ns: float) -> Record:
        point = {"op": str(op), "scope": str(Scope.INTRA_NODE), "ranks": 2, "bytes": size}
        return Record(kind="collective", point=point, numbers={"ns": ns})

    sizes = (4096, 65536, 1 << 20)
    records = [record(Collective.ALL_GATHER, s, 20_000 + s) for s in sizes]
    records += [record(Collective.P2P, s, 1e12 / s) for s in sizes]
    start = {"date": "2026-11-23", "commit": "abc", "command": "wlb profile"}
    environment = {"device": "cpu", "name": "a CPU", "dtype": "float32", "starts": [start]}
    made, notes = build_collectives(records, SweepOrigin(name="mine", environment=environment))
    costs = {(c.op, c.scope): c for c in made}
    assert len(costs) == len(Collective) * len(Scope)
    assert costs[Collective.ALL_GATHER, Scope.INTRA_NODE].provenance.kind == ProvenanceKind.MEASURED
    (note,) = notes
    assert note.startswith("intra_node p2p: the times ")
    assert "larger buffers; until then the profile has an assumed cost for" in note
    assumed = costs[Collective.P2P, Scope.INTRA_NODE].provenance
    assert assumed.kind == ProvenanceKind.ASSUMED
    assert assumed.source.startswith("measured, but the times could not be fitted: profile cpu")
    beside = costs[Collective.ALL_REDUCE, Scope.INTRA_NODE].provenance.source
    assert beside.startswith("not measured: profile cpu")


def test_points_are_whole_values_a_rank():
    points = _points({Scope.INTRA_NODE: 3}, (4096, 24), 4)
    assert [p.size_bytes for p in points if p.op == Collective.ALL_GATHER] == [24, 4092]
    with pytest.raises(ValueError, match="8 bytes is too small for 3 ranks; use at least 12 bytes"):
        _points({Scope.INTRA_NODE: 3}, (8,), 4)


def test_scopes_of_ranks_by_their_nodes():
    intra, inter = Scope.INTRA_NODE, Scope.INTER_NODE
    assert _scopes([0, 0, 0]) == {intra: (0, 1, 2)}
    assert _scopes([0, 1, 2]) == {inter: (0, 1, 2)}
    assert _scopes([0, 0, 1, 1, 2, 2]) == {intra: (0, 1), inter: (0, 2, 4)}
    assert _scopes([1, 0, 1, 0]) == {intra: (0, 2), inter: (0, 1)}


def test_sizes_follow_the_memory_there_is(monkeypatch: pytest.MonkeyPatch):
    assert default_sizes(CPU) == [
        4 << 10,
        16 << 10,
        64 << 10,
        256 << 10,
        1 << 20,
        4 << 20,
        16 << 20,
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 << 30, 80 << 30))
    assert default_sizes(CUDA)[-1] == 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (200 << 20, 80 << 30))
    assert default_sizes(CUDA)[-1] == 16 << 20


def test_one_gpu_has_nothing_to_measure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with collective_tasks(None, CUDA, dtype=torch.bfloat16) as sweep:
        sweep.follow()
        assert sweep.tasks == []
    assert "sees only one GPU" in sweep.note


@pytest.mark.dist
def test_local_ranks_are_started_once_for_all_points(monkeypatch: pytest.MonkeyPatch):
    launches: list[int] = []

    def counted(fn: Any, world_size: int, *args: Any, **options: Any) -> Any:
        launches.append(world_size)
        return run_local(fn, world_size, *args, **options)

    monkeypatch.setattr(collectives, "run_local", counted)
    with collective_tasks(
        None, CPU, dtype=torch.float32, sizes=SIZES, budget_s=0.0, least=3
    ) as sweep:
        sweep.follow()
        assert launches == []
        found = [(task, task.run()) for task in sweep.tasks]
    assert launches == [2]
    assert [task.point for task, _ in found] == [
        {"op": str(op), "scope": "intra_node", "ranks": 2, "bytes": size}
        for op in Collective
        for size in SIZES
    ]
    for task, numbers in found:
        assert task.kind == "collective"
        assert 0 < numbers["low_ns"] <= numbers["ns"] <= numbers["high_ns"]
        assert numbers["count"] == 3


def _on_two_nodes(world: worlds.World, fails: str) -> list[Any]:
    """Puts rank 3 alone on node 1 and runs the tasks of a sweep.

    Rank 0 returns (scope, op, ranks, numbers or words) of each task.
    """
    if fails == "memory":
        real = collectives._call

        def call(point: collectives.CollectivePoint, place: Any) -> Any:
            if world.rank == 1 and point.op == Collective.REDUCE_SCATTER:
                raise torch.OutOfMemoryError("rank 1 has no room")
            return real(point, place)

        collectives._call = call
    world = replace(world, node_rank=world.rank // 3)
    found: list[Any] = []
    # The sizes that all ranks have room for are measured.
    sizes = (4096,) if world.rank == 2 else (4096, 8192)
    with collective_tasks(
        world, CPU, dtype=torch.float32, sizes=sizes, budget_s=0.0, least=2
    ) as sweep:
        sweep.follow()
        for task in sweep.tasks:
            point = dict(task.point)
            try:
                point["count"] = task.run()["count"]
            except torch.OutOfMemoryError as error:
                point["failed"] = str(error)
            found.append(point)
            if fails == "leader":
                break
    return found


def _ranks(fails: str) -> list[Any]:
    return run_local(_on_two_nodes, 4, fails, start_group=True, timeout_s=600)


@pytest.mark.full
@pytest.mark.dist
def test_started_ranks_measure_within_a_node_and_between_nodes():
    first, *others = _ranks("")
    assert first == [
        {"op": str(op), "scope": scope, "ranks": ranks, "bytes": size, "count": 2}
        for scope, ranks, size in (("intra_node", 3, 4092), ("inter_node", 2, 4096))
        for op in Collective
    ]
    assert others == [[], [], []]


@pytest.mark.full
@pytest.mark.dist
def test_a_rank_out_of_memory_fails_the_point_on_all_and_the_sweep_goes_on():
    first, *_ = _ranks("memory")
    failed = [(p["op"], p["scope"]) for p in first if "failed" in p]
    # Rank 1 is not in the group between nodes.
    assert failed == [("reduce_scatter", "intra_node")]
    assert len(first) == 8


@pytest.mark.full
@pytest.mark.dist
def test_other_ranks_are_let_go_when_rank_0_leaves_early():
    first, *others = _ranks("leader")
    assert (len(first), others) == (1, [[], [], []])


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two NVIDIA GPUs: {NUM_GPUS} here")
def test_between_gpus():
    with collective_tasks(
        None, CUDA, dtype=torch.bfloat16, sizes=(1 << 12, 1 << 24), budget_s=0.01
    ) as sweep:
        found = [(task.point["bytes"], task.run()["ns"]) for task in sweep.tasks]
    assert len(found) == 2 * len(Collective)
    for (_, small_ns), (_, large_ns) in zip(found[::2], found[1::2], strict=True):
        assert 0 < small_ns < large_ns
