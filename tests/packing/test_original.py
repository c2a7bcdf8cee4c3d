"""Tests Plain-4D's windows against literal values."""

from wlb.cost import FlopsWorkload
from wlb.packing import OriginalPacker, PackerOptions, WindowCut
from wlb.plan import Documents, GlobalBatch, PackingPlan

OPTIONS = PackerOptions(num_micro_batches=2, context_window=8, cost=FlopsWorkload())


def batch(index: int, lengths: list[int], first_id: int = 0) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=first_id)
    return GlobalBatch(index=index, documents=documents)


def show(plan: PackingPlan) -> list[list[str]]:
    return [
        [
            f"{p.document}:{p.start}-{p.stop}"
            for p in map(m.pieces.__getitem__, range(len(m.pieces)))
        ]
        for m in plan.micro_batches
    ]


def test_windows_cut_documents_and_carry_the_rest() -> None:
    packer = OriginalPacker(options=OPTIONS)
    (plan,), carry = packer.push(batch(0, [5, 6, 3, 7]), packer.start())
    assert show(plan) == [["0:0-5", "1:0-3"], ["1:3-6", "2:0-3", "3:0-2"]]
    assert plan.pieces.num_targets.tolist() == [4, 3, 2, 2, 2]
    assert plan.workload_ns.tolist() == [25 + 9, 9 + 9 + 4]
    assert plan.num_held_tokens == 5
    (plan,), carry = packer.push(batch(1, [11], first_id=4), carry)
    assert show(plan) == [["3:2-7", "4:0-3"], ["4:3-11"]]
    assert plan.step == 1
    assert packer.push(None, carry)[0] == ()


def test_a_batch_of_two_steps_and_a_short_end() -> None:
    packer = OriginalPacker(options=OPTIONS)
    plans, carry = packer.push(batch(0, [33]), packer.start())
    assert [p.step for p in plans] == [0, 1]
    (last,), carry = packer.push(None, carry)
    assert show(last) == [["0:32-33"], []]
    assert len(carry.pieces) == 0


def test_too_few_tokens_for_a_step_wait() -> None:
    packer = OriginalPacker(options=OPTIONS)
    plans, carry = packer.push(batch(0, [15]), packer.start())
    assert plans == ()
    assert carry.num_tokens == 15


WIDE = PackerOptions(num_micro_batches=2, context_window=32, cost=FlopsWorkload())


def test_a_loader_that_cuts_only_short_documents() -> None:
    packer = OriginalPacker(options=WIDE, cut=WindowCut.SHORT)
    # 20 and then 30, which opens a window; 32 opens one; the 29 opens one; 11 fits the first.
    plans, carry = packer.push(batch(0, [20, 30, 32, 29, 11]), packer.start())
    assert plans == ()  # window 0 has 31 of 32, window 1 30
    assert carry.slot.tolist() == [0, 0, 1, 2, 3]
    # 4 tokens are short (C / 8): 1 fills window 0, 2 fill window 1, the last goes on.
    (plan,), carry = packer.push(batch(1, [4], first_id=5), carry)
    assert show(plan) == [["0:0-20", "4:0-11", "5:0-1"], ["1:0-30", "5:1-3"]]
    assert carry.slot.tolist() == [0, 1, 1]
    assert carry.pieces.document.tolist() == [2, 3, 5]
    assert plan.pieces.num_targets.tolist() == [19, 10, 1, 29, 2]
    (last,), carry = packer.push(None, carry)
    assert show(last) == [["2:0-32"], ["3:0-29", "5:3-4"]]
    assert carry.num_tokens == 0


def test_full_window_documents_stay_whole() -> None:
    lengths = [3, 5, 32, 20, 32, 7, 32, 4, 4, 4, 4, 4, 4]
    whole = OriginalPacker(options=WIDE, cut=WindowCut.SHORT)
    plans = [*whole.push(batch(0, lengths), whole.start())[0]]
    assert any(show(p)[i] == ["2:0-32"] for p in plans for i in range(2))
    anywhere = OriginalPacker(options=WIDE)
    plans = [*anywhere.push(batch(0, lengths), anywhere.start())[0]]
    assert not any(len(window) == 1 for p in plans for window in show(p))


def test_a_carry_of_one_loader_goes_on_in_the_other() -> None:
    stream = OriginalPacker(options=WIDE)
    _, carry = stream.push(batch(0, [20, 30, 10]), stream.start())
    assert carry.num_tokens == 60
    whole = OriginalPacker(options=WIDE, cut=WindowCut.SHORT)
    plans, carry = whole.push(batch(1, [20], first_id=3), carry)
    plans = [*plans, *whole.push(None, carry)[0]]
    assert sum(p.num_tokens for p in plans) == 80
    assert all(int(p.tokens.max()) <= 32 for p in plans)


def test_windows_do_not_stay_open_for_ever_where_short_documents_are_rare() -> None:
    """Documents take two thirds of a window, and none fills the gaps, so some have to be cut."""
    packer = OriginalPacker(options=WIDE, cut=WindowCut.SHORT)
    carry, steps, most = packer.start(), 0, 0
    for index in range(40):
        plans, carry = packer.push(batch(index, [21, 21, 22], first_id=3 * index), carry)
        steps += len(plans)
        most = max(most, carry.num_tokens)
    assert steps >= 34  # of 40
    assert most <= (4 * 2 + 2) * 32
