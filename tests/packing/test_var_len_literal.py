"""Tests `literal = True` against Algorithm 1 line by line, and what the default corrects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.packing import PackerOptions, VarLenPacker
from wlb.plan import Carry, Documents, GlobalBatch

WINDOW = 8
COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=4)


def algorithm_1(
    batches: list[list[int]], *, n: int, s_max: int, levels: list[int]
) -> list[list[list[int]]]:
    """Runs the printed algorithm; returns [step][micro-batch] of documents in stream order."""
    work = [d * d + 4 * d for d in range(WINDOW + 1)]
    length = [d for batch in batches for d in batch]
    queues: list[list[int]] = [[] for _ in levels]
    remained: list[int] = []
    out: list[list[list[int]]] = []
    number = 0
    for batch in batches:  # line 2
        new: list[int] = []  # 3
        for d in batch:  # 4
            if levels and d >= levels[0]:  # 6: is an outlier, of queue i with L_i <= d < L_{i+1}
                queues[max(i for i, at in enumerate(levels) if d >= at)].append(number)  # 7
            else:
                new.append(number)  # 9
            number += 1
        for queue in queues:  # 12
            if len(queue) >= n:  # 13
                new += [queue.pop(0) for _ in range(n)]  # 15
        new.sort(key=lambda doc: -length[doc])  # 19; Python's sort is stable
        documents, remained = remained + new, []  # 21, 22
        made: list[list[int]] = [[] for _ in range(n)]  # 23
        for doc in documents:  # 24
            size = [sum(length[x] for x in m) for m in made]
            load = [sum(work[length[x]] for x in m) for m in made]
            least_work, shortest = load.index(min(load)), size.index(min(size))  # 26, 27
            if size[least_work] + length[doc] < s_max:  # 28
                made[least_work].append(doc)  # 29
            elif size[shortest] + length[doc] < s_max:  # 31
                made[shortest].append(doc)  # 32
            else:
                remained.append(doc)  # 34
        out.append(made)  # 38
    return out


def packer(n: int, s_max: int, levels: list[int], *, literal: bool = True) -> VarLenPacker:
    options = PackerOptions(num_micro_batches=n, context_window=WINDOW, cost=COST)
    return VarLenPacker(
        options=options, s_max=s_max, queue_thresholds=tuple(levels), literal=literal
    )


def run(pack: VarLenPacker, batches: list[list[int]]) -> tuple[list[list[list[int]]], Carry]:
    out: list[list[list[int]]] = []
    carry, first = pack.start(), 0
    for index, lengths in enumerate(batches):
        documents = Documents.from_lengths(lengths, first_id=first)
        first += len(lengths)
        plans, carry = pack.push(GlobalBatch(index=index, documents=documents), carry)
        out += [[m.pieces.document.tolist() for m in p.micro_batches] for p in plans]
    return out, carry


@given(
    st.lists(st.lists(st.integers(1, WINDOW), max_size=12), max_size=8),
    st.integers(1, 4),
    st.integers(WINDOW + 1, 3 * WINDOW),
    st.lists(st.integers(1, WINDOW), max_size=3, unique=True).map(sorted),
)
def test_every_document_is_where_the_paper_puts_it(
    batches: list[list[int]], n: int, s_max: int, levels: list[int]
) -> None:
    made, _ = run(packer(n, s_max, levels), batches)
    assert made == algorithm_1(batches, n=n, s_max=s_max, levels=levels)


def test_literal_steps_for_empty_batches_and_one_release_a_batch() -> None:
    batches = [[6, 6, 6, 6, 6], [], []]
    made, carry = run(packer(2, 13, [6]), batches)
    # `<`: two of 6 make 12 < 13. Five arrive at once, two leave with each batch.
    assert made == [[[0], [1]], [[2], [3]], [[], []]]
    assert carry.pieces.document.tolist() == [4]
    made, carry = run(packer(2, 13, [6], literal=False), batches)
    assert [sorted(map(sorted, m)) for m in made] == [[[0, 2], [1, 3]]]


def test_a_literal_run_releases_everything_at_the_end_of_data() -> None:
    pack = packer(2, 13, [6])
    _, carry = run(pack, [[6, 7, 8]])
    plans, after = pack.push(None, carry)
    assert after.num_tokens == 0
    assert sum(p.num_tokens for p in plans) == carry.num_tokens


def test_a_document_of_s_max_tokens() -> None:
    with pytest.raises(ValueError, match="of the paper keeps micro-batches below s_max"):
        packer(2, WINDOW, [])
    made, carry = run(packer(1, WINDOW, [], literal=False), [[WINDOW]])
    assert (made, carry.num_tokens) == ([[[0]]], 0)


def test_a_cap_on_the_tokens_of_a_step_leaves_over() -> None:
    options = PackerOptions(num_micro_batches=2, context_window=WINDOW, cost=COST)
    pack = VarLenPacker(options=options, s_max=12, step_tokens=14, queue_thresholds=())
    documents = Documents.from_lengths([8, 5, 3, 1])
    (plan,), carry = pack.push(GlobalBatch(index=0, documents=documents), pack.start())
    # 8 and 5 leave one token of room: the 3 waits, the 1 does not.
    assert sorted(sorted(m.pieces.length.tolist()) for m in plan.micro_batches) == [[1, 5], [8]]
    assert carry.pieces.document.tolist() == [2]
    with pytest.raises(
        ValueError, match="step_tokens = 7 must be at least the context window, 8 tokens"
    ):
        VarLenPacker(options=options, s_max=12, step_tokens=7, queue_thresholds=())
