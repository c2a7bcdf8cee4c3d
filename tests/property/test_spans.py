"""Tests sharding: every token on one rank once, ranks equal, per_document balanced, portable."""

import itertools
import json
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.cost.protocol import causal_pairs
from wlb.plan import IntArray, ShardingPlan, local_tokens, row_multiple
from wlb.sharding import NAMES, shard

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=3)
lengths_of = st.lists(
    st.one_of(st.integers(1, 5), st.integers(1, 40), st.sampled_from([64, 97, 128])), max_size=10
)
cps = st.integers(1, 6)
strategies = st.sampled_from(NAMES)


def made(lengths: list[int], cp: int, strategy: str) -> ShardingPlan:
    return shard(lengths, cp=cp, strategy=strategy, cost=COST)


def owners(plan: ShardingPlan) -> list[list[int]]:
    """Returns the rank of each token, for each piece; fails where a token has none or two."""
    rank_of = [[-1] * n for n in plan.lengths.tolist()]
    for rank in range(plan.cp):
        for span in plan.for_rank(rank).spans:
            for token in range(span.start, span.stop):
                assert rank_of[span.piece][token] == -1
                rank_of[span.piece][token] = rank
    assert all(-1 not in tokens for tokens in rank_of)
    return rank_of


def rank_pairs(plan: ShardingPlan) -> IntArray:
    """Returns the query-key pairs of each rank, shape [cp]."""
    pairs = causal_pairs(plan.stop - plan.start, plan.stop)
    ranks = itertools.pairwise(plan.rank_offsets.tolist())
    return np.array([int(pairs[a:b].sum()) for a, b in ranks])


@given(lengths_of, cps, strategies)
def test_every_token_is_on_one_rank_and_ranks_are_equal(
    lengths: list[int], cp: int, strategy: str
) -> None:
    plan = made(lengths, cp, strategy)
    assert plan.validate() is plan
    assert (plan.cp, plan.lengths.tolist()) == (cp, lengths)
    held = [rank for tokens in owners(plan) for rank in tokens]
    counts = [held.count(rank) for rank in range(cp)]
    assert plan.tokens.tolist() == counts
    assert max(counts) - min(counts) <= 1
    if strategy != "adaptive":
        assert plan.strategy == strategy
    assert plan.latency_ns.tolist() == [
        sum((s.stop - s.start) * (s.stop + s.start) for s in plan.for_rank(r).spans)
        for r in range(cp)
    ]


@given(lengths_of, cps, strategies, st.integers(1, 4), st.integers(1, 12))
def test_rows_of_ranks_are_equal_multiples_with_little_padding(
    lengths: list[int], cp: int, strategy: str, tp: int, multiple: int
) -> None:
    plan, q = made(lengths, cp, strategy), row_multiple(tp, multiple)
    rows = local_tokens(plan.num_tokens, cp=cp, row_multiple=q)
    assert rows % q == rows % tp == rows % multiple == 0
    assert rows >= int(plan.tokens.max())
    padding = cp * rows - sum(lengths)
    assert (padding < cp * q) if lengths else (padding == cp * q)


@given(lengths_of, cps)
def test_per_document_deals_symmetric_chunks_one_token_apart(lengths: list[int], cp: int) -> None:
    for length, ranks in zip(lengths, owners(made(lengths, cp, "per_document")), strict=True):
        base = length // (2 * cp)
        runs = [(rank, len(list(run))) for rank, run in itertools.groupby(ranks)]
        if base:  # shorter documents leave chunks empty
            # 0, 1, ..., cp - 1 twice (two neighbouring chunks, one span), ..., 1, 0.
            assert [rank for rank, _ in runs] == [*range(cp), *reversed(range(cp - 1))]
            for rank, size in runs:
                chunks = 2 if rank == cp - 1 else 1
                assert chunks * base <= size <= chunks * (base + 1)
        each = [ranks.count(rank) for rank in range(cp)]
        assert max(each) - min(each) <= 1


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=10), cps)
def test_per_document_balances_attention(lengths: list[int], cp: int) -> None:
    """A document's ranks differ by the leftover tokens alone: by at most 2 pairs per token of
    it.
    """
    pairs = rank_pairs(made(lengths, cp, "per_document"))
    total = sum(n * (n + 1) // 2 for n in lengths)
    assert int(pairs.sum()) == total
    assert int(pairs.max() - pairs.min()) <= 2 * sum(lengths)
    if min(lengths) >= 128 * cp:
        assert int(pairs.max()) * cp <= 1.02 * total


@given(st.integers(1, 500), st.integers(2, 6))
def test_documents_that_divide_are_balanced_exactly(chunk: int, cp: int) -> None:
    lengths = [2 * cp * chunk, 2 * cp * (chunk % 7 + 1)]
    assert len(set(rank_pairs(made(lengths, cp, "per_document")).tolist())) == 1


@given(lengths_of, cps, strategies)
def test_json_round_trip_keeps_plan_and_digest(lengths: list[int], cp: int, strategy: str) -> None:
    plan = made(lengths, cp, strategy)
    back = ShardingPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back.digest() == plan.digest() == made(lengths, cp, strategy).digest()
    assert back.to_json() == plan.to_json()
    assert [back.for_rank(r).spans for r in range(cp)] == [
        plan.for_rank(r).spans for r in range(cp)
    ]


@given(lengths_of.filter(len), st.integers(2, 6), st.data())
def test_digest_tells_plans_apart(lengths: list[int], cp: int, data: st.DataObject) -> None:
    plan = made(lengths, cp, "per_document")
    longer = list(lengths)
    longer[data.draw(st.integers(0, len(lengths) - 1))] += 1
    others = [
        made(longer, cp, "per_document"),
        made([*lengths, 1], cp, "per_document"),
        made(lengths, cp + 1, "per_document"),
        made(lengths, cp, "per_sequence"),
        replace(plan, strategy="other"),
    ]
    assert len({p.digest() for p in [plan, *others]}) == 6
