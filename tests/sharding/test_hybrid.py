"""Tests hybrid and balanced: literal spans, what they must reach and are never worse than."""

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload, ProfiledWorkload, attention_latency, load_profile
from wlb.plan import ShardingPlan
from wlb.sharding import NAMES, shard
from wlb.sharding.balanced import balanced
from wlb.sharding.hybrid import hybrid
from wlb.sharding.paper import per_document, per_sequence
from wlb.spec import ModelSpec, ParallelSpec


class Tiles(FlopsWorkload):
    """Prices whole tiles of `tile` rows; a segment costs one tile more than it computes."""

    def segment_times_ns(self, q, kv):
        rows = np.asarray(q)
        work = np.where(rows > 0, (-(-rows // 8) + 1) * 8 * np.asarray(kv), 0)
        return work, 2 * work


TILES = Tiles()
H100 = ProfiledWorkload(
    model=ModelSpec(
        hidden_size=4096, num_layers=4, num_heads=32, num_kv_heads=32, ffn_hidden_size=8
    ),
    parallel=ParallelSpec(tp=8, cp=4, pp=1),
    profile=load_profile("h100"),
    micro_batch_tokens=4096,
)


def show(plan: ShardingPlan) -> list[list[tuple[int, int, int]]]:
    return [[tuple(s) for s in plan.for_rank(r).spans] for r in range(plan.cp)]


def slowest(plan: ShardingPlan, cost=TILES) -> int:
    return attention_latency(plan, cost).slowest_kernels_ns


def test_hybrid_cuts_the_long_document_and_keeps_short_ones_together() -> None:
    """One document of 64 tokens is cut in chunks of 16; eight of 8 make a sequence in chunks of
    16.
    """
    plan = hybrid([8] * 4 + [64] + [8] * 4, cp=2, cost=TILES)
    assert plan.strategy == "hybrid"
    assert show(plan) == [
        [(4, 0, 16), (4, 48, 64), (0, 0, 8), (1, 0, 8), (7, 0, 8), (8, 0, 8)],
        [(4, 16, 48), (2, 0, 8), (3, 0, 8), (5, 0, 8), (6, 0, 8)],
    ]


def test_balanced_shares_a_document_by_the_ranks_it_needs() -> None:
    """On four ranks, each of two equal documents is shared by two, and each rank has a short
    one.
    """
    plan = balanced([64, 64, 8, 8, 8, 8], cp=4, cost=TILES)
    assert show(plan) == [
        [(0, 0, 16), (0, 48, 64), (2, 0, 8)],
        [(0, 16, 48), (3, 0, 8)],
        [(1, 0, 16), (1, 48, 64), (4, 0, 8)],
        [(1, 16, 48), (5, 0, 8)],
    ]


def test_balanced_leaves_short_documents_whole() -> None:
    lengths = [40] * 12 + [400]
    spans = [s for rank in show(balanced(lengths, cp=4, cost=TILES)) for s in rank]
    whole = [piece for piece, start, stop in spans if (start, stop) == (0, 40)]
    assert len(whole) >= 8


documents = st.lists(
    st.one_of(st.integers(1, 9), st.integers(1, 300), st.sampled_from([64, 97, 1024, 2000])),
    max_size=14,
)


@given(documents, st.integers(1, 9), st.sampled_from([TILES, H100]))
def test_each_strategy_is_predicted_no_slower_than_what_it_extends(lengths, cp, cost) -> None:
    plans = {name: shard(lengths, cp=cp, strategy=name, cost=cost).validate() for name in NAMES}
    time = {name: slowest(plan, cost) for name, plan in plans.items()}
    assert time["adaptive"] == min(time["per_sequence"], time["per_document"])
    assert time["balanced"] <= time["hybrid"] <= time["adaptive"]
    assert plans["adaptive"].strategy in ("per_sequence", "per_document")
    assert all(plans[name].strategy == name for name in NAMES if name != "adaptive")


def test_hybrid_beats_both_static_strategies_on_long_and_short_together() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.concatenate([rng.integers(4, 12, 600), [1000, 700]]))
    both = min(slowest(per_sequence(lengths, cp=4)), slowest(per_document(lengths, cp=4)))
    assert slowest(hybrid(lengths, cp=4, cost=TILES)) < 0.9 * both


def test_balanced_beats_hybrid_where_ranks_are_many() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(30, 400, 60)
    assert slowest(balanced(lengths, cp=16, cost=TILES)) < 0.9 * slowest(
        hybrid(lengths, cp=16, cost=TILES)
    )


def test_a_window_of_many_documents_prices_few_thresholds() -> None:
    """With more distinct lengths than thresholds plans are valid and no slower than static ones."""
    lengths = np.arange(1, 400)
    plan = hybrid(lengths, cp=8, cost=TILES).validate()
    assert slowest(plan) <= slowest(per_document(lengths, cp=8))


@pytest.mark.parametrize("strategy", ["hybrid", "balanced"])
def test_the_same_lengths_give_the_same_plan_and_one_rank_keeps_all(strategy: str) -> None:
    lengths = [5, 300, 5, 77, 300]
    one, two = (shard(lengths, cp=4, strategy=strategy, cost=TILES) for _ in range(2))
    assert one.digest() == two.digest()
    alone = shard(lengths, cp=1, strategy=strategy, cost=TILES)
    assert show(alone) == [[(i, 0, n) for i, n in enumerate(lengths)]]
    assert show(shard([], cp=2, strategy=strategy, cost=TILES)) == [[], []]


def test_one_by_one_is_the_papers_remainder() -> None:
    """7 = 4 + 3 and 6 = 4 + 2 tokens, cp 2: 3 + 2 single tokens go to ranks 0, 1, 0 and 1, 0."""
    plan = per_document([7, 6], cp=2, remainder="one_by_one").validate()
    assert show(plan) == [
        [(0, 0, 1), (0, 3, 4), (1, 0, 1), (1, 3, 4), (0, 4, 5), (0, 6, 7), (1, 5, 6)],
        [(0, 1, 3), (1, 1, 3), (0, 5, 6), (1, 4, 5)],
    ]
    merged = per_document([7, 6], cp=2)
    assert merged.piece.size < plan.piece.size


@given(documents, st.integers(1, 6))
def test_one_by_one_places_every_token_once(lengths, cp) -> None:
    plan = shard(lengths, cp=cp, strategy="per_document", cost=TILES, remainder="one_by_one")
    assert plan.validate() is plan
    base = [n - n % (2 * cp) for n in lengths]
    for piece, start, stop in zip(plan.piece, plan.start, plan.stop, strict=True):
        assert stop - start == 1 or start < base[piece]


def test_adaptive_takes_the_remainder_too_and_unknown_ones_are_refused() -> None:
    lengths = [40003, 20517]
    plan = shard(lengths, cp=4, strategy="adaptive", cost=H100, remainder="one_by_one")
    assert plan.strategy == "per_document"
    assert plan.piece.size > shard(lengths, cp=4, strategy="adaptive", cost=H100).piece.size
    with pytest.raises(ValueError, match="'dropped' is not a valid Remainder"):
        per_document([5], cp=2, remainder="dropped")


H100_CP2 = ProfiledWorkload(
    model=ModelSpec(
        hidden_size=4096, num_layers=1, num_heads=32, num_kv_heads=32, ffn_hidden_size=11008
    ),
    parallel=ParallelSpec(tp=8, cp=2, pp=1),
    profile=load_profile("h100"),
    micro_batch_tokens=4096,
)
near_a_dip = st.lists(st.integers(990, 1024), min_size=3, max_size=16)


@given(near_a_dip, st.integers(2, 4))
def test_documents_whose_predicted_times_dip_are_not_lost(lengths, cp) -> None:
    """A segment of 1,024 tokens is priced below one of 1,020: degrees must not follow that."""
    for plan in (balanced(lengths, cp=cp, cost=H100_CP2), hybrid(lengths, cp=cp, cost=H100_CP2)):
        plan.validate()


def test_a_known_case_of_a_dip() -> None:
    lengths = [1000, 1012, 1012, 1017, 1004, 1023, 1001, 1021]
    assert balanced(lengths, cp=2, cost=H100_CP2).validate().tokens.tolist() == [4045, 4045]


@given(documents.filter(len), st.integers(2, 8), st.sampled_from([TILES, H100]))
def test_hybrid_prices_its_thresholds_as_the_plans_they_make(lengths, cp, cost) -> None:
    """What it chooses by is what the plan costs, launches apart."""
    module = importlib.import_module("wlb.sharding.hybrid")
    pieces = np.array(lengths)
    priced: list[int] = []
    original = module._slowest
    try:
        module._slowest = lambda *args: priced.append(int((out := original(*args)).min())) or out
        (plan,) = module._best_thresholds(pieces, cp, cost, 1)
    finally:
        module._slowest = original
    offsets = np.array([0, plan.stop.size])
    calls = cost.attention_call_ns(plan.stop - plan.start, plan.stop, offsets)
    assert priced == [slowest(plan, cost) - sum(int(x[0]) for x in calls)]


def test_a_remainder_that_a_strategy_does_not_have_is_refused() -> None:
    for strategy in ("per_sequence", "hybrid", "balanced"):
        with pytest.raises(ValueError, match=rf"one_by_one is not .* {strategy}; set"):
            shard([5, 6], cp=2, strategy=strategy, cost=TILES, remainder="one_by_one")
    for strategy in NAMES:
        with pytest.raises(ValueError, match="'garbage' is not a valid Remainder"):
            shard([5, 6], cp=2, strategy=strategy, cost=TILES, remainder="garbage")
    assert per_document([5, 5], cp=1, remainder="one_by_one").piece.size == 2
