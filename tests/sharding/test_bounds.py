"""Tests that no plan is below the bounds, and the bounds of small cases by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import LLAMA2_7B
from wlb.cost import FlopsWorkload, ProfiledWorkload, load_profile, waits_ns
from wlb.plan import KeyExchange, UserError, rows_moved
from wlb.sharding import NAMES, shard
from wlb.sharding.bounds import least_rows, least_time_ns
from wlb.spec import ParallelSpec

COST = ProfiledWorkload(
    model=replace(LLAMA2_7B, num_layers=1),
    parallel=ParallelSpec(tp=1, cp=16, pp=1),
    profile=load_profile("h100"),
)


def test_rows_by_hand() -> None:
    """The last of 80 tokens is on a rank of 25, which receives 55. Of 100 tokens beside 100 single
    ones a rank with a quarter of the pairs cannot have the whole tail: three ranks read to 100,
    86.2 and 69.6 at least, hold 100 of these 255.8 together, and receive a third of the rest.
    """
    assert least_rows([80, 20], cp=4) == 55
    assert least_rows([80], cp=1) == 0
    assert least_rows([], cp=4) == 0
    assert least_rows([100], cp=2, slack=0) == 50
    assert least_rows([100, *[1] * 100], cp=4, slack=0) == 51
    assert least_rows([100, *[1] * 100], cp=4) == 50


@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=10),
    st.sampled_from([(1, 4), (1, 16), (2, 8), (8, 4)]),
    st.booleans(),
    st.sampled_from(NAMES),
)
def test_no_plan_is_below_the_bounds(
    lengths: list[int], layout: tuple[int, int], overlaps: bool, strategy: str
) -> None:
    tp, cp = layout
    cost = replace(COST, parallel=ParallelSpec(tp=tp, cp=cp, pp=1), overlaps=overlaps)
    plan = shard(lengths, cp=cp, strategy=strategy, cost=cost, exchange="needed")
    received = int(rows_moved(plan).sum(axis=1).max())
    assert received >= least_rows(lengths, cp=cp)
    gather, needed = least_time_ns(lengths, cp=cp, cost=cost)
    bounds = {KeyExchange.GATHER: gather, KeyExchange.NEEDED: needed}
    for exchange, least in bounds.items():
        plan = replace(plan, exchange=exchange)
        waits = sum(float(wait.max()) for wait in waits_ns(plan, cost))
        # The time of attention that the bound takes for ideal is a yardstick.
        ideal = least_time_ns(lengths, cp=cp, cost=replace(cost, overlaps=True))
        assert plan.slowest_kernels_ns + waits >= 0.9 * least
        assert least >= min(ideal) - 1


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(2, 6))
def test_ranks_with_equal_work_receive_no_less_than_the_bound(lengths: list[int], cp: int) -> None:
    flops = FlopsWorkload(quadratic_ns=1)
    plan = shard(lengths, cp=cp, strategy="balanced", cost=flops, exchange="needed")
    slack = float(plan.latency_ns.max() / plan.latency_ns.mean()) - 1
    received = int(rows_moved(plan).sum(axis=1).max())
    # FLOPs are of the square of a length, pairs have half of the diagonal more.
    assert received >= least_rows(lengths, cp=cp, slack=slack + 0.05) - cp - 0.05 * sum(lengths)


def test_a_workload_without_what_hides_is_refused() -> None:
    with pytest.raises(UserError, match="FlopsWorkload cannot predict which part"):
        least_time_ns([5], cp=2, cost=FlopsWorkload(quadratic_ns=1))
