"""Tests how the exchange of keys is chosen for a micro-batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload, ProfiledWorkload, load_profile, waits_ns, workload_of
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
    names = [name for name in ExchangeChoice if overlaps or name != ExchangeChoice.RELAYED]
    made = {name: shard(lengths, **how, exchange=name) for name in names}
    auto, gather, needed = (
        made[name] for name in (ExchangeChoice.AUTO, ExchangeChoice.GATHER, ExchangeChoice.NEEDED)
    )
    blind = replace(gather, exchange=KeyExchange.NEEDED)
    assert time_ns(needed, cost) <= time_ns(blind, cost) + 1
    # auto passes rows on only in groups of several nodes that have several ranks each.
    if not 1 < cost.cp_ranks_per_node < cp:
        made.pop(ExchangeChoice.RELAYED, None)
    assert all(time_ns(auto, cost) <= time_ns(plan, cost) + 1 for plan in made.values())
    for plan in made.values():
        plan.validate()


@pytest.mark.full
@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
    layout=st.sampled_from([(8, 4), (8, 8), (1, 8), (1, 16)]),
    exchange=st.sampled_from(ExchangeChoice),
    strategy=st.sampled_from(NAMES),
)
@settings(max_examples=settings.default.max_examples // 6)  # each shards three times
def test_choosing_stages_is_never_slower_than_one_or_the_most(
    lengths: list[int], layout: tuple[int, int], exchange: ExchangeChoice, strategy: str
) -> None:
    tp, cp = layout
    overlapped = replace(COST, parallel=ParallelSpec(tp=tp, cp=cp, pp=1), overlaps=True, stages=3)
    chooses = replace(overlapped, stages_by_price=True)
    how = {"cp": cp, "strategy": strategy, "exchange": exchange}
    plan = shard(lengths, cost=chooses, **how)
    assert plan.stages in ((0,) if plan.exchange == KeyExchange.RELAYED else (1, 2, 3))
    for stages in (1, 3):
        fixed = replace(overlapped, stages=stages)
        assert time_ns(plan, chooses) <= time_ns(shard(lengths, cost=fixed, **how), fixed) + 1
    assert ShardingPlan.from_json(plan.to_json()).digest() == plan.digest()


def test_micro_batches_choose_different_stages() -> None:
    """A node for each of eight ranks: a document of all ranks comes in stages; without keys of
    others every stage is a launch more."""
    keys = ["parallel.cp=8", "cp.overlap=true", "cp.stages=4", "sharding.stages=auto"]
    cost = workload_of(load("7b_128k", [*keys, "parallel.dp=1"]), load_profile("h100"))
    chosen = [
        shard(lengths, cp=8, strategy="balanced", cost=cost, exchange="needed").stages
        for lengths in ([120_000], [4096] * 16)
    ]
    assert chosen[0] > chosen[1] == 1


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
    with pytest.raises(UserError, match="exchange = 'ring' is not one of auto, gather, needed"):
        shard([8], cp=2, strategy="balanced", cost=FLOPS, exchange="ring")


def test_rows_are_passed_on_only_where_ranks_are_known_to_share_nodes() -> None:
    layout = ParallelSpec(tp=1, cp=16, pp=1)
    cost = replace(COST, parallel=layout, overlaps=True)
    plan = shard([120_000], cp=16, strategy="balanced", cost=cost, exchange="auto")
    assert (plan.exchange, plan.ranks_per_node) == (KeyExchange.RELAYED, 8)
    assert time_ns(plan, cost) < 0.9 * time_ns(
        replace(plan, exchange=KeyExchange.NEEDED, ranks_per_node=0), cost
    )
    assert ShardingPlan.from_json(plan.to_json()).digest() == plan.digest()
    for other in (replace(cost, overlaps=False), FlopsWorkload(quadratic_ns=1)):
        with pytest.raises(UserError, match=r"set cp\.overlap = true, or exchange = needed"):
            shard([120_000], cp=16, strategy="balanced", cost=other, exchange="relayed")
    with pytest.raises(UserError, match="ranks_per_node = 0 with exchange = relayed"):
        replace(plan, ranks_per_node=0)
