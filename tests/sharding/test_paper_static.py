"""Tests static strategies against literal spans."""

import pytest

from wlb.plan import ShardingPlan
from wlb.sharding.paper import per_document, per_sequence


def show(plan: ShardingPlan) -> list[list[tuple[int, int, int]]]:
    return [[tuple(s) for s in plan.for_rank(r).spans] for r in range(plan.cp)]


def test_per_sequence_takes_symmetric_chunks_of_the_whole_sequence() -> None:
    # 12 tokens, 4 chunks of 3: rank 0 has [0, 3) and [9, 12), rank 1 has [3, 9).
    plan = per_sequence([5, 7], cp=2)
    assert show(plan) == [[(0, 0, 3), (1, 4, 7)], [(0, 3, 5), (1, 0, 4)]]


def test_per_document_takes_symmetric_chunks_of_each_document() -> None:
    plan = per_document([8, 4], cp=2)
    assert show(plan) == [
        [(0, 0, 2), (0, 6, 8), (1, 0, 1), (1, 3, 4)],
        [(0, 2, 6), (1, 1, 3)],  # neighbouring chunks of a rank are one span
    ]


def test_tokens_over_go_round_the_ranks() -> None:
    # 5 = 4 + 1 and 7 = 4 + 3: the first token over goes to rank 0, the next three to 1, 0, 1.
    plan = per_document([5, 7], cp=2)
    assert plan.tokens.tolist() == [6, 6]
    assert show(plan) == [[(0, 0, 2), (0, 4, 5), (1, 0, 2), (1, 6, 7)], [(0, 2, 4), (1, 2, 6)]]


def test_documents_shorter_than_the_chunks() -> None:
    plan = per_document([1, 1, 1, 2], cp=2)
    assert show(plan) == [[(0, 0, 1), (2, 0, 1), (3, 0, 1)], [(1, 0, 1), (3, 1, 2)]]


def test_one_rank_holds_whole_documents() -> None:
    for strategy in (per_sequence, per_document):
        assert show(strategy([3, 1, 4], cp=1)) == [[(0, 0, 3), (1, 0, 1), (2, 0, 4)]]


def test_nothing_to_shard() -> None:
    for strategy in (per_sequence, per_document):
        assert show(strategy([], cp=2)) == [[], []]


def test_a_rank_sees_cu_seqlens_positions_and_rows() -> None:
    rank = per_document([8, 4], cp=2).for_rank(0)
    assert rank.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert rank.cu_seqlens_k.tolist() == [0, 2, 10, 11, 15]
    assert rank.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert rank.token_index.tolist() == [0, 1, 6, 7, 8, 11]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="cp = 0"):
        per_document([3], cp=0)
    with pytest.raises(ValueError, match="piece 1 has 0 tokens"):
        per_sequence([3, 0], cp=2)
    with pytest.raises(ValueError, match="rank = 2 must be the number of a CP rank"):
        per_sequence([3], cp=2).for_rank(2)


def test_validate_sees_gaps_overlaps_and_uneven_ranks() -> None:
    good = {"strategy": "x", "lengths": [4]}
    one = {"piece": [0, 0], "rank_offsets": [0, 1, 2]}
    ShardingPlan(**good, **one, start=[0, 2], stop=[2, 4]).validate()
    for start, stop in (([0, 3], [2, 4]), ([0, 1], [2, 4]), ([0, 2], [2, 3])):
        with pytest.raises(ValueError, match="some token is in no span or in several spans"):
            ShardingPlan(**good, **one, start=start, stop=stop).validate()
    with pytest.raises(ValueError, match=r"CP ranks have \[3, 1\] tokens"):
        ShardingPlan(**good, **one, start=[0, 3], stop=[3, 4]).validate()
    with pytest.raises(ValueError, match=r"must be a part of this piece's tokens \[0, 4\)"):
        ShardingPlan(**good, **one, start=[0, 2], stop=[2, 5])


def test_rank_offsets_must_divide_the_spans() -> None:
    # A span of no rank: every token is in some span, and the one rank has nobody to differ from.
    plan = {"strategy": "x", "lengths": [2], "piece": [0, 0], "start": [0, 1], "stop": [1, 2]}
    for offsets in ([0, 1], [1, 2]):
        with pytest.raises(ValueError, match="must increase from 0 to 2, the number of spans"):
            ShardingPlan(**plan, rank_offsets=offsets)
    with pytest.raises(ValueError, match=r"rank_offsets = \[0, 2, 1, 2\] must increase"):
        ShardingPlan(**plan, rank_offsets=[0, 2, 1, 2])
