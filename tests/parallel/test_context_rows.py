"""Tests a rank's rows by literal values: what lies where, the keys a row sees, gradients' way back.

The example throughout: two documents of 5 and 3 tokens, a0..a4 and b0..b2, per_document on two
ranks with rows of a multiple of 3. The chunks of ranks 0, 1, 1, 0 are a0 a1 | a2 | a3 | a4 and b0 |
b1 | b2 | nothing, so that rank 0 holds a0 a1 a4 b0 and rank 1 a2 a3 b1 b2, then padding:

    gathered row   0   1   2   3   4   5   6   7   8   9  10  11
    token         a0  a1  a4  b0   .   .  a2  a3  b1  b2   :   :
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from wlb.parallel.context.rows import RankExchange, RankStage, Transfer, rank_exchange
from wlb.plan import IntArray, KeyExchange, ShardingPlan, exchange_of, local_tokens
from wlb.sharding.paper import per_document, per_sequence

ROWS = 6
GATHERED = ["a0", "a1", "a4", "b0", ".", ".", "a2", "a3", "b1", "b2", ":", ":"]


def example() -> ShardingPlan:
    return per_document([5, 3], cp=2)


def of_rank(
    plan: ShardingPlan, rank: int, num_rows: int = ROWS, *, own_first: bool = False
) -> RankExchange:
    return rank_exchange(exchange_of(plan, local_tokens=num_rows, own_first=own_first), rank)


def segments(made: RankExchange) -> list[tuple[int, list[str]]]:
    """Returns the number of queries and the keys of each segment."""
    assert made.only.kv_index is not None
    keys = [GATHERED[i] for i in made.only.kv_index]
    q, k = made.only.cu_seqlens_q.tolist(), made.only.cu_seqlens_k.tolist()
    return [(q[i + 1] - q[i], keys[k[i] : k[i + 1]]) for i in range(len(q) - 1)]


def test_the_spans_of_the_example() -> None:
    assert local_tokens(8, cp=2, row_multiple=3) == ROWS
    spans = [[tuple(s) for s in example().for_rank(r).spans] for r in range(2)]
    assert spans == [[(0, 0, 2), (0, 4, 5), (1, 0, 1)], [(0, 2, 4), (1, 1, 3)]]


def test_keys_of_a_span_are_its_piece_up_to_its_end() -> None:
    made = of_rank(example(), 0)
    assert segments(made) == [
        (2, ["a0", "a1"]),
        (1, ["a0", "a1", "a2", "a3", "a4"]),
        (1, ["b0"]),
        (2, [".", "."]),  # padding sees the padding of its own rank
    ]
    assert made.positions.tolist() == [0, 1, 4, 0, 0, 1]
    assert segments(of_rank(example(), 1)) == [
        (2, ["a0", "a1", "a2", "a3"]),  # a2 sees a0..a2, a3 sees all: bottom-right causal
        (2, ["b0", "b1", "b2"]),
        (2, [":", ":"]),
    ]


def test_index_arrays_of_the_example() -> None:
    made = of_rank(example(), 0)
    assert made.only.cu_seqlens_q.tolist() == [0, 2, 3, 4, 6]
    assert made.only.cu_seqlens_k.tolist() == [0, 2, 7, 8, 10]
    assert made.only.kv_index is not None
    assert made.only.kv_index.tolist() == [0, 1, 0, 1, 6, 7, 2, 3, 4, 5]


def test_inverse_says_where_each_gathered_row_was_used() -> None:
    """a0 and a1 are keys twice on rank 0, so there are two layers; 10 stands for "not used"."""
    made = of_rank(example(), 0)
    assert made.only.inverse is not None
    assert made.only.inverse.tolist() == [
        # a0 a1 a4 b0  .  .  a2  a3  b1  b2   :   :
        [0, 1, 10, 7, 8, 9, 10, 10, 10, 10, 10, 10],
        [2, 3, 6, 10, 10, 10, 4, 5, 10, 10, 10, 10],
    ]


def test_gradients_of_keys_add_up_over_their_uses() -> None:
    made = of_rank(example(), 0)
    assert made.only.inverse is not None
    grads = np.append(10 ** np.arange(10), 0)  # of each key, and zero for "not used"
    assert grads[made.only.inverse].sum(0).tolist() == [
        1 + 100,  # a0
        10 + 1000,  # a1
        10**6,  # a4
        10**7,  # b0
        10**8,
        10**9,
        10**4,  # a2
        10**5,  # a3
        0,  # b1
        0,  # b2
        0,  # rank 1's padding
        0,
    ]


def by_need() -> ShardingPlan:
    return replace(example(), exchange=KeyExchange.NEEDED)


def test_an_exchange_by_need_sends_the_rows_that_are_read() -> None:
    """Rank 1 reads a0 a1 and b0 of rank 0, and rank 0, whose a4 sees all of a, a2 a3 of rank 1."""
    made, other = (of_rank(by_need(), rank) for rank in range(2))
    assert made.only.transfer == other.only.transfer == Transfer.NEEDED
    assert made.only.received.tolist() == [6, 2]
    assert made.only.sent.tolist() == [6, 3]
    assert listed(made.only.sent_rows) == [0, 1, 2, 3, 4, 5, 0, 1, 3]
    assert other.only.received.tolist() == [3, 6]
    assert other.only.sent.tolist() == [2, 6]
    assert listed(other.only.sent_rows) == [0, 1, 0, 1, 2, 3, 4, 5]
    # The gradients of a0 a1 a4 b0 and padding come back from rank 0, and of a0 a1 b0 from rank 1.
    assert listed(made.returned) == [[0, 1, 2, 3, 4, 5], [6, 7, 9, 8, 9, 9]]
    assert listed(other.returned) == [[0, 1, 4, 5, 6, 7], [2, 3, 8, 8, 8, 8]]
    gathered = of_rank(example(), 0)
    assert gathered.only.transfer == Transfer.GATHER
    assert gathered.only.received.tolist() == gathered.only.sent.tolist() == [6, 6]
    assert gathered.only.sent_rows is gathered.returned is None


def listed(array: IntArray | None) -> list[int]:
    assert array is not None
    return array.tolist()


def test_keys_lie_in_the_rows_that_arrive() -> None:
    for rank, arrived in enumerate(("a0 a1 a4 b0 . . a2 a3", "a0 a1 b0 a2 a3 b1 b2 : :")):
        made = of_rank(by_need(), rank)
        assert made.only.kv_index is not None
        assert made.only.inverse is not None
        gathered = of_rank(example(), rank)
        assert gathered.only.kv_index is not None
        names = arrived.split()
        assert [names[i] for i in made.only.kv_index] == [
            GATHERED[i] for i in gathered.only.kv_index
        ]
        assert made.only.cu_seqlens_k.tolist() == gathered.only.cu_seqlens_k.tolist()
        assert made.only.inverse.shape[1] == len(names)


@pytest.mark.parametrize("plan", [example(), by_need()], ids=lambda plan: plan.exchange)
def test_two_calls_see_the_keys_of_one(plan: ShardingPlan) -> None:
    """Own keys first: each span's keys are those of both calls, own ones with the queries last."""
    sent_to = {1: "a2 a3", 0: "a0 a1 b0"}  # by need, what comes from the rank
    for rank in range(2):
        made, whole = (of_rank(plan, rank, own_first=on) for on in (True, False))
        own, later = made.stages
        assert own.kv_index is not None
        assert later.kv_index is not None
        assert whole.only.kv_index is not None
        local = GATHERED[rank * ROWS : (rank + 1) * ROWS]
        is_needed = plan.exchange == KeyExchange.NEEDED
        arrived = sent_to[1 - rank].split() if is_needed else GATHERED
        before = "a0 a1 b0 a2 a3 b1 b2 : :" if rank else "a0 a1 a4 b0 . . a2 a3"
        all_keys = named(whole.only.kv_index, before.split() if is_needed else GATHERED, whole.only)
        own_keys = named(own.kv_index, local, own)
        others = named(later.kv_index, arrived, later)
        spans = np.split(np.arange(ROWS), own.cu_seqlens_q[1:-1])
        with_others = iter(others)
        rows_of_others: list[int] = []
        for rows, keys, mine in zip(spans, all_keys, own_keys, strict=True):
            assert [local[i] for i in rows] == mine[-rows.size :]
            missing = [key for key in keys if key not in mine]
            if missing:
                assert sorted(next(with_others)) == sorted(missing)
                rows_of_others += rows.tolist()
            assert sorted(missing + mine) == sorted(keys)
        assert listed(later.query_rows) == rows_of_others
        assert later.inverse is not None
        assert later.inverse.shape[1] == len(arrived)
        assert own.inverse is not None
        assert own.inverse.shape[1] == ROWS


def named(index: IntArray, rows: Sequence[str], call: RankStage) -> list[list[str]]:
    """Returns the keys of each segment of a call."""
    return [[rows[i] for i in part] for part in np.split(index, call.cu_seqlens_k[1:-1])]


def test_a_rank_that_needs_nothing_computes_in_its_first_call() -> None:
    alone = per_sequence([4, 4], cp=1)
    plan = ShardingPlan(
        strategy="balanced",
        lengths=alone.lengths,
        piece=alone.piece,
        start=alone.start,
        stop=alone.stop,
        rank_offsets=np.array([0, 1, 2]),
    )
    for exchange in (KeyExchange.GATHER, KeyExchange.NEEDED):
        made = of_rank(replace(plan, exchange=exchange), 1, own_first=True)
        own, later = made.stages
        assert own.cu_seqlens_k.tolist() == [0, 4, 6]
        assert listed(later.query_rows) == []
        assert later.cu_seqlens_q.tolist() == [0]
        moved = [6, 6] if exchange == KeyExchange.GATHER else [0, 0]
        assert later.received.tolist() == later.sent.tolist() == moved


def test_one_rank_needs_no_gather() -> None:
    made = of_rank(per_sequence([3, 2], cp=1), 0, 6)
    assert made.only.kv_index is None
    assert made.only.inverse is None
    assert made.only.cu_seqlens_q.tolist() == made.only.cu_seqlens_k.tolist() == [0, 3, 5, 6]
    assert made.positions.tolist() == [0, 1, 2, 0, 1, 0]


def test_an_empty_micro_batch_is_filler_only() -> None:
    made = of_rank(per_document([], cp=2), 1, 2)
    assert made.only.cu_seqlens_q.tolist() == made.only.cu_seqlens_k.tolist() == [0, 2]
    assert made.positions.tolist() == [0, 1]
    assert made.only.kv_index is not None
    assert made.only.inverse is not None
    assert made.only.kv_index.tolist() == [2, 3]
    assert made.only.inverse.tolist() == [[2, 2, 0, 1]]
    needed = of_rank(replace(per_document([], cp=2), exchange=KeyExchange.NEEDED), 1, 2)
    assert needed.only.kv_index is not None
    assert needed.only.kv_index.tolist() == [0, 1]
    assert needed.only.received.tolist() == needed.only.sent.tolist() == [0, 2]


def test_a_rank_without_tokens_still_has_rows() -> None:
    made = of_rank(per_document([1], cp=2), 1, 1)
    assert made.only.cu_seqlens_q.tolist() == made.only.cu_seqlens_k.tolist() == [0, 1]
    assert made.only.kv_index is not None
    assert made.only.kv_index.tolist() == [1]


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 0 has 4 tokens, but the exchange plans only 3 rows"):
        of_rank(example(), 0, 3)
