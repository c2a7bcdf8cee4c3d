"""Tests which summaries of cut documents ranks make and send, against a walk over the tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.plan import ShardingPlan, runs_of_spans, summaries_made, summaries_moved
from wlb.sharding import NAMES, shard
from wlb.sharding.paper import per_sequence

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=3)


def walked(plan: ShardingPlan) -> tuple[list[int], np.ndarray]:
    """Summaries made and moved, by each document's tokens one after the other."""
    owner = [[0] * n for n in plan.lengths.tolist()]
    for rank in range(plan.cp):
        for span in plan.for_rank(rank).spans:
            owner[span.piece][span.start : span.stop] = [rank] * (span.stop - span.start)
    made, moved = [0] * plan.cp, np.zeros((plan.cp, plan.cp), np.int64)
    for ranks in owner:
        for i, rank in enumerate(ranks[:-1]):
            if ranks[i + 1] != rank:
                made[rank] += 1
                for reader in set(ranks[i + 1 :]) - {rank}:
                    moved[reader, rank] += 1
    return made, moved


@given(
    lengths=st.lists(st.integers(1, 60), max_size=8),
    cp=st.integers(1, 5),
    strategy=st.sampled_from(NAMES),
)
def test_summaries_are_those_of_a_walk(lengths: list[int], cp: int, strategy: str) -> None:
    plan = shard(lengths, cp=cp, strategy=strategy, cost=COST)
    made, moved = walked(plan)
    assert summaries_made(plan).tolist() == made
    np.testing.assert_array_equal(summaries_moved(plan), moved)


def test_a_document_in_zigzag() -> None:
    """Chunks 0 1 | 1 0 of two ranks: rank 0 makes one summary, and rank 1 one of its two chunks,
    which are one run. Each needs the other's.
    """
    plan = per_sequence([8], cp=2)
    piece, place, rank = runs_of_spans(plan)
    assert (piece.tolist(), place.tolist(), rank.tolist()) == ([0, 0, 0], [0, 1, 2], [0, 1, 0])
    assert summaries_made(plan).tolist() == [1, 1]
    assert summaries_moved(plan).tolist() == [[0, 1], [1, 0]]
