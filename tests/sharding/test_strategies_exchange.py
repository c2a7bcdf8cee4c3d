"""Tests how the exchange of keys is chosen for a micro-batch."""

from dataclasses import replace

import numpy as np
import pytest

from wlb.cost import FlopsWorkload, ProfiledWorkload, exchange_ns, load_profile
from wlb.plan import KeyExchange, UserError
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


def test_auto_is_never_predicted_slower_than_either() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 20000, rng.integers(1, 8))
        how = {"cp": 4, "strategy": "balanced", "cost": COST}
        chosen, *others = (shard(lengths, **how, exchange=name) for name in ExchangeChoice)
        assert sum(exchange_ns(chosen, COST)) == min(sum(exchange_ns(p, COST)) for p in others)


def test_free_exchanges_are_gathers() -> None:
    plan = shard([512] * 16, cp=4, strategy="balanced", cost=FLOPS, exchange="auto")
    assert plan.exchange == KeyExchange.GATHER


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(UserError, match="exchange = 'ring' is not one of auto, gather, needed"):
        shard([8], cp=2, strategy="balanced", cost=FLOPS, exchange="ring")
