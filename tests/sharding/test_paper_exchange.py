"""Tests how the exchange of keys is chosen for a micro-batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload, ProfiledWorkload, load_profile, waits_ns
from wlb.plan import KeyExchange, ShardingPlan, UserError, rows_moved
from wlb.sharding import NAMES, shard
from wlb.spec import ExchangeChoice, ParallelSpec, load

FLOPS = FlopsWorkload(quadratic_ns=1)
COST = ProfiledWorkload(
    model=replace(load("7b_128k").model, num_layers=2),
    parallel=ParallelSpec(tp=8, cp=4, pp=1),
    profile=load_profile("h100"),
)


@pytest.mark.parametrize("strategy", NAMES)
def test_the_plan_has_the_exchange_that_was_asked_for(strategy: str) -> None:
    for asked in ("gather", "needed"):
        plan = shard([900, 124], cp=2, strategy=strategy, cost=FLOPS, exchange=asked)
        assert plan.exchange == asked
        # One rank needs nobody's keys, so that plans of one rank do not differ.
        alone = shard([900, 124], cp=1, strategy=strategy, cost=FLOPS, exchange=asked)
        assert alone.exchange == KeyExchange.GATHER


def test_auto_takes_what_is_predicted_to_be_faster() -> None:
    """A rank reads one document whole, and nearly nothing of many short ones."""
    long, short = (
        shard(lengths, cp=4, strategy="per_sequence", cost=COST, exchange=ExchangeChoice.AUTO)
        for lengths in ([65536], [512] * 128)
    )
    assert (long.exchange, short.exchange) == (KeyExchange.GATHER, KeyExchange.NEEDED)


def time_ns(plan: ShardingPlan, cost: ProfiledWorkload) -> float:
    """Returns what the slowest rank takes, with what it waits for the exchange."""
    both = zip((plan.forward_ns, plan.backward_ns), waits_ns(plan, cost), strict=True)
    return sum(float((kernels + waits).max()) for kernels, waits in both)


@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
    layout=st.sampled_from([(8, 4), (2, 8), (1, 8), (1, 16)]),
    overlaps=st.booleans(),
    strategy=st.sampled_from(NAMES),
)
def test_no_strategy_is_slower_for_knowing_the_exchange(
    lengths: list[int], layout: tuple[int, int], overlaps: bool, strategy: str
) -> None:
    """Than its plan by attention alone, with the same exchange; nor auto than either exchange."""
    tp, cp = layout
    cost = replace(COST, parallel=ParallelSpec(tp=tp, cp=cp, pp=1), overlaps=overlaps)
    how = {"cp": cp, "strategy": strategy, "cost": cost}
    made = {name: shard(lengths, **how, exchange=name) for name in ExchangeChoice}
    auto, gather, needed = (
        made[name] for name in (ExchangeChoice.AUTO, ExchangeChoice.GATHER, ExchangeChoice.NEEDED)
    )
    blind = replace(gather, exchange=KeyExchange.NEEDED)
    assert time_ns(needed, cost) <= time_ns(blind, cost) + 1
    assert all(time_ns(auto, cost) <= time_ns(plan, cost) + 1 for plan in made.values())
    for plan in made.values():
        plan.validate()


def test_of_plans_that_take_equally_long_fewest_rows_travel() -> None:
    """Without a price of attention all do; per sequence nothing is read of the other rank."""
    free = FlopsWorkload(quadratic_ns=0)
    for strategy in ("balanced", "hybrid", "adaptive"):
        plan = shard([64, 64, 64, 64], cp=2, strategy=strategy, cost=free, exchange="needed")
        assert rows_moved(plan).sum() == 0


def test_documents_stay_in_a_node_that_has_ranks_enough() -> None:
    """CP 16 over two nodes: short documents are read by ranks of one node only."""
    cost = replace(COST, parallel=ParallelSpec(tp=1, cp=16, pp=1))
    lengths = [32768] * 4
    node = np.arange(16) // 8
    far: dict[str, int] = {}
    for exchange in ("gather", "needed"):
        plan = shard(lengths, cp=16, strategy="balanced", cost=cost, exchange=exchange)
        moved = rows_moved(replace(plan, exchange=KeyExchange.NEEDED))
        far[exchange] = int(moved[node[:, None] != node].sum())
    assert far["needed"] == 0 < far["gather"]


def test_free_exchanges_are_gathers() -> None:
    plan = shard([512] * 16, cp=4, strategy="balanced", cost=FLOPS, exchange="auto")
    assert plan.exchange == KeyExchange.GATHER


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(UserError, match="exchange = 'ring' is unknown; use one of auto, gather"):
        shard([8], cp=2, strategy="balanced", cost=FLOPS, exchange="ring")
