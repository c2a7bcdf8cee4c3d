"""Plain-4D's windows, literally."""

from wlb.cost import FlopsWorkload
from wlb.packing import OriginalPacker, PackerOptions
from wlb.plan import Documents, GlobalBatch, PackingPlan

OPTIONS = PackerOptions(num_micro_batches=2, context_window=8, cost=FlopsWorkload())


def batch(index: int, lengths: list[int], first_id: int = 0) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=first_id, arrival=index)
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
