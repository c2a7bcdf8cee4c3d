"""Tests bins as micro-batches against literal steps: which leave, which wait, and for how long."""

import numpy as np
import pytest

from wlb.cost import FlopsWorkload
from wlb.packing import PackerOptions
from wlb.packing.bins import BinMethod, pack_bins
from wlb.packing.capacity import CapacityPacker
from wlb.plan import Carry, Documents, GlobalBatch, PackingPlan

FFD, BFD = BinMethod.FIRST_FIT_DECREASING, BinMethod.BEST_FIT_DECREASING
NEXT_FIT, BEST_FIT = BinMethod.NEXT_FIT, BinMethod.BEST_FIT


def packer(method: BinMethod = BFD, *, num: int = 2, window: int = 10, **settings: int):
    options = PackerOptions(num_micro_batches=num, context_window=window, cost=FlopsWorkload())
    return CapacityPacker(options=options, method=method, **settings)


def batch(lengths: list[int] | np.ndarray, first_id: int = 0) -> GlobalBatch:
    return GlobalBatch(index=0, documents=Documents.from_lengths(lengths, first_id=first_id))


def show(plan: PackingPlan) -> list[list[int]]:
    """Returns lengths by micro-batch, descending (their order within a bin is random)."""
    return [sorted(m.lengths.tolist(), reverse=True) for m in plan.micro_batches]


def waiting(carry: Carry) -> list[tuple[int, int]]:
    return list(zip(carry.pieces.length.tolist(), carry.slot.tolist(), strict=True))


def test_full_bins_leave_and_the_gaps_wait() -> None:
    p = packer(BFD)
    # 8 + 1, 6 + 4, 5 + 3: the fullest two leave.
    (plan,), carry = p.push(batch([4, 8, 3, 6, 5, 1]), p.start())
    assert show(plan) == [[6, 4], [8, 1]]
    assert (plan.step, plan.policy, plan.num_held_tokens) == (0, "capacity", 8)
    assert waiting(carry) == [(3, 0), (5, 0)]
    # 5 + 3 is there first, 2 fills it, and it leaves first, together with the fullest new bin.
    (plan,), carry = p.push(batch([7, 9, 2], first_id=6), carry)
    assert show(plan) == [[5, 3, 2], [9]]
    assert waiting(carry) == [(7, 0)]
    (plan,), carry = p.push(None, carry)
    assert show(plan) == [[7], []]
    plans, carry = p.push(None, carry)
    assert (plans, len(carry.pieces), carry.next_step) == ((), 0, 3)


def test_a_last_bin_stays_unless_it_is_full() -> None:
    p = packer(BFD)
    plans, carry = p.push(batch([6, 9]), p.start())
    assert plans == ()
    # No step was made, so nothing is left over: 6 and 9 are as new as 4 and 1.
    assert waiting(carry) == [(6, 1), (9, 1)]
    (plan,), carry = p.push(batch([4, 1], first_id=2), carry)
    assert show(plan) == [[9, 1], [6, 4]]
    assert len(carry.pieces) == 0


def test_streams_leave_in_order() -> None:
    p = packer(NEXT_FIT)
    (plan,), carry = p.push(batch([6, 3, 8, 9, 5]), p.start())
    assert [m.lengths.tolist() for m in plan.micro_batches] == [[6, 3], [8]]
    assert waiting(carry) == [(9, 0), (5, 0)]
    (plan,), carry = p.push(batch([4, 2], first_id=5), carry)
    assert [m.lengths.tolist() for m in plan.micro_batches] == [[9], [5, 4]]
    p = packer(BEST_FIT, open_bins=2)
    (plan,), carry = p.push(batch([6, 7, 5, 4, 3]), p.start())
    assert [m.lengths.tolist() for m in plan.micro_batches] == [[6, 4], [7]]
    assert waiting(carry) == [(5, 0), (3, 0)]


def test_several_batches_are_packed_together() -> None:
    p = packer(BFD, pack_batches=3)
    carry = p.start()
    for i, lengths in enumerate([[7, 7], [6, 6], []]):
        plans, carry = p.push(batch(lengths, first_id=10 * i), carry)
        assert plans == ()
    # A batch without documents does not count.
    assert waiting(carry) == [(7, 1), (7, 1), (6, 2), (6, 2)]
    plans, carry = p.push(batch([4, 4, 3, 3], first_id=20), carry)
    assert sorted(bin_ for plan in plans for bin_ in show(plan)) == [[6, 4], [6, 4], [7, 3], [7, 3]]
    assert [plan.step for plan in plans] == [0, 1]
    assert [plan.num_held_tokens for plan in plans] == [20, 0]


def test_steps_of_one_packing_are_in_random_order() -> None:
    """Best fit decreasing opens the bins of long documents first; steps must not follow that."""
    p = packer(BFD, num=1, window=100)
    plans, _ = p.push(batch([100 - i // 10 for i in range(60)]), p.start())
    longest = [int(plan.pieces.length.max()) for plan in plans]
    assert len(plans) == 59
    assert sorted(longest, reverse=True) != longest
    assert np.mean(longest[:30]) == pytest.approx(np.mean(longest[30:]), abs=1)
    again, _ = p.push(batch([100 - i // 10 for i in range(60)]), p.start())
    assert [plan.digest() for plan in again] == [plan.digest() for plan in plans]


def test_long_documents_are_split_at_the_window_or_refused() -> None:
    p = packer(BFD, window=10, capacity=14)
    (plan,), carry = p.push(None, p.push(batch([24]), p.start())[1])
    assert show(plan) == [[10, 4], [10]]
    assert plan.num_targets == 23
    options = PackerOptions(
        num_micro_batches=2, context_window=10, cost=FlopsWorkload(), long_documents="refuse"
    )
    with pytest.raises(ValueError, match="document 0 has 24 tokens, more than the context window"):
        CapacityPacker(options=options).push(batch([24]), carry)


def test_a_method_by_its_name() -> None:
    by_name = packer("best_fit_decreasing")  # pyright: ignore[reportArgumentType]
    plans, _ = by_name.push(batch([9, 3, 6]), by_name.start())
    others, _ = packer(BinMethod.BEST_FIT_DECREASING).push(batch([9, 3, 6]), packer().start())
    assert [plan.digest() for plan in plans] == [plan.digest() for plan in others]


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match="capacity = 9 tokens must be at least the context window, 10 tokens"
    ):
        packer(capacity=9)
    with pytest.raises(ValueError, match="pack_batches = 0 must be at least 1"):
        packer(pack_batches=0)
    with pytest.raises(ValueError, match="open_bins = 0 must be at least 1"):
        packer(open_bins=0)
    with pytest.raises(ValueError, match="method = 'worst_fit' is unknown; use one of first_fit"):
        packer("worst_fit")  # pyright: ignore[reportArgumentType]
    _, carry = packer().push(batch([9]), packer().start())
    with pytest.raises(ValueError, match="document 0 has a waiting piece of 9 tokens"):
        packer(window=8).push(None, carry)


def test_a_short_document_does_not_wait_for_a_gap() -> None:
    """Bins full at once keep coming, and nothing fits the gap beside the short document."""
    for method in BinMethod:
        p = packer(method, num=2, window=10)
        _, carry = p.push(batch([1]), p.start())
        left_at = None
        for i in range(4):
            plans, carry = p.push(batch([10, 10, 10], first_id=1 + 3 * i), carry)
            if left_at is None and any(0 in plan.pieces.document for plan in plans):
                left_at = i
        assert left_at is not None, method
        assert left_at <= 1, method


@pytest.mark.parametrize("method", [FFD, BFD])
def test_batches_are_packed_nearly_as_well_as_all_documents_at_once(method: BinMethod) -> None:
    """Packing each batch by itself trains a nearly empty bin for almost every one of them."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(800) - 0.72, 1.2, 4000)), 1, 4096).astype(np.int64)
    p = packer(method, num=4, window=4096)
    carry, bins, alone = p.start(), 0, 0
    for i in range(0, 4000, 20):
        alone += pack_bins(lengths[i : i + 20], 4096, method=method).num_bins
        plans, carry = p.push(batch(lengths[i : i + 20], first_id=i), carry)
        bins += sum(len(m.pieces) > 0 for plan in plans for m in plan.micro_batches)
    plans, carry = p.push(None, carry)
    bins += sum(len(m.pieces) > 0 for plan in plans for m in plan.micro_batches)
    fewest = -(-int(lengths.sum()) // 4096)
    assert bins <= 1.01 * fewest
    assert alone >= 1.1 * fewest
