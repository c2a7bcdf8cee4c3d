"""Tests a rank's rows against brute force: the keys each row sees, gradients' way back, labels.

The all-gather is simulated with numbers: the gathered K of a micro-batch is an array that holds, at
each row, the packed position of the token that lies there, or a negative number for padding.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb.plan.exchange
from wlb.cost import FlopsWorkload
from wlb.packing import OriginalPacker, Packer, PackerOptions, VarLenPacker
from wlb.parallel.context.rows import RankExchange, rank_exchange
from wlb.parallel.rows import rank_labels, rank_tokens
from wlb.plan import (
    IGNORE,
    Documents,
    GlobalBatch,
    IntArray,
    KeyExchange,
    MicroBatch,
    ShardingPlan,
    exchange_of,
    local_tokens,
    offsets_of,
    rows_moved,
)
from wlb.sharding import shard

COST = FlopsWorkload(quadratic_ns=1)
MOST = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    sharding: ShardingPlan
    rows: int

    @property
    def ranks(self) -> range:
        return range(self.sharding.cp)


@st.composite
def cases(draw: st.DrawFn, min_cp: int = 1) -> Case:
    lengths = draw(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 24)), max_size=6))
    cp = draw(st.integers(min_cp, 4))
    strategy = draw(st.sampled_from(["per_sequence", "per_document", "adaptive"]))
    sharding = shard(lengths, cp=cp, strategy=strategy, cost=COST)
    rows = local_tokens(sum(lengths), cp=cp, row_multiple=draw(st.integers(1, 5)))
    return Case(sharding=sharding, rows=rows)


def of_rank(case: Case, rank: int, *, sliding: int = 0) -> RankExchange:
    """Returns a rank's part of an exchange in one stage."""
    return rank_exchange(exchange_of(case.sharding, local_tokens=case.rows, sliding=sliding), rank)


def local_ids(case: Case, rank: int) -> list[int]:
    """Returns what lies in each of a rank's rows: packed position, or -(global row) - 1 for
    padding.
    """
    starts = offsets_of(case.sharding.lengths)
    ids = [
        int(starts[span.piece]) + token
        for span in case.sharding.for_rank(rank).spans
        for token in range(span.start, span.stop)
    ]
    return ids + [-(rank * case.rows + i) - 1 for i in range(len(ids), case.rows)]


WINDOWS = st.one_of(st.just(0), st.integers(1, 30))


@given(cases(), WINDOWS)
def test_every_row_sees_its_own_piece_up_to_itself(case: Case, sliding: int) -> None:
    gathered = np.array([i for r in case.ranks for i in local_ids(case, r)])
    starts, latest = offsets_of(case.sharding.lengths), slice(-sliding, None)
    seen_rows = 0
    for rank in case.ranks:
        made = of_rank(case, rank, sliding=sliding)
        mine = local_ids(case, rank)
        keys = np.array(mine) if made.only.kv_index is None else gathered[made.only.kv_index]
        q, k = made.only.cu_seqlens_q.tolist(), made.only.cu_seqlens_k.tolist()
        assert (q[0], k[0], q[-1], k[-1]) == (0, 0, case.rows, keys.size)
        num_segments = len(case.sharding.for_rank(rank).spans)
        assert len(q) == len(k) == num_segments + 1 + (mine[-1] < 0)
        first_filler = min((i for i, x in enumerate(mine) if x < 0), default=case.rows)
        for segment in range(len(q) - 1):
            num_q, num_k = q[segment + 1] - q[segment], k[segment + 1] - k[segment]
            assert 0 < num_q <= num_k
            if sliding and made.only.kv_index is not None and mine[q[segment]] >= 0:
                assert num_k < num_q + sliding  # each key is seen by a query
            for i in range(num_q):
                row = q[segment] + i
                visible = keys[k[segment] : k[segment] + num_k - num_q + i + 1].tolist()
                if mine[row] < 0:
                    assert visible[latest] == mine[first_filler : row + 1][latest]
                    assert made.positions[row] == row - first_filler
                else:
                    piece = int(np.searchsorted(starts, mine[row], side="right")) - 1
                    assert visible[latest] == list(range(int(starts[piece]), mine[row] + 1))[latest]
                    assert made.positions[row] == mine[row] - int(starts[piece])
                seen_rows += 1
    assert seen_rows == case.sharding.cp * case.rows


@given(cases(min_cp=2), st.integers(0, 2**32 - 1), WINDOWS)
def test_inverse_is_the_adjoint_of_the_gather(case: Case, seed: int, sliding: int) -> None:
    for rank in case.ranks:
        made = of_rank(case, rank, sliding=sliding)
        assert made.only.kv_index is not None
        assert made.only.inverse is not None
        num_rows, num_keys = case.sharding.cp * case.rows, made.only.kv_index.size
        assert made.only.inverse.shape[1] == num_rows
        assert len(made.only.inverse) <= 2  # a piece has at most two spans on a rank: head and tail
        grads = np.random.default_rng(seed).integers(-1000, 1000, (num_keys, 3))
        expected = np.zeros((num_rows, 3), np.int64)
        np.add.at(expected, made.only.kv_index, grads)
        padded = np.concatenate([grads, np.zeros((1, 3), np.int64)])
        assert np.array_equal(sum(padded[layer] for layer in made.only.inverse), expected)
        # Each key is read back exactly once, so nothing is counted twice and cancelled elsewhere.
        assert sorted(made.only.inverse[made.only.inverse < num_keys].tolist()) == list(
            range(num_keys)
        )


@given(cases(min_cp=2), st.integers(0, 2**32 - 1), WINDOWS)
def test_an_exchange_by_need_brings_the_same_keys_and_gradients(
    case: Case, seed: int, sliding: int
) -> None:
    """Numbers stand for the all-to-all: rank i's part of what each rank j sends, one j after the
    other.
    """
    needed = replace(case, sharding=replace(case.sharding, exchange=KeyExchange.NEEDED))
    made = [of_rank(needed, rank, sliding=sliding) for rank in case.ranks]
    sent: list[list[IntArray]] = []
    for rows in made:
        assert rows.only.sent_rows is not None
        sent.append(np.split(rows.only.sent_rows, np.cumsum(rows.only.sent)[:-1]))
    moved = rows_moved(case.sharding, sliding=sliding)
    draw = np.random.default_rng(seed)
    grads_of_rows = [np.zeros((case.rows, 2), np.int64) for _ in case.ranks]
    returned: list[list[IntArray]] = [[] for _ in case.ranks]
    for rank, rows in enumerate(made):
        gathered = of_rank(case, rank, sliding=sliding)
        assert rows.only.kv_index is not None
        assert rows.only.inverse is not None
        assert gathered.only.kv_index is not None
        sizes = [sent[j][rank].size for j in case.ranks]
        assert rows.only.received.tolist() == sizes
        others = [size * (j != rank) for j, size in enumerate(sizes)]
        assert others == moved[rank].tolist()
        arrived = np.concatenate([j * case.rows + sent[j][rank] for j in case.ranks])
        assert arrived[rows.only.kv_index].tolist() == gathered.only.kv_index.tolist()
        # No row comes that is not a key.
        assert set(range(arrived.size)) == set(rows.only.kv_index.tolist())
        grads = draw.integers(-1000, 1000, (rows.only.kv_index.size + 1, 2))
        grads[-1] = 0
        back = np.split(grads[rows.only.inverse].sum(0), np.cumsum(sizes)[:-1])
        for j in case.ranks:
            returned[j].append(back[j])
            np.add.at(grads_of_rows[j], sent[j][rank], back[j])
    for rows, back, expected in zip(made, returned, grads_of_rows, strict=True):
        assert rows.returned is not None
        flat = np.concatenate([*back, np.zeros((1, 2), np.int64)])
        assert np.array_equal(flat[rows.returned].sum(0), expected)


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What each rank receives in each stage, as numbers: token t of a rank is rank * MOST + t."""

    stages: list[list[IntArray]]

    @classmethod
    def of(cls, made: list[RankExchange]) -> "Exchanged":
        stages: list[list[IntArray]] = []
        for s in range(1, len(made[0].stages)):
            sent: list[list[IntArray]] = []
            for rank, mine in enumerate(made):
                stage, before = mine.stages[s], mine.stages[1:s]
                if stage.sent_rows is None:
                    first = sum(int(x.sent[0]) for x in before)
                    part = np.arange(first, first + stage.sent[0])
                    sent.append([rank * MOST + part] * len(made))
                else:
                    cuts = np.cumsum(stage.sent)[:-1]
                    sent.append(np.split(rank * MOST + stage.sent_rows, cuts))
            for rank, mine in enumerate(made):
                sizes = [parts[rank].size for parts in sent]
                assert mine.stages[s].received.tolist() == sizes
            stages.append([np.concatenate([p[r] for p in sent]) for r in range(len(made))])
        return cls(stages=stages)


@given(
    cases(min_cp=2),
    st.sampled_from([KeyExchange.GATHER, KeyExchange.NEEDED]),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_stages_bring_each_key_of_other_ranks_once(
    case: Case, exchange: KeyExchange, stages: int, tile: int
) -> None:
    """Calls over own keys and over those of each stage see what one call sees, and no row comes
    by need in two stages.
    """
    plan = replace(case.sharding, exchange=exchange)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wlb.plan.exchange, "STAGE_ROWS", tile)
        whole_exchange = exchange_of(plan, local_tokens=case.rows, own_first=True, stages=stages)
    made = [rank_exchange(whole_exchange, rank) for rank in case.ranks]
    arrived = Exchanged.of(made)
    moved = whole_exchange.rows
    expected_rows = rows_moved(plan)
    if exchange == KeyExchange.GATHER:
        expected_rows = np.full((plan.cp, plan.cp), case.rows)
    assert moved.sum(axis=0).tolist() == expected_rows.tolist()
    for rank, rows in enumerate(made):
        whole = of_rank(case, rank).only
        assert whole.kv_index is not None
        keys = whole.kv_index // case.rows * MOST + whole.kv_index % case.rows
        expected = [set(part.tolist()) for part in np.split(keys, whole.cu_seqlens_k[1:-1])]
        own, *later = rows.stages
        calls = [(own, rank * MOST + np.arange(case.rows))]
        calls += [(c, arrived.stages[s][rank]) for s, c in enumerate(later)]
        seen: dict[int, list[int]] = {row: [] for row in whole.cu_seqlens_q[:-1].tolist()}
        for call, buffer in calls:
            assert call.kv_index is not None
            assert call.inverse is not None
            assert call.inverse.shape[1] == buffer.size
            queries = np.arange(case.rows) if call.query_rows is None else call.query_rows
            parts = np.split(buffer[call.kv_index], call.cu_seqlens_k[1:-1])
            for first, part in zip(call.cu_seqlens_q[:-1].tolist(), parts, strict=False):
                seen[int(queries[first])] += part.tolist()
        assert [sorted(found) for found in seen.values()] == [sorted(x) for x in expected]
        if rows.returned is not None:
            received = np.concatenate([arrived.stages[s][rank] for s in range(stages)])
            assert np.unique(received).size == received.size
            assert [int(s[rank].sum()) for s in moved] == [
                arrived.stages[s][rank].size for s in range(stages)
            ]
            # Gradients come back in the order in which rows were sent.
            sent_rows = [stage.sent_rows for stage in later if stage.sent_rows is not None]
            assert adjoint(np.concatenate(sent_rows), rows.returned, case.rows)


def adjoint(index: IntArray, returned: IntArray, num_rows: int) -> bool:
    """Returns whether `returned` adds up, of each row, what comes back for its uses in `index`."""
    grads = np.append(np.arange(1, index.size + 1), 0)
    total = np.zeros(num_rows, np.int64)
    np.add.at(total, index, grads[:-1])
    return grads[returned].sum(0).tolist() == total.tolist()


@given(cases())
def test_one_rank_needs_no_index(case: Case) -> None:
    for rank in case.ranks:
        made = of_rank(case, rank)
        expected = case.sharding.cp == 1
        assert (made.only.kv_index is None) == (made.only.inverse is None) == expected


@dataclass(frozen=True, kw_only=True)
class UniqueTokens:
    """Gives token i of document d as d * MOST + i; like a store, refuses what lies outside."""

    lengths: dict[int, int]

    def length(self, document: int) -> int:
        return self.lengths[document]

    def read(self, document: int, start: int, stop: int) -> IntArray:
        assert 0 <= start <= stop <= self.lengths[document]
        return np.arange(document * MOST + start, document * MOST + stop)


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[int], list[MicroBatch]]:
    """Returns lengths of documents, and all micro-batches that a policy makes of them."""
    window = draw(st.integers(1, 20))
    lengths = draw(st.lists(st.integers(1, 3 * window + 1), max_size=8))
    options = PackerOptions(
        num_micro_batches=draw(st.integers(1, 3)), context_window=window, cost=COST
    )
    packer: Packer = OriginalPacker(options=options)
    if draw(st.booleans()):
        packer = VarLenPacker(options=options, s_max=2 * window, queue_thresholds=(window,))
    batch = GlobalBatch(index=0, documents=Documents.from_lengths(lengths))
    first, carry = packer.push(batch, packer.start())
    rest, _ = packer.push(None, carry)
    return lengths, [m for plan in (*first, *rest) for m in plan.micro_batches]


@given(
    packed(),
    st.integers(1, 4),
    st.sampled_from(["per_sequence", "per_document"]),
    st.integers(1, 3),
)
def test_tokens_and_labels_of_all_ranks_are_the_documents(
    made: tuple[list[int], list[MicroBatch]], cp: int, strategy: str, row_multiple: int
) -> None:
    lengths, micro_batches = made
    reader = UniqueTokens(lengths=dict(enumerate(lengths)))
    trained: list[tuple[int, int]] = []
    for batch in micro_batches:
        sharding = shard(batch.lengths, cp=cp, strategy=strategy, cost=COST)
        rows = local_tokens(batch.num_tokens, cp=cp, row_multiple=row_multiple)
        num_labels = 0
        for rank in range(cp):
            tokens = rank_tokens(batch, sharding, rank, rows, reader).tolist()
            labels = rank_labels(batch, sharding, rank, rows, reader).tolist()
            assert len(tokens) == len(labels) == rows
            real = int(sharding.tokens[rank])
            assert tokens[real:] == [0] * (rows - real)
            assert labels[real:] == [IGNORE] * (rows - real)
            trained += zip(tokens[:real], labels[:real], strict=True)
            num_labels += sum(label != IGNORE for label in labels)
        assert num_labels == batch.num_targets
    # Whatever was cut and wherever it went: each token once, labelled with the document's next.
    expected = [
        (d * MOST + i, d * MOST + i + 1 if i + 1 < n else IGNORE)
        for d, n in enumerate(lengths)
        for i in range(n)
    ]
    assert sorted(trained) == expected
