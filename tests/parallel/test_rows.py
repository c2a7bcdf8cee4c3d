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

from wlb.parallel.rows import AttentionRows, CallRows, attention_rows, rank_labels, rank_tokens
from wlb.plan import (
    IGNORE,
    Documents,
    IntArray,
    KeyExchange,
    MicroBatch,
    Pieces,
    ShardingPlan,
    local_tokens,
    split_long,
)
from wlb.sharding.paper import per_document, per_sequence

ROWS = 6
GATHERED = ["a0", "a1", "a4", "b0", ".", ".", "a2", "a3", "b1", "b2", ":", ":"]


def example() -> ShardingPlan:
    return per_document([5, 3], cp=2)


def segments(made: AttentionRows) -> list[tuple[int, list[str]]]:
    """Returns the number of queries and the keys of each segment."""
    assert made.call.kv_index is not None
    keys = [GATHERED[i] for i in made.call.kv_index]
    q, k = made.call.cu_seqlens_q.tolist(), made.call.cu_seqlens_k.tolist()
    return [(q[i + 1] - q[i], keys[k[i] : k[i + 1]]) for i in range(len(q) - 1)]


def test_the_spans_of_the_example() -> None:
    assert local_tokens(8, cp=2, row_multiple=3) == ROWS
    spans = [[tuple(s) for s in example().for_rank(r).spans] for r in range(2)]
    assert spans == [[(0, 0, 2), (0, 4, 5), (1, 0, 1)], [(0, 2, 4), (1, 1, 3)]]


def test_keys_of_a_span_are_its_piece_up_to_its_end() -> None:
    made = attention_rows(example(), 0, ROWS)
    assert segments(made) == [
        (2, ["a0", "a1"]),
        (1, ["a0", "a1", "a2", "a3", "a4"]),
        (1, ["b0"]),
        (2, [".", "."]),  # padding sees the padding of its own rank
    ]
    assert made.positions.tolist() == [0, 1, 4, 0, 0, 1]
    assert segments(attention_rows(example(), 1, ROWS)) == [
        (2, ["a0", "a1", "a2", "a3"]),  # a2 sees a0..a2, a3 sees all: bottom-right causal
        (2, ["b0", "b1", "b2"]),
        (2, [":", ":"]),
    ]


def test_index_arrays_of_the_example() -> None:
    made = attention_rows(example(), 0, ROWS)
    assert made.call.cu_seqlens_q.tolist() == [0, 2, 3, 4, 6]
    assert made.call.cu_seqlens_k.tolist() == [0, 2, 7, 8, 10]
    assert made.call.kv_index is not None
    assert made.call.kv_index.tolist() == [0, 1, 0, 1, 6, 7, 2, 3, 4, 5]


def test_inverse_says_where_each_gathered_row_was_used() -> None:
    """a0 and a1 are keys twice on rank 0, so there are two layers; 10 stands for "not used"."""
    made = attention_rows(example(), 0, ROWS)
    assert made.call.inverse is not None
    assert made.call.inverse.tolist() == [
        # a0 a1 a4 b0  .  .  a2  a3  b1  b2   :   :
        [0, 1, 10, 7, 8, 9, 10, 10, 10, 10, 10, 10],
        [2, 3, 6, 10, 10, 10, 4, 5, 10, 10, 10, 10],
    ]


def test_gradients_of_keys_add_up_over_their_uses() -> None:
    made = attention_rows(example(), 0, ROWS)
    assert made.call.inverse is not None
    grads = np.append(10 ** np.arange(10), 0)  # of each key, and zero for "not used"
    assert grads[made.call.inverse].sum(0).tolist() == [
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
    made, other = (attention_rows(by_need(), rank, ROWS).sent for rank in range(2))
    assert made is not None
    assert other is not None
    assert made.splits.tolist() == [[[6, 2], [6, 3]]]  # received, sent
    assert made.index[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 3]
    assert other.splits.tolist() == [[[3, 6], [2, 6]]]
    assert other.index[0].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    # The gradients of a0 a1 a4 b0 and padding come back from rank 0, and of a0 a1 b0 from rank 1.
    assert made.returned.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 9, 8, 9, 9]]
    assert other.returned.tolist() == [[0, 1, 4, 5, 6, 7], [2, 3, 8, 8, 8, 8]]
    assert attention_rows(example(), 0, ROWS).sent is None


def test_keys_lie_in_the_rows_that_arrive() -> None:
    for rank, arrived in enumerate(("a0 a1 a4 b0 . . a2 a3", "a0 a1 b0 a2 a3 b1 b2 : :")):
        made = attention_rows(by_need(), rank, ROWS)
        assert made.call.kv_index is not None
        assert made.call.inverse is not None
        gathered = attention_rows(example(), rank, ROWS)
        assert gathered.call.kv_index is not None
        names = arrived.split()
        assert [names[i] for i in made.call.kv_index] == [
            GATHERED[i] for i in gathered.call.kv_index
        ]
        assert made.call.cu_seqlens_k.tolist() == gathered.call.cu_seqlens_k.tolist()
        assert made.call.inverse.shape[1] == len(names)


@pytest.mark.parametrize("plan", [example(), by_need()], ids=lambda plan: plan.exchange)
def test_two_calls_see_the_keys_of_one(plan: ShardingPlan) -> None:
    """Own keys first: each span's keys are those of both calls, own ones with the queries last."""
    sent_to = {1: "a2 a3", 0: "a0 a1 b0"}  # by need, what comes from the rank
    for rank in range(2):
        made, whole = (attention_rows(plan, rank, ROWS, overlap=on) for on in (True, False))
        own = made.own
        assert own is not None
        assert made.call.kv_index is not None
        assert whole.call.kv_index is not None
        local = GATHERED[rank * ROWS : (rank + 1) * ROWS]
        is_needed = plan.exchange == KeyExchange.NEEDED
        arrived = sent_to[1 - rank].split() if is_needed else GATHERED
        before = "a0 a1 b0 a2 a3 b1 b2 : :" if rank else "a0 a1 a4 b0 . . a2 a3"
        all_keys = named(whole.call.kv_index, before.split() if is_needed else GATHERED, whole.call)
        own_keys = named(own.kv_index, local, own)
        others = named(made.call.kv_index, arrived, made.call)
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
        assert made.call.query_rows.tolist() == rows_of_others
        assert made.call.inverse is not None
        assert made.call.inverse.shape[1] == len(arrived)
        assert own.inverse.shape[1] == ROWS


def named(index: IntArray, rows: Sequence[str], call: CallRows) -> list[list[str]]:
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
        made = attention_rows(replace(plan, exchange=exchange), 1, 6, overlap=True)
        assert made.own is not None
        assert made.own.cu_seqlens_k.tolist() == [0, 4, 6]
        assert made.call.query_rows.tolist() == []
        assert made.call.cu_seqlens_q.tolist() == [0]
        assert made.sent is None or made.sent.splits.tolist() == [[[0, 0], [0, 0]]]


def test_one_rank_needs_no_gather() -> None:
    made = attention_rows(per_sequence([3, 2], cp=1), 0, 6)
    assert made.call.kv_index is None
    assert made.call.inverse is None
    assert made.call.cu_seqlens_q.tolist() == made.call.cu_seqlens_k.tolist() == [0, 3, 5, 6]
    assert made.positions.tolist() == [0, 1, 2, 0, 1, 0]


def test_an_empty_micro_batch_is_filler_only() -> None:
    made = attention_rows(per_document([], cp=2), 1, 2)
    assert made.call.cu_seqlens_q.tolist() == made.call.cu_seqlens_k.tolist() == [0, 2]
    assert made.positions.tolist() == [0, 1]
    assert made.call.kv_index is not None
    assert made.call.inverse is not None
    assert made.call.kv_index.tolist() == [2, 3]
    assert made.call.inverse.tolist() == [[2, 2, 0, 1]]
    needed = attention_rows(replace(per_document([], cp=2), exchange=KeyExchange.NEEDED), 1, 2)
    assert needed.call.kv_index is not None
    assert needed.sent is not None
    assert needed.call.kv_index.tolist() == [0, 1]
    assert needed.sent.splits.tolist() == [[[0, 2], [0, 2]]]


def test_a_rank_without_tokens_still_has_rows() -> None:
    made = attention_rows(per_document([1], cp=2), 1, 1)
    assert made.call.cu_seqlens_q.tolist() == made.call.cu_seqlens_k.tolist() == [0, 1]
    assert made.call.kv_index is not None
    assert made.call.kv_index.tolist() == [1]


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 0 holds 4 tokens, more than its 3 rows"):
        attention_rows(example(), 0, 3)


class Letters:
    """Reads documents of 5, 3 and 12 tokens; token i of document d is 100 * d + i."""

    sizes = (5, 3, 12)

    def length(self, document: int) -> int:
        return self.sizes[document]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.sizes[document]
        return np.arange(100 * document + start, 100 * document + stop)


def micro_batch(pieces: Pieces) -> MicroBatch:
    return MicroBatch(index=0, pieces=pieces, workload_ns=0)


def test_labels_are_the_next_tokens() -> None:
    batch = micro_batch(Pieces.whole(Documents.from_lengths([5, 3])))
    made = [
        (
            rank_tokens(batch, example(), rank, ROWS, Letters()).tolist(),
            rank_labels(batch, example(), rank, ROWS, Letters()).tolist(),
        )
        for rank in range(2)
    ]
    assert made == [
        # a4 ends its document; the labels of a1 and b0 lie on the other rank.
        ([0, 1, 4, 100, 0, 0], [1, 2, IGNORE, 101, IGNORE, IGNORE]),
        # b2 ends its document; the last two rows are padding.
        ([2, 3, 101, 102, 0, 0], [3, 4, 102, IGNORE, IGNORE, IGNORE]),
    ]


def test_a_piece_that_ends_before_its_document_is_labelled_to_its_end() -> None:
    whole = split_long(
        Documents.from_lengths([12], first_id=2), window=5, long_documents="split"
    )  # [0, 5), [5, 10), [10, 12)
    batch = micro_batch(whole.slice(1, 3))
    sharding = per_sequence(batch.lengths, cp=1)
    tokens = rank_tokens(batch, sharding, 0, 7, Letters()).tolist()
    labels = rank_labels(batch, sharding, 0, 7, Letters()).tolist()
    assert tokens == [205, 206, 207, 208, 209, 210, 211]
    assert labels == [206, 207, 208, 209, 210, 211, IGNORE]
    assert sum(label != IGNORE for label in labels) == batch.num_targets == 6
