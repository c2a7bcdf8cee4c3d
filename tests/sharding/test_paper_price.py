"""Tests that a strategy prices each candidate once, and that plans keep the price chosen by."""

import numpy as np
import pytest

from wlb.cost import FlopsWorkload, attention_latency
from wlb.plan import ShardingPlan
from wlb.sharding import NAMES, shard
from wlb.sharding.paper import cheapest, per_document, per_sequence

FLOPS = FlopsWorkload(quadratic_ns=1)


class Counting(FlopsWorkload):
    """Remembers how often whole plans are priced."""

    num_calls: int = 0

    def attention_call_ns(self, q, kv, offsets):
        object.__setattr__(self, "num_calls", self.num_calls + 1)
        return super().attention_call_ns(q, kv, offsets)


def test_the_cheapest_keeps_its_price_and_ties_go_to_the_first() -> None:
    plans = [strategy([16, 4, 4, 4, 4], cp=2) for strategy in (per_sequence, per_document)]
    best = cheapest(plans, FLOPS)
    assert best.strategy == "per_document"
    assert best.slowest_kernels_ns == attention_latency(best, FLOPS).slowest_kernels_ns
    assert cheapest([plans[0]] * 2, FLOPS, strategy="mine").strategy == "mine"


@pytest.mark.parametrize("strategy", NAMES)
def test_nothing_is_priced_twice(strategy: str) -> None:
    cost = Counting(quadratic_ns=1)
    plan = shard([900, 500, 30, 20], cp=4, strategy=strategy, cost=cost)
    # balanced prices hybrid's candidates, then its own.
    assert cost.num_calls == (2 if strategy == "balanced" else 1)
    latency = attention_latency(plan, cost)
    assert np.array_equal(plan.forward_ns, latency.forward_ns)
    assert np.array_equal(plan.backward_ns, latency.backward_ns)


def test_a_sharding_written_with_the_sum_of_both_passes_is_read() -> None:
    plan = cheapest([per_document([8, 8], cp=2)], FLOPS)
    data = plan.to_json()
    del data["forward_ns"], data["backward_ns"]
    old = ShardingPlan.from_json(data)
    assert old.latency_ns.tolist() == plan.latency_ns.tolist()
    assert old.digest() == plan.digest()
