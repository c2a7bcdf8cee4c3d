"""Tests Algorithm 1 against literal steps: queues, releases, placements, leftovers, the flush."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from wlb.cost import FlopsWorkload
from wlb.packing import BoundedPacker, Packer, PackerOptions, VarLenPacker, measure
from wlb.packing.placement import place
from wlb.plan import Carry, Documents, GlobalBatch, PackingPlan, imbalance, predict, starved_remark
from wlb.planner import Planner


def packer(*, s_max: int = 12, thresholds: tuple[int, ...] = (6, 8), n: int = 2) -> VarLenPacker:
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=4)
    options = PackerOptions(num_micro_batches=n, context_window=8, cost=cost)
    return VarLenPacker(options=options, s_max=s_max, queue_thresholds=thresholds)


def batch(index: int, lengths: list[int], first_id: int = 0) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=first_id)
    return GlobalBatch(index=index, documents=documents)


def documents(plan: PackingPlan) -> list[list[int]]:
    return [sorted(m.pieces.document.tolist()) for m in plan.micro_batches]


def waiting(carry: Carry) -> list[tuple[int, int]]:
    return list(zip(carry.slot.tolist(), carry.pieces.document.tolist(), strict=True))


def test_placement_is_least_work_then_shortest_then_left_over() -> None:
    # Work first (ties to the lowest index): 0 -> [0], 1 -> [1], then the lighter one.
    assert place([5, 4, 2, 1], [25, 16, 4, 1], num_micro_batches=2, s_max=9) == (
        [[0], [1, 2, 3]],
        [],
    )
    # Row 2 does not fit the lighter (but longer) micro-batch 0 and goes to the shorter one.
    assert place([8, 3, 4], [1, 9, 4], num_micro_batches=2, s_max=9) == ([[0], [1, 2]], [])
    # Exactly S_max fits; one more does not.
    assert place([9, 9, 1], [9, 9, 1], num_micro_batches=2, s_max=9) == ([[0], [1]], [2])


def test_outliers_wait_until_there_is_one_for_each_micro_batch() -> None:
    pack = packer()
    (plan,), carry = pack.push(batch(0, [3, 8, 2, 6, 1]), pack.start())
    assert documents(plan) == [[0], [2, 4]]
    assert waiting(carry) == [(1, 3), (2, 1)]  # 6 tokens in queue 1, 8 tokens in queue 2
    assert plan.num_held_tokens == 14
    (plan,), carry = pack.push(batch(1, [7, 2, 4], first_id=5), carry)
    # Queue 1 holds two now (document 3 and 5) and releases them; longest first: 5, 3, 7, 6.
    assert documents(plan) == [[5, 6], [3, 7]]
    assert waiting(carry) == [(2, 1)]
    assert predict(plan).max_delay == 1


def test_a_queue_releases_as_often_as_it_can() -> None:
    pack = packer(s_max=16)
    (plan,), carry = pack.push(batch(0, [6, 6, 6, 6, 6]), pack.start())
    assert documents(plan) == [[0, 2], [1, 3]]
    assert waiting(carry) == [(1, 4)]


def crafted_stream() -> list[GlobalBatch]:
    """Every fourth batch of 4,000 tokens has three documents for each of two outlier queues."""
    outliers, ordinary = [250, *[925] * 3, *[325] * 3], [100] * 40
    lengths = [ordinary if i % 4 else outliers for i in range(12)]
    return [batch(i, each, first_id=100 * i) for i, each in enumerate(lengths)]


def test_the_printed_algorithm_starves_steps_and_other_keys_do_not() -> None:
    """The first batch trains 250 of its 4,000 tokens, in one of four micro-batches."""
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=4000)
    options = PackerOptions(num_micro_batches=4, context_window=1000, cost=cost)
    printed = VarLenPacker(options=options, s_max=1500, queue_thresholds=(300, 630))
    (plan,), _ = printed.push(crafted_stream()[0], printed.start())
    assert sorted(plan.tokens.tolist()) == [0, 0, 0, 250]
    assert imbalance(plan.workload_ns) == 4.0

    def remark(packer: Packer) -> str:
        return starved_remark(measure(packer, crafted_stream(), cost=cost).tokens)

    for starving in (printed, replace(printed, literal=True), replace(printed, step_tokens=4400)):
        assert "of 12 steps are starved" in remark(starving)
        assert "tokens; the smallest has 250 tokens" in remark(starving)
    assert remark(replace(printed, queue_thresholds=())) == ""
    assert remark(BoundedPacker(options=options, s_max=1500, step_tokens=4400)) == ""


def test_held_outliers_leave_after_so_many_steps_however_many_there_are() -> None:
    pack = replace(packer(thresholds=(6,), s_max=16), hold=2)
    (plan,), carry = pack.push(batch(0, [6, 2, 8, 7]), pack.start())
    assert documents(plan) == [[1], []]
    (plan,), carry = pack.push(batch(1, [1, 6], first_id=4), carry)
    assert documents(plan) == [[4], []]
    (plan,), carry = pack.push(batch(2, [3], first_id=6), carry)
    assert documents(plan) == [[2, 6], [0, 3]]
    assert predict(plan).max_delay == 2
    assert waiting(carry) == [(1, 5)]
    plans, carry = pack.push(None, carry)
    assert [documents(plan) for plan in plans] == [[[5], []]]
    with pytest.raises(ValueError, match="hold = -1 must be at least 0"):
        replace(pack, hold=-1)
    with pytest.raises(ValueError, match="hold = 2 must be 0 if literal is True"):
        replace(pack, literal=True)
    with pytest.raises(ValueError, match="hold = 2 delays no document"):
        replace(pack, queue_thresholds=())


def test_held_outliers_that_are_all_there_is_make_a_step_for_every_batch() -> None:
    """Steps are what a hold counts, so a batch that makes none would hold them for ever."""
    pack = replace(packer(thresholds=(6,), s_max=16), hold=2)
    (plan,), carry = pack.push(batch(0, [6, 2]), pack.start())
    assert documents(plan) == [[1], []]
    made, delays = [plan], list[int]()
    for i in range(1, 6):
        (plan,), carry = pack.push(batch(i, [7, 8], first_id=2 * i), carry)
        made.append(plan)
        delays += (plan.step - plan.pieces.arrival_step).tolist()
    # Each leaves a step early: the oldest batch of those that wait.
    trained = [sorted(p.pieces.document.tolist()) for p in made]
    assert trained == [[1], [0], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert delays == [1] * 9
    none, same = pack.push(batch(6, [], first_id=12), carry)
    assert none == ()
    assert waiting(same) == waiting(carry) == [(1, 10), (1, 11)]
    (first,), _ = pack.push(batch(0, [6, 8]), pack.start())
    assert sorted(first.pieces.document.tolist()) == [0, 1]


def test_an_endless_stream_of_held_outliers_is_planned() -> None:
    made = Planner.for_lengths(
        [7] * 50, context_window=8, num_micro_batches=2, queue_thresholds=(6,), epochs=0
    )
    held = replace(made, packer=replace(made.packer, hold=2), baseline=None)
    plans = list(islice(held.steps(), 4))
    assert [plan.step for plan in plans] == [0, 1, 2, 3]


def test_what_does_not_fit_comes_first_in_the_next_step() -> None:
    pack = packer(s_max=8, thresholds=())
    (plan,), carry = pack.push(batch(0, [5, 5, 5, 4]), pack.start())
    assert documents(plan) == [[0], [1]]
    assert waiting(carry) == [(0, 2), (0, 3)]
    (plan,), carry = pack.push(batch(1, [8], first_id=4), carry)
    assert documents(plan) == [[2], [3]]
    assert waiting(carry) == [(0, 4)]
    (plan,), carry = pack.push(batch(2, [], first_id=5), carry)
    assert documents(plan) == [[4], []]
    assert predict(plan).max_delay == 1


def test_the_end_of_data_flushes_everything() -> None:
    pack = packer(s_max=8)
    (first,), carry = pack.push(batch(0, [8, 7, 6, 8, 7]), pack.start())
    plans, carry = pack.push(None, carry)
    plans = (first, *plans)
    placed = sorted(d for p in plans for m in documents(p) for d in m)
    assert carry.pieces.document.tolist() == []
    assert [p.step for p in plans] == [0, 1, 2]
    assert placed == [0, 1, 2, 3, 4]
    again, carry = pack.push(None, carry)
    assert (again, len(carry.pieces), carry.next_step) == ((), 0, 3)


def test_queues_balance_what_packing_alone_cannot() -> None:
    """Two windows are full of one document each, among short ones: the paper's Fig. 8 in small."""
    stream = [[8, 1, 1, 1, 1, 1, 1, 1, 1], [8, 1, 1, 1, 1, 1, 1, 1, 1]]
    plain, queued = packer(thresholds=()), packer(thresholds=(8,))
    worst = {}
    for name, pack in (("plain", plain), ("queued", queued)):
        carry, ratios = pack.start(), []
        for i, lengths in enumerate(stream):
            (plan,), carry = pack.push(batch(i, lengths, first_id=10 * i), carry)
            ratios.append(predict(plan).imbalance)
        worst[name] = max(ratios)
    # W(8) = 96, W(1) = 5: without queues 96 against 8 x 5 = 40, with them 2 x 40 and 2 x (96 + 20).
    assert worst["plain"] == pytest.approx(96 * 2 / 136)
    assert worst["queued"] == pytest.approx(1.0)


def test_shuffle_is_a_function_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        cost = FlopsWorkload()
        options = PackerOptions(num_micro_batches=1, context_window=9, cost=cost, seed=seed)
        pack = VarLenPacker(options=options, s_max=100, queue_thresholds=())
        (plan,), _ = pack.push(batch(0, list(range(1, 9))), pack.start())
        return plan.pieces.document.tolist()

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert sorted(order(1)) == list(range(8))


def test_bad_options_are_refused() -> None:
    with pytest.raises(
        ValueError, match="s_max = 7 tokens must be at least the context window, 8 tokens"
    ):
        packer(s_max=7)
    with pytest.raises(ValueError, match="must increase"):
        packer(thresholds=(6, 6))
    with pytest.raises(ValueError, match="num_micro_batches = 0"):
        PackerOptions(num_micro_batches=0, context_window=8, cost=FlopsWorkload())


def test_a_negative_cost_is_refused() -> None:
    class Broken(FlopsWorkload):
        def workload_ns(self, lengths):
            return -super().workload_ns(lengths)

    options = PackerOptions(num_micro_batches=1, context_window=8, cost=Broken())
    pack = VarLenPacker(options=options, s_max=8, queue_thresholds=())
    with pytest.raises(ValueError, match="must be finite, at least 0"):
        pack.push(batch(0, [3]), pack.start())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e30])
def test_a_cost_that_is_none_is_refused_with_its_document(value: float) -> None:
    class Broken(FlopsWorkload):
        def workload_ns(self, lengths):
            return np.where(np.asarray(lengths) == 5, value, 1.0)

    options = PackerOptions(num_micro_batches=1, context_window=8, cost=Broken())
    for pack in (
        VarLenPacker(options=options, s_max=8, queue_thresholds=()),
        BoundedPacker(options=options, s_max=16),
    ):
        with pytest.raises(
            ValueError, match=r"cost of Piece\(document=1, .* must be finite, at least 0"
        ):
            pack.push(batch(0, [3, 5]), pack.start())


def test_costs_whose_sum_does_not_fit_are_refused() -> None:
    options = PackerOptions(
        num_micro_batches=64, context_window=8, cost=FlopsWorkload(quadratic_ns=2e15)
    )
    pack = BoundedPacker(options=options, s_max=16)
    with pytest.raises(
        ValueError, match=r"more than a 64-bit integer can store; the largest cost is 128000"
    ):
        pack.push(batch(0, [3] * 100 + [8]), pack.start())


def test_a_carry_of_a_larger_window_is_refused_not_flushed_for_ever() -> None:
    wide = VarLenPacker(
        options=PackerOptions(num_micro_batches=2, context_window=20, cost=FlopsWorkload()),
        s_max=20,
        queue_thresholds=(13,),
    )
    _, carry = wide.push(batch(0, [12, 3, 14]), wide.start())
    assert waiting(carry) == [(1, 2)]
    for after in (None, batch(1, [2], first_id=3)):
        with pytest.raises(
            ValueError, match=r"document 2 has a waiting piece of 14 tokens, .* window cut this"
        ):
            packer(s_max=13).push(after, carry)
    (plan,), _ = packer(s_max=14).push(None, carry)  # what fits S_max can go on
    assert documents(plan) == [[2], []]
    capped = replace(packer(s_max=14), step_tokens=13)  # one micro-batch holds it, a step does not
    with pytest.raises(ValueError, match=r"at most 13 tokens \(s_max or step_tokens\)"):
        capped.push(None, carry)
