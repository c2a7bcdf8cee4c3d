"""Tests the candidates for an exchange by need: valid, near to ideal, documents within nodes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import LLAMA2_7B
from wlb.cost import (
    FlopsWorkload,
    ProfiledWorkload,
    ideal_kernels_ns,
    kernels_ns,
    load_profile,
    summaries_ns,
    waits_ns,
    workload_of_model,
)
from wlb.cost.config_json import counted_of
from wlb.data import lengths_of_family
from wlb.plan import rows_moved, summaries_made
from wlb.sharding import shard
from wlb.sharding.by_need import by_need, few_cuts, spans_of
from wlb.sharding.fill import FillCut, FillPart
from wlb.sharding.paper import cheapest
from wlb.spec import ParallelSpec

FLOPS = FlopsWorkload(quadratic_ns=1)


def h100(tp: int, cp: int) -> ProfiledWorkload:
    return ProfiledWorkload(
        model=replace(LLAMA2_7B, num_layers=1),
        parallel=ParallelSpec(tp=tp, cp=cp, pp=1),
        profile=load_profile("h100"),
        overlaps=True,
    )


def test_spans_of_runs_and_of_symmetric_parts() -> None:
    """Larger parts of a document are further out; the innermost is one span."""
    pieces = np.array([512, 100])
    filled = [
        [FillPart(piece=0, size=128, density=1, cut=FillCut.SYMMETRIC)],
        [
            FillPart(piece=0, size=256, density=1, cut=FillCut.SYMMETRIC),
            FillPart(piece=1, size=40, density=1),
        ],
        [
            FillPart(piece=0, size=128, density=1, cut=FillCut.SYMMETRIC),
            FillPart(piece=1, size=60, density=1, cut=FillCut.RUN, start=40),
        ],
    ]
    filled[1][1].cut = FillCut.RUN
    spans = spans_of(pieces, filled, 3)
    found = sorted(zip(*(x.tolist() for x in spans), strict=True))
    assert found == [
        (0, 0, 128, 1),
        (0, 128, 256, 0),
        (0, 256, 384, 2),
        (0, 384, 384, 0),
        (0, 384, 512, 1),
        (1, 0, 40, 1),
        (1, 40, 100, 2),
    ]


@given(
    st.lists(
        st.one_of(st.integers(1, 9), st.integers(1, 3000), st.integers(1, 60_000)),
        min_size=1,
        max_size=16,
    ),
    st.integers(2, 18),
    st.sampled_from([FLOPS, h100(1, 16), h100(2, 8), h100(8, 4)]),
)
def test_every_candidate_is_a_plan(lengths: list[int], cp: int, cost: FlopsWorkload) -> None:
    for plan in by_need(np.array(lengths), cp=cp, cost=cost):
        plan.validate()


@pytest.mark.parametrize("cp", [4, 8, 16])
def test_the_fitted_stream_is_near_to_ideal(cp: int) -> None:
    """Attention alone, of the best candidate without a node's limits."""
    drawn = lengths_of_family(window=131072, num_documents=400, seed=0).lengths
    cost, slowest, ideal = h100(1, cp), 0, 0
    for pieces in np.array_split(drawn, 8):
        plans = by_need(pieces, cp=cp, cost=cost)
        forward, backward = kernels_ns(plans, cost, cp=cp)
        slowest += int((forward.max(1) + backward.max(1)).min())
        ideal += ideal_kernels_ns(pieces, cost, cp=cp)
    assert slowest <= 1.05 * ideal


def test_short_documents_do_not_leave_a_node_but_for_the_few_tokens_that_make_ranks_equal() -> None:
    rng = np.random.default_rng(0)
    node = np.arange(16) // 8
    for _ in range(5):
        pieces = rng.integers(200, 9000, 40)
        cost = h100(1, 16)
        plans = by_need(pieces, cp=16, cost=cost)
        far = [int(rows_moved(plan)[node[:, None] != node].sum()) for plan in plans]
        near = [plan for plan, rows in zip(plans, far, strict=True) if rows <= 64]
        forward, backward = kernels_ns(near, cost, cp=16)
        slowest = (forward.max(1) + backward.max(1)).min()
        assert slowest <= 1.12 * ideal_kernels_ns(pieces, cost, cp=16)


def test_groups_of_nodes_keep_long_documents_on_fewer_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight ranks, a node each: of four documents of 30K tokens no rank waits for rows of three."""
    pieces, cost = np.array([33_000, 31_000, 30_000, 28_000, *[400] * 20]), h100(8, 8)
    chosen = [cheapest(by_need(pieces, cp=8, cost=cost), cost, exchange="needed")]
    monkeypatch.setattr("wlb.sharding.by_need.GROUPS", ())
    chosen.append(cheapest(by_need(pieces, cp=8, cost=cost), cost, exchange="needed"))
    waits = [waits_ns(plan, cost) for plan in chosen]
    grouped, before = (
        sum(float((k + w).max()) for k, w in zip((p.forward_ns, p.backward_ns), both, strict=True))
        for p, both in zip(chosen, waits, strict=True)
    )
    assert grouped < 0.98 * before


QWEN3_NEXT = workload_of_model(counted_of({"model_type": "qwen3_next"}, "Qwen3-Next"))


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=20), cp=st.integers(2, 6))
def test_candidates_of_few_cuts_are_plans(lengths: list[int], cp: int) -> None:
    pieces = np.array(lengths)
    for plan in few_cuts(pieces, cp=cp, cost=QWEN3_NEXT):
        plan.validate()
        assert plan.tokens.max() - plan.tokens.min() <= 1


@pytest.mark.parametrize(("cp", "most"), [(4, 3.5), (8, 4.0), (16, 4.6)])
def test_balanced_cuts_few_documents_of_models_with_linear_layers(cp: int, most: float) -> None:
    """Means over windows of 128K: summaries of the busiest rank, and attention over ideal."""
    windows = packed_windows(12)
    made: list[int] = []
    attention: list[float] = []
    for pieces in windows:
        plan = shard(pieces, cp=cp, strategy="balanced", cost=QWEN3_NEXT)
        made.append(int(summaries_made(plan).max()))
        attention.append(plan.slowest_kernels_ns / ideal_kernels_ns(pieces, QWEN3_NEXT, cp=cp))
        # No other strategy is predicted faster, with the summaries that its cuts need.
        ours = plan.slowest_kernels_ns + 2 * summaries_ns(plan, QWEN3_NEXT)
        for name in ("per_sequence", "per_document", "hybrid"):
            other = shard(pieces, cp=cp, strategy=name, cost=QWEN3_NEXT)
            assert ours <= other.slowest_kernels_ns + 2 * summaries_ns(other, QWEN3_NEXT)
    assert np.mean(made) <= most
    assert np.mean(attention) <= 1.04


def packed_windows(num: int) -> list[np.ndarray]:
    """Documents of the paper's lengths, cut where windows of 128K end."""
    window = 131072
    drawn = lengths_of_family(window=window, num_documents=400 * num, seed=0).lengths
    ends = np.union1d(np.cumsum(drawn), np.arange(0, (num + 1) * window, window))
    pieces = np.diff(ends[ends <= num * window])
    starts = ends[:-1][: pieces.size] // window
    return [pieces[starts == i] for i in range(num)]
