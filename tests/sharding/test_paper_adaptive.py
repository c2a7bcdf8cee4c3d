"""Tests that the selector picks what is predicted to finish first, and how balance is defined."""

import numpy as np
import pytest

from wlb.cost import FlopsWorkload, attention_latency
from wlb.plan import ShardingPlan
from wlb.sharding import shard
from wlb.sharding.paper import per_document, per_sequence

FLOPS = FlopsWorkload(quadratic_ns=1)


class Tiles(FlopsWorkload):
    """Prices every segment as whole tiles of 128 rows."""

    def segment_times_ns(self, q, kv):
        work = -(-np.asarray(q) // 128) * 128 * np.asarray(kv)
        return work, 2 * work


def pairs(plan: ShardingPlan) -> list[int]:
    """Returns query-key pairs of each rank, counted one by one."""
    out = []
    for r in range(plan.cp):
        rank = plan.for_rank(r)
        out.append(
            sum(
                range(s.start + 1, s.stop + 1)[i]
                for s in rank.spans
                for i in range(s.stop - s.start)
            )
        )
    return out


def test_per_sequence_is_unbalanced_where_per_document_is_not() -> None:
    lengths = [16, 4, 4, 4, 4]  # 32 tokens, cp 2: rank 0 has [0, 8) and [24, 32)
    assert pairs(per_sequence(lengths, cp=2)) == [36 + 10 + 10, 100 + 10 + 10]
    assert pairs(per_document(lengths, cp=2)) == [10 + 58 + 4 * 5, 10 + 58 + 4 * 5]


def test_one_document_is_balanced_by_both() -> None:
    for strategy in (per_sequence, per_document):
        assert pairs(strategy([16], cp=2)) == [68, 68]


def test_adaptive_balances_long_documents_and_keeps_short_ones_whole() -> None:
    mixed = shard([4096, 512, 512], cp=2, strategy="adaptive", cost=Tiles())
    assert mixed.strategy == "per_document"
    short = shard([64] * 64, cp=2, strategy="adaptive", cost=Tiles())
    assert short.strategy == "per_sequence"


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_adaptive_is_never_slower_than_either(cp: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 2000, rng.integers(1, 20))
        chosen = shard(lengths, cp=cp, strategy="adaptive", cost=Tiles())
        latency = attention_latency(chosen, Tiles())
        assert chosen.latency_ns.tolist() == latency.latency_ns.tolist()
        for strategy in ("per_sequence", "per_document"):
            other = shard(lengths, cp=cp, strategy=strategy, cost=Tiles())
            assert chosen.latency_ns.max() <= other.latency_ns.max()


def test_ties_go_to_per_sequence_and_unknown_names_are_refused() -> None:
    assert shard([16], cp=2, strategy="adaptive", cost=FLOPS).strategy == "per_sequence"
    with pytest.raises(ValueError, match="strategy = 'ring' is unknown; use one of per_sequence"):
        shard([16], cp=2, strategy="ring", cost=FLOPS)
