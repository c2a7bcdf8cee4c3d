"""Tests fixed-length greedy: windows of exactly C tokens over W global batches, placements."""

import numpy as np
import pytest

from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource
from wlb.packing import FixedPacker, PackerOptions
from wlb.packing.fixed import greedy, take_tokens
from wlb.plan import Carry, Documents, GlobalBatch, PackingPlan, Pieces, int_array

SQUARES = FlopsWorkload(quadratic_ns=1)


def packer(*, n: int = 2, window: int = 8, w: int = 1) -> FixedPacker:
    options = PackerOptions(num_micro_batches=n, context_window=window, cost=SQUARES)
    return FixedPacker(options=options, window_batches=w)


def batch(index: int, lengths: list[int], first_id: int = 0) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=first_id)
    return GlobalBatch(index=index, documents=documents)


def pieces(lengths: list[int]) -> Pieces:
    return Pieces.whole(Documents.from_lengths(lengths))


def spans(plan: PackingPlan) -> list[list[tuple[int, int, int]]]:
    """Returns (document, start, stop) of each micro-batch, sorted."""
    out: list[list[tuple[int, int, int]]] = []
    for m in plan.micro_batches:
        p = m.pieces
        rows = zip(p.document.tolist(), p.start.tolist(), p.stop.tolist(), strict=True)
        out.append(sorted(rows))
    return out


def test_longest_first_to_the_least_attention_with_room() -> None:
    made = greedy(
        pieces([2, 6, 4, 3, 1]), int_array("w", [4, 36, 16, 9, 1]), num_micro_batches=2, capacity=8
    )
    # 6 -> 0 (36), 4 -> 1 (16), 3 -> 1 (25), 2 -> 0: micro-batch 1 has one token of room; 1 -> 1.
    assert made.rows == [[0, 1], [2, 3, 4]]
    assert len(made.pieces) == 5  # nothing was cut


def test_what_fits_nowhere_is_cut_to_fill_the_gaps() -> None:
    made = greedy(pieces([5, 5, 6]), int_array("w", [25, 25, 36]), num_micro_batches=2, capacity=8)
    # 6 -> 0, 5 -> 1; the second 5 finds 2 and 3 tokens of room: micro-batch 1 has less attention.
    cut = made.pieces
    shown = [
        [(int(cut.document[i]), int(cut.start[i]), int(cut.stop[i])) for i in members]
        for members in made.rows
    ]
    assert shown == [[(1, 3, 5), (2, 0, 6)], [(0, 0, 5), (1, 0, 3)]]
    # The labels of a cut document: its first part is labelled by its next token.
    assert cut.num_targets.tolist() == [4, 3, 1, 5]


def test_more_tokens_than_room_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit into 2 micro-batches of at most 8"):
        greedy(pieces([9, 8]), int_array("w", [1, 1]), num_micro_batches=2, capacity=8)


def test_every_window_is_full_and_the_surplus_waits() -> None:
    pack = packer()
    (plan,), carry = pack.push(batch(0, [6, 6, 3, 2, 2]), pack.start())
    assert plan.tokens.tolist() == [8, 8]
    assert plan.num_held_tokens == carry.num_tokens == 3
    (plan,), carry = pack.push(None, carry)  # the flush: a short step
    assert sorted(plan.tokens.tolist()) == [1, 2]
    assert carry.num_tokens == 0


def test_the_surplus_is_held_without_cutting_long_documents() -> None:
    taken, held, num = take_tokens(pieces([10, 2, 2, 10, 3]), 20, longest_cut=4)
    # The last document in is the second 10; 4 too many: the two documents of 2 wait instead.
    assert taken.length.tolist() == [10, 10]
    assert held.document.tolist() == [1, 2, 4]
    taken, held, num = take_tokens(pieces([10, 3, 10]), 20, longest_cut=4)
    # 3 too many: exactly the 3.
    assert (taken.length.tolist(), held.length.tolist()) == ([10, 10], [3])
    taken, held, num = take_tokens(pieces([10, 4, 10]), 21, longest_cut=4)
    # 3 too many of 24: the 4 is cut, its last 3 tokens wait.
    assert (taken.length.tolist(), held.length.tolist()) == ([10, 1, 10], [3])
    assert (held.document.tolist(), held.start.tolist()) == ([1], [1])
    # Nothing short enough: the shortest that is long enough is cut, here the first.
    taken, held, num = take_tokens(pieces([9, 10]), 15, longest_cut=4)
    assert (taken.length.tolist(), held.length.tolist()) == ([5, 10], [4])
    taken, held, num = take_tokens(pieces([3, 4]), 7, longest_cut=1)
    assert (len(taken), len(held), num) == (2, 0, 0)
    # The 2 that was held back before is taken now; the 3 waits in its place.
    taken, held, num = take_tokens(pieces([2, 3, 9, 5]), 11, longest_cut=4, num_held=1)
    assert (taken.length.tolist(), held.length.tolist(), num) == ([2, 9], [3, 5], 1)


@pytest.mark.parametrize("w", [1, 2, 4])
def test_a_short_document_is_not_held_back_again_and_again(w: int) -> None:
    """Among short documents are some of half to a whole window, so nearly every window has a
    surplus.
    """
    draw = np.random.default_rng(0)
    lengths = [n for _ in range(200) for n in (1, *draw.integers(50, 101, 2).tolist())]
    source = LengthSource(name="test", lengths=np.array(lengths))
    stream = GlobalBatches(source, tokens_per_batch=200, seed=0, epochs=1, shuffle=False)
    pack = packer(n=2, window=100, w=w)
    carry, late = pack.start(), 0
    for made, _ in stream.iterate():
        plans, carry = pack.push(made, carry)
        for plan in plans:
            late = max(late, int((plan.step - plan.pieces.arrival_step).max()))
    assert late <= 2 * w


def test_a_window_of_batches_is_grouped_into_steps_by_load() -> None:
    pack = packer(w=2)
    plans, carry = pack.push(batch(0, [5, 4, 4, 3]), pack.start())
    assert plans == ()
    plans, carry = pack.push(batch(1, [4, 4, 4, 1, 1, 1, 1], first_id=4), carry)
    # The four windows: 5 1 1 1 (28), 4 4 (32), 4 4 (32), 4 3 1 (26).
    assert sorted(sorted(p.workload_ns.tolist()) for p in plans) == [[26, 28], [32, 32]]
    assert [p.step for p in plans] == [0, 1]
    assert carry.next_step == 2


def test_a_document_is_due_when_its_batch_would_have_been_trained() -> None:
    pack = packer(w=2)
    _, carry = pack.push(batch(0, [8, 8]), pack.start())
    assert carry.pieces.arrival_step.tolist() == [0, 0]
    plans, _ = pack.push(batch(1, [8, 8], first_id=2), carry)
    due = {
        d: a for p in plans for d, a in zip(p.pieces.document, p.pieces.arrival_step, strict=True)
    }
    assert due == {0: 0, 1: 0, 2: 1, 3: 1}


def test_no_later_than_the_window() -> None:
    pack = packer(w=4, n=2, window=16)
    carry, first = pack.start(), 0
    for index in range(16):
        lengths = [16, 9, 3, 3, 1] if index % 2 else [5, 5, 5, 5, 12]
        plans, carry = pack.push(batch(index, lengths, first), carry)
        first += 5
        for plan in plans:
            assert plan.tokens.tolist() == [16, 16]
            assert int((plan.step - plan.pieces.arrival_step).max()) <= 4


def test_window_batches_must_be_positive() -> None:
    with pytest.raises(ValueError, match="window_batches = 0 must be at least 1"):
        packer(w=0)


def test_a_carry_goes_on_in_another_layout() -> None:
    pack = packer(w=4)
    _, carry = pack.push(batch(0, [8, 4, 4]), pack.start())
    other = packer(w=1, n=1)
    plans, rest = other.push(None, Carry.from_json(carry.to_json()))
    assert sum(p.num_tokens for p in plans) == 16
    assert rest.num_tokens == 0
    assert spans(plans[0]) == [[(0, 0, 8)]]
