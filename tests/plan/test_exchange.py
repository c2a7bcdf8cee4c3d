"""Tests which key rows ranks read of each other: literal values, and sets of tokens."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.plan import (
    ContextExchange,
    KeyExchange,
    KeyRows,
    ShardingPlan,
    exchange_of,
    key_rows,
    rows_gathered,
    rows_moved,
)
from wlb.plan.exchange import STAGE_ROWS
from wlb.sharding import NAMES, shard
from wlb.sharding.paper import per_document, per_sequence

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=50)


def ranges_of(exchange: ContextExchange) -> list[list[int]]:
    """Returns what is read: stage, reader, holder, the holder's rows, and the document."""
    return np.stack(exchange.reads).T.tolist()


def test_what_ranks_read_of_each_other() -> None:
    """Documents of 5 and 3 tokens: rank 0 holds a0 a1 | a4 | b0, rank 1 a2 a3 | b1 b2."""
    plan = per_document([5, 3], cp=2)
    exchange = exchange_of(plan, local_tokens=4)
    assert ranges_of(exchange) == [
        [0, 0, 1, 0, 2, 0],  # rank 0's a4 sees a2 a3 of rank 1; its furthest query of b is b0
        [0, 1, 0, 0, 2, 0],  # rank 1 sees a0 a1, not a4
        [0, 1, 0, 3, 4, 1],  # and b0
    ]
    assert rows_moved(plan).tolist() == [[0, 2], [3, 0]]
    assert rows_gathered(plan, local_tokens=4) == 4
    # An all-gather brings all rows to all ranks.
    assert exchange.rows.tolist() == [[[4, 4], [4, 4]]]
    needed = replace(plan, exchange=KeyExchange.NEEDED)
    # By need own rows are sent as well, unless attention reads own keys first.
    assert exchange_of(needed, local_tokens=4).rows.tolist() == [[[4, 2], [3, 4]]]
    assert exchange_of(needed, local_tokens=4, own_first=True).rows.tolist() == [[[0, 2], [3, 0]]]


def test_stages_cut_long_ranges_and_leave_short_ones_whole() -> None:
    """A document of 4 tiles, and two of 8 tokens, lie on rank 0; rank 1 has their last tokens."""
    long = 4 * STAGE_ROWS
    plan = ShardingPlan(
        strategy="by hand",
        lengths=np.array([long + 1, 9, 9]),
        piece=np.array([0, 1, 2, 0, 1, 2]),
        start=np.array([0, 0, 0, long, 8, 8]),
        stop=np.array([long, 8, 8, long + 1, 9, 9]),
        rank_offsets=np.array([0, 3, 6]),
        exchange=KeyExchange.NEEDED,
    )
    made = exchange_of(plan, local_tokens=long + 16, own_first=True, stages=2)
    assert ranges_of(made) == [
        [0, 1, 0, 0, long // 2, 0],
        [0, 1, 0, long, long + 8, 1],
        [1, 1, 0, long // 2, long, 0],
        [1, 1, 0, long + 8, long + 16, 2],
    ]
    assert made.rows[:, 1, 0].tolist() == [long // 2 + 8] * 2
    assert made.keys_by_stage[:, 3:].tolist() == [[long // 2, 8, 0], [long // 2, 0, 8]]
    gather = replace(plan, exchange=KeyExchange.GATHER)
    made = exchange_of(gather, local_tokens=long + 16, own_first=True, stages=2)
    assert made.rows[:, 1, 0].tolist() == [long // 2, long // 2 + 16]
    assert made.keys_by_stage[:, 3:].tolist() == [[long // 2, 0, 0], [long // 2, 8, 8]]


def test_key_rows_of_micro_batches_by_either_exchange() -> None:
    """By need the busier rank of the plan above receives 3 rows, by an all-gather of 4 padded rows
    a rank 4; one rank exchanges nothing, whatever its plan says.
    """
    gather = per_document([5, 3], cp=2)
    needed = replace(gather, exchange=KeyExchange.NEEDED)
    both = key_rows([gather, needed], [4, 4])
    assert both == KeyRows(num_by_need=1, received=4 + 3, gathered=4 + 4)
    assert both.share == 7 / 8
    alone = replace(per_document([5], cp=1), exchange=KeyExchange.NEEDED)
    assert key_rows([alone], [5]) == KeyRows()
    assert both + KeyRows() == both
    assert KeyRows().share == 1.0


def test_a_long_document_is_read_whole_by_one_rank() -> None:
    """In head and tail chunks of one document, the last chunk's rank reads all rows."""
    moved = rows_moved(per_sequence([64], cp=4))
    assert moved.tolist() == [[0, 16, 16, 16], [8, 0, 16, 16], [8, 8, 0, 16], [8, 8, 8, 0]]


def test_documents_on_one_rank_move_nothing() -> None:
    whole = ShardingPlan(
        strategy="by hand",
        lengths=np.array([8, 8]),
        piece=np.array([0, 1]),
        start=np.array([0, 0]),
        stop=np.array([8, 8]),
        rank_offsets=np.array([0, 1, 2]),
    )
    for plan in (whole, per_document([], cp=3), per_sequence([9], cp=1)):
        assert not rows_moved(plan).any()


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    lengths = draw(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 40)), max_size=7))
    cp = draw(st.integers(1, 6))
    return shard(lengths, cp=cp, strategy=draw(st.sampled_from(NAMES)), cost=COST)


def test_a_window_moves_what_its_queries_see() -> None:
    """Of 16 tokens rank 0 holds 0..3 and 12..15, rank 1 4..11. With windows of 3 keys query 4 sees
    2 and 3, and query 12 sees 10 and 11.
    """
    plan = per_sequence([16], cp=2)
    assert rows_moved(plan, sliding=3).tolist() == [[0, 2], [2, 0]]
    assert rows_moved(plan).tolist() == [[0, 8], [4, 0]]
    exchange = exchange_of(plan, local_tokens=8, sliding=3)
    assert ranges_of(exchange) == [[0, 0, 1, 6, 8, 0], [0, 1, 0, 2, 4, 0]]


@given(plans(), st.integers(1, 45))
def test_what_moves_by_windows_is_what_is_read_and_not_held(
    plan: ShardingPlan, sliding: int
) -> None:
    held = [set(plan.for_rank(r).token_index.tolist()) for r in range(plan.cp)]
    offsets = np.concatenate([[0], np.cumsum(plan.lengths)])
    read = [
        {
            int(offsets[s.piece]) + i
            for s in plan.for_rank(r).spans
            for i in range(max(0, s.start - sliding + 1), s.stop)
        }
        for r in range(plan.cp)
    ]
    expected = [
        [len(read[i] & held[j]) if i != j else 0 for j in range(plan.cp)] for i in range(plan.cp)
    ]
    assert rows_moved(plan, sliding=sliding).tolist() == expected


@given(plans())
def test_what_moves_is_what_is_read_and_not_held(plan: ShardingPlan) -> None:
    held = [
        {(s.piece, i) for s in plan.for_rank(r).spans for i in range(s.start, s.stop)}
        for r in range(plan.cp)
    ]
    read = [
        {(s.piece, i) for s in plan.for_rank(r).spans for i in range(s.stop)}
        for r in range(plan.cp)
    ]
    expected = [
        [len(read[i] & held[j]) if i != j else 0 for j in range(plan.cp)] for i in range(plan.cp)
    ]
    assert rows_moved(plan).tolist() == expected


def test_an_exchange_says_how_keys_travel() -> None:
    """A document of 6 tokens over two ranks, the first rank's chunks at its ends."""
    made = per_sequence([6], cp=2)
    gather = str(exchange_of(made, local_tokens=3))
    assert gather == "an all-gather of 3 rows of each rank, in 1 stage"
    needed = replace(made, exchange=KeyExchange.NEEDED)
    assert str(exchange_of(needed, local_tokens=3)) == (
        "an exchange of needed rows, in 1 stage: a rank receives at most 3 rows from other ranks, "
        "and would receive 3 rows in an all-gather"
    )
    own = str(exchange_of(needed, local_tokens=3, own_first=True, stages=2))
    assert own.startswith("an exchange of needed rows, in 2 stages")
    assert own.endswith("; attention over local keys runs during the first stage")
    one = per_sequence([6], cp=1)
    assert str(exchange_of(one, local_tokens=6)) == "no keys travel: one rank has all"
