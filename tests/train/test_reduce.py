"""Tests the one all-reduce per step: equal plans pass, any difference stops all, sums are exact."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.test_compose import planner
from tests.sets import full
from wlb.launch.local import run_local
from wlb.parallel.mesh import Coordinates, build_mesh
from wlb.parallel.world import World
from wlb.plan import (
    DIGEST_BITS,
    FloatArray,
    KeyExchange,
    KeyRows,
    PipelinePlan,
    StepPlan,
    int_array,
    key_rows,
)
from wlb.sharding.paper import per_document, per_sequence
from wlb.spec import ParallelSpec
from wlb.train.reduce import PlanMismatch, StepReducer

STRATEGIES = ("per_sequence", "per_document")


def step_one(pipeline: int) -> tuple[StepPlan, PipelinePlan]:
    """Returns step 1 of the planner tests' run: 4 micro-batches, 2 pipelines of 2 CP ranks."""
    made = planner()
    first = made.next(made.start())
    assert first is not None
    plan = made.next(first.state)
    assert plan is not None
    return plan, made.shard(plan, pipeline)


def one_token_less(plan: StepPlan) -> StepPlan:
    """Returns the same step, but its longest piece ends a token earlier."""
    pieces = plan.packing.pieces
    longest = int(pieces.length.argmax())
    stop = pieces.stop.copy()
    stop[longest] -= 1
    packing = replace(plan.packing, pieces=replace(pieces, stop=stop))
    return replace(plan, packing=packing)


def sharded_otherwise(mine: PipelinePlan) -> PipelinePlan:
    """Returns the same micro-batches, each sharded by the strategy that was not chosen."""
    other = {"per_sequence": per_document, "per_document": per_sequence}
    shardings = tuple(other[s.strategy](s.lengths, cp=s.cp) for s in mine.shardings)
    return replace(mine, shardings=shardings)


def outcome(world: World, parallel: ParallelSpec, wrong_rank: int, wrong: str) -> str:
    """Returns what a rank gets from the reducer when `wrong_rank` has a `wrong` plan: "" or the
    error.
    """
    mesh = build_mesh(parallel, torch.device("cpu"))
    plan, mine = step_one(mesh.at.dp)
    ahead = [(plan, mine)]
    if world.rank == wrong_rank:
        match wrong:
            case "token":
                ahead = [(one_token_less(plan), mine)]
            case "sharding":
                ahead = [(plan, sharded_otherwise(mine))]
            case "ended":
                ahead = []
            case "longer":
                ahead = [(plan, mine), (plan, mine)]
    try:
        StepReducer(mesh, STRATEGIES).reduce(ahead)
    except PlanMismatch as error:
        return str(error)
    return ""


PIPELINES = ParallelSpec(cp=2, dp=2)


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel", [ParallelSpec(tp=2, dp=1), *full(PIPELINES)], ids=["tp2", "cp2dp2"]
)
def test_equal_plans_pass(parallel: ParallelSpec) -> None:
    """Two pipelines shard different micro-batches, which is no mismatch."""
    world = parallel.world_size
    results = run_local(outcome, world, parallel, -1, "", start_group=True, timeout_s=600)
    assert results == [""] * world


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("token", "the packing of the coming steps differently (steps: 1;"),
        ("sharding", "the sharding of pipeline 1 of the coming steps differently (steps: 1;"),
        ("longer", "the packing of the coming steps differently (steps: 1"),
    ],
)
def test_a_difference_on_one_rank_stops_every_rank(wrong: str, expected: str) -> None:
    # Rank 3 of cp 2 x dp 2 is in pipeline 1.
    results = run_local(outcome, 4, PIPELINES, 3, wrong, start_group=True, timeout_s=600)
    for rank, message in enumerate(results):
        assert f"ranks planned {expected}" in message
        assert f"on rank {rank}: " in message
        assert "compare these between nodes" in message
    plan, _ = step_one(0)
    assert f"{plan.digest():015x}" in results[0]


@pytest.mark.full
@pytest.mark.dist
def test_data_that_ends_on_one_rank_alone_stops_every_rank() -> None:
    results = run_local(outcome, 4, PIPELINES, 1, "ended", start_group=True, timeout_s=600)
    for rank in (0, 2, 3):
        assert "(steps: 1;" in results[rank]
    assert "(steps: none, because this rank's data has ended;" in results[1]


def sums(world: World) -> tuple[float, float, dict[str, int], KeyRows | None]:
    mesh = build_mesh(ParallelSpec(tp=2, cp=1, dp=2), torch.device("cpu"))
    plan, mine = step_one(mesh.at.dp)
    got = StepReducer(mesh, STRATEGIES).reduce(
        [(plan, mine)],
        loss=torch.tensor(1.5 + mesh.at.dp),
        gradient_square=torch.tensor(float(world.rank + 1), dtype=torch.float64),
        done=mine,
    )
    return got.loss, got.gradient_norm, got.shardings, got.key_rows


@pytest.mark.full
@pytest.mark.dist
def test_sums_count_every_pipeline_once() -> None:
    """Tp ranks hold copies of the loss; gradient shares are disjoint: 1 + 2 + 3 + 4."""
    chosen = [s.strategy for d in range(2) for s in step_one(d)[1].shardings]
    expected = {name: chosen.count(name) for name in STRATEGIES}
    assert sum(expected.values()) == 4
    pipelines = [step_one(d)[1] for d in range(2)]
    rows = [key_rows(mine.shardings, mine.local_tokens) for mine in pipelines]
    for got in run_local(sums, 4, start_group=True, timeout_s=600):
        assert got == (1.5 + 2.5, 10.0**0.5, expected, rows[0] + rows[1])


def test_one_rank_of_a_pipeline_counts_what_its_cp_ranks_exchange() -> None:
    _, mine = step_one(0)
    needed = replace(mine.shardings[0], exchange=KeyExchange.NEEDED)
    mine = replace(mine, shardings=(needed, *mine.shardings[1:]))
    for tp, counted in ((0, True), (1, False)):
        mesh: Any = SimpleNamespace(
            parallel=ParallelSpec(), world_size=1, at=Coordinates(tp=tp, cp=0, pp=0, dp=0)
        )
        reducer = StepReducer(mesh, STRATEGIES)
        rows = key_rows(mine.shardings, mine.local_tokens) if counted else KeyRows()
        assert rows.num_by_need == counted
        assert reducer._counts(mine)[2:5] == [rows.num_by_need, rows.received, rows.gathered]


def simulated(digests: list[int], pipeline_digest: int = 5) -> bool:
    """Returns whether the check passes for ranks (tp only) with these plan digests, in one
    process.
    """
    num = len(digests)
    parallel = ParallelSpec(tp=num, dp=1)
    mesh: Any = SimpleNamespace(
        parallel=parallel, world_size=num, at=Coordinates(0, 0, 0, 0), rank=0
    )
    reducer = StepReducer(mesh, STRATEGIES)

    def ahead(number: int) -> Any:
        plan = SimpleNamespace(step=7, digest=lambda: number)
        return [(plan, SimpleNamespace(digest=lambda: pipeline_digest))]

    total = np.sum([reducer._digests(ahead(d)) for d in digests], 0).ravel().tolist()
    try:
        reducer._check(total, ahead(digests[0]))
    except PlanMismatch:
        return False
    return True


NUMBERS = st.integers(0, 2**DIGEST_BITS - 1)


@given(st.lists(NUMBERS, min_size=2, max_size=6), st.integers(0, DIGEST_BITS - 1))
def test_the_check_passes_exactly_for_equal_digests(numbers: list[int], bit: int) -> None:
    assert simulated(numbers) == (len(set(numbers)) == 1)
    same = [numbers[0]] * len(numbers)
    assert simulated(same)
    assert not simulated([*same, numbers[0] ^ (1 << bit)])


def test_the_check_is_exact_for_eight_million_ranks() -> None:
    """With the largest chunks, one of 2^23 - 1 ranks that differs by one in one chunk is still
    seen.
    """
    ranks = 2**23 - 1
    mesh: Any = SimpleNamespace(
        parallel=ParallelSpec(tp=ranks, dp=1), world_size=ranks, at=Coordinates(0, 0, 0, 0), rank=0
    )
    reducer = StepReducer(mesh, STRATEGIES)
    largest = 2**DIGEST_BITS - 1

    def vector(number: int) -> FloatArray:
        plan: Any = SimpleNamespace(step=0, digest=lambda: number)
        return reducer._digests([(plan, plan)])

    reducer._check((vector(largest) * ranks).tolist(), [])
    total = vector(largest) * (ranks - 1) + vector(largest - 1)
    with pytest.raises(PlanMismatch, match="the packing"):
        reducer._check(total.tolist(), [])


def test_literal_digests_of_two_ranks() -> None:
    """1 and 3 have sum 4 and squares 10, and 2 * 10 != 16; 3 and 3 have 2 * 18 == 36."""
    assert not simulated([1, 3])
    assert simulated([3, 3])


def test_a_change_of_a_workload_alone_is_a_mismatch() -> None:
    """Costs decide later plans, so they are part of what must be equal."""
    plan, _ = step_one(0)
    workload = plan.packing.workload_ns + int_array("one", [1, 0, 0, 0])
    other = replace(plan, packing=replace(plan.packing, workload_ns=workload))
    assert other.digest() != plan.digest()
