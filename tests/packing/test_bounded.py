"""Tests `bounded`: literal decisions, its three bounds, the flush, determinism, refusals."""

import doctest
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sets import full
from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource, lengths_of_family
from wlb.packing import BoundedPacker, PackerOptions, VarLenPacker, bounded
from wlb.packing.base import ONE_PRICE, PriceRange
from wlb.packing.bounded import StepLimits, choose, fitting
from wlb.packing.study.measure import measure
from wlb.plan import Carry, Documents, GlobalBatch, PackingPlan, Pieces, UserError, imbalance

C = 4096
COST = FlopsWorkload(quadratic_ns=1670 / C, linear_ns_per_token=1000)


def packer(
    *,
    n: int = 4,
    s_max: float = 2.0,
    step_tokens: float | None = 1.5,
    max_delay: int = 10,
    delay_price: float | None = None,
    price_range: PriceRange = ONE_PRICE,
) -> BoundedPacker:
    options = PackerOptions(num_micro_batches=n, context_window=C, cost=COST)
    return BoundedPacker(
        options=options,
        s_max=int(s_max * C),
        step_tokens=None if step_tokens is None else int(step_tokens * n * C),
        max_delay=max_delay,
        delay_price=delay_price,
        price_range=price_range,
    )


def batch(index: int, lengths: list[int]) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=1000 * index)
    return GlobalBatch(index=index, documents=documents)


def run(pack: BoundedPacker, batches: list[list[int]]) -> tuple[list[PackingPlan], Carry]:
    carry, plans = pack.start(), list[PackingPlan]()
    for index, lengths in enumerate(batches):
        made, carry = pack.push(batch(index, lengths), carry)
        plans += made
    return plans, carry


ORDINARY = [C // 16] * 64
"""This batch has four windows and no outlier."""


def test_the_worked_example_of_the_docstring() -> None:
    done = doctest.testmod(bounded)
    assert (done.failed, done.attempted > 4) == (0, True)


def test_nothing_is_held_without_outliers() -> None:
    plans, carry = run(packer(), [ORDINARY] * 3)
    assert [p.num_tokens for p in plans] == [4 * C] * 3
    assert [imbalance(p.workload_ns) for p in plans] == [1.0] * 3
    assert carry.num_tokens == 0


def test_a_tall_document_waits_for_company_and_leaves_with_it() -> None:
    tall = [C, *ORDINARY[16:]]
    plans, carry = run(packer(n=4), [tall] * 4)
    held = [p.num_held_tokens // C for p in plans]
    assert held[0] >= 1  # the first one waits
    together = [int((p.pieces.length == C).sum()) for p in plans]
    assert max(together) >= 3  # and leaves with others of its height
    released = [p for p, k in zip(plans, together, strict=True) if k]
    assert all(imbalance(p.workload_ns) < 1.1 for p in released)
    assert carry.num_tokens + sum(p.num_tokens for p in plans) == 4 * 4 * C


def test_four_full_windows_leave_at_once() -> None:
    plans, _ = run(packer(), [[C] * 4])
    assert [sorted(p.tokens.tolist()) for p in plans] == [[C] * 4]


def test_a_rare_tall_document_leaves_by_the_maximum_delay() -> None:
    for limit in (1, 3, 6):
        pack = packer(max_delay=limit, delay_price=0.001)
        plans, _ = run(pack, [[C, *ORDINARY[16:]], *[ORDINARY] * 12])
        (left,) = [p for p in plans if (p.pieces.length == C).any()]
        assert left.step <= limit
        assert sum(p.num_overdue for p in plans) == 0


def test_the_token_cap_of_a_step_holds_and_delays() -> None:
    pack = packer(step_tokens=1.05, s_max=1.5)
    plans, carry = run(pack, [[C] * 4 + ORDINARY, *[ORDINARY] * 30])
    assert max(p.num_tokens for p in plans) <= int(1.05 * 4 * C)
    assert max(int(p.tokens.max()) for p in plans) <= int(1.5 * C)
    assert carry.num_tokens == 0  # four windows too many, caught up at 0.2 a step


def test_overruns_of_the_maximum_delay_are_counted() -> None:
    """With three batches' tokens at once and a cap of 1.1, no order can keep a delay of 2."""
    pack = packer(step_tokens=1.1, s_max=1.5, max_delay=2)
    plans, carry = run(pack, [ORDINARY * 3, *[ORDINARY] * 40])
    late = sum(int((p.step - p.pieces.arrival_step > 2).sum()) for p in plans)
    assert sum(p.num_overdue for p in plans) == late > 0
    assert carry.num_tokens == 0


def test_a_batch_without_documents_makes_no_step() -> None:
    pack = packer()
    _, carry = pack.push(batch(0, [C]), pack.start())
    plans, after = pack.push(batch(1, []), carry)
    assert plans == ()
    assert (after.next_step, after.num_tokens) == (carry.next_step, carry.num_tokens)


def test_the_flush_releases_everything_under_the_caps() -> None:
    pack = packer(step_tokens=1.1, s_max=1.5)
    _, carry = run(pack, [[C, *ORDINARY[16:]], [C] * 5 + ORDINARY * 2])
    waiting = carry.num_tokens
    plans, after = pack.push(None, carry)
    assert after.num_tokens == 0
    assert sum(p.num_tokens for p in plans) == waiting
    assert max(p.num_tokens for p in plans) <= int(1.1 * 4 * C)
    assert [p.step for p in plans] == list(range(carry.next_step, after.next_step))


def test_the_last_batch_keeps_what_waits_company() -> None:
    """A document of the window waits for company; at the end the last batch's tokens are there."""
    pack, last = packer(), batch(1, [C // 4] * 8)
    carry = waiting_for("bounded", [C], [0], 1)
    unknown, rest = pack.push(last, carry)
    made = [p.tokens.tolist() for p in (*unknown, *pack.push(None, rest)[0])]
    assert made == [[C // 2] * 4, [C, 0, 0, 0]]
    (plan,), empty = pack.push(replace(last, is_last=True), carry)
    assert sorted(plan.tokens.tolist()) == [C // 2, 3 * C // 4, 3 * C // 4, C]
    assert (empty.num_tokens, empty.next_step) == (0, 2)
    assert pack.push(None, empty)[0] == ()
    # An end without documents is a flush.
    (flushed,), _ = pack.push(replace(batch(1, []), is_last=True), carry)
    assert flushed.num_tokens == C
    assert pack.push(replace(batch(0, []), is_last=True), pack.start())[0] == ()


@pytest.mark.parametrize("n", [4, *full(8, 32)])
def test_knowing_the_end_never_makes_it_longer(n: int) -> None:
    """The slowest micro-batches of the last steps take less time together, mostly much less."""
    pack = packer(n=n, price_range=PriceRange(low=0.7, high=1.6))
    known, unknown = list[int](), list[int]()
    for seed in range(8):
        *most, last = fitted(12, n, seed)
        carry = pack.start()
        for b in most:
            _, carry = pack.push(b, carry)
        plans, rest = pack.push(last, carry)
        ends = (*plans, *pack.push(None, rest)[0]), pack.push(replace(last, is_last=True), carry)[0]
        assert sum(p.num_tokens for p in ends[0]) == sum(p.num_tokens for p in ends[1])
        unknown.append(sum(int(p.workload_ns.max()) for p in ends[0]))
        known.append(sum(int(p.workload_ns.max()) for p in ends[1]))
    assert all(a <= b for a, b in zip(known, unknown, strict=True))
    assert sum(known) < 0.85 * sum(unknown)


def fitted(num: int, n: int, seed: int = 0) -> list[GlobalBatch]:
    source = lengths_of_family("wlb_paper", window=C, num_documents=num * n * 90, seed=seed)
    stream = GlobalBatches(source, tokens_per_batch=n * C, seed=seed)
    return [b for b, _ in zip((b for b, _ in stream.iterate()), range(num), strict=False)]


def test_it_balances_better_than_algorithm_1_at_less_delay() -> None:
    """The comparison is on the fitted stream, at the same S_max and T, with the paper's two
    queues and prices that are right.
    """
    batches = fitted(150, 4)
    ours = measure(packer(delay_price=0.03), batches, cost=COST).summary
    options = PackerOptions(num_micro_batches=4, context_window=C, cost=COST)
    theirs = measure(
        VarLenPacker(
            options=options,
            s_max=2 * C,
            step_tokens=6 * C,
            queue_thresholds=(int(0.2 * C), int(0.63 * C)),
        ),
        batches,
        cost=COST,
    ).summary
    assert ours.imbalance_time_weighted < theirs.imbalance_time_weighted
    assert ours.mean_delay < 0.75 * theirs.mean_delay
    assert ours.max_delay <= min(10, theirs.max_delay)
    assert ours.imbalance < 1.01
    assert ours.num_overdue == 0


@pytest.mark.parametrize("n", [8, 16])
def test_pipelines_are_balanced_together(n: int) -> None:
    ours = measure(packer(n=n), fitted(60, n), cost=COST).summary
    assert ours.imbalance < 1.015
    assert ours.mean_delay < 0.45


def test_a_higher_price_means_less_delay() -> None:
    batches = fitted(100, 4)
    runs = [measure(packer(delay_price=p), batches, cost=COST).summary for p in (0.01, 0.1, 1.0)]
    delays = [r.mean_delay for r in runs]
    assert delays == sorted(delays, reverse=True)
    assert delays[0] > 2 * delays[2]
    assert runs[0].imbalance < runs[2].imbalance


@given(
    st.integers(1, 6),
    st.lists(st.lists(st.integers(1, 3 * 64), max_size=20), min_size=1, max_size=8),
    st.sampled_from([(1.1, 1.2), (1.5, 1.1), (2.0, 1.5), (2.0, None)]),
    st.integers(1, 12),
    st.booleans(),
)
def test_bounds_and_conservation(
    n: int,
    batches: list[list[int]],
    caps: tuple[float, float | None],
    max_delay: int,
    is_linear: bool,
) -> None:
    """Whatever comes, S_max and T hold, steps have documents, tokens come once, and it goes on."""
    window = 64
    cost = FlopsWorkload(quadratic_ns=0 if is_linear else 3, linear_ns_per_token=100)
    options = PackerOptions(num_micro_batches=n, context_window=window, cost=cost)
    pack = BoundedPacker(
        options=options,
        s_max=int(caps[0] * window),
        step_tokens=None if caps[1] is None else math.ceil(caps[1] * n * window),
        max_delay=max_delay,
    )
    plans, carry = run(pack, batches)
    made, end = pack.push(None, carry)
    plans += made
    assert end.num_tokens == 0
    assert sum(p.num_tokens for p in plans) == sum(map(sum, batches))
    assert [p.step for p in plans] == list(range(len(plans)))
    for plan in plans:
        assert plan.num_tokens > 0
        assert int(plan.tokens.max()) <= pack.s_max
        assert plan.num_tokens <= pack.limits.step_tokens
    cap, tokens = pack.limits.step_tokens, sum(map(sum, batches))
    if tokens <= cap // 2:  # nothing can be crowded out
        assert all(int((p.step - p.pieces.arrival_step).max()) <= max_delay for p in plans[:-1])


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_a_choice_takes_something_and_what_must_leave(
    documents: list[tuple[int, int]], n: int, max_delay: int
) -> None:
    length = np.array([d[0] for d in documents])
    age = np.array([d[1] for d in documents])
    limits = StepLimits(
        num_micro_batches=n,
        tokens_per_step=n * 64,
        s_max=128,
        step_tokens=n * 96,
        max_delay=max_delay,
        price=0.1,
    )
    work = length * (length + 40)
    taken = choose(length, work, age, limits)
    assert taken.any()
    assert length[taken].sum() <= limits.step_tokens
    forced = age >= max_delay
    if length[forced].sum() <= limits.step_tokens:
        assert taken[forced].all()


def test_equal_documents_leave_oldest_first() -> None:
    limits = StepLimits(
        num_micro_batches=2,
        tokens_per_step=200,
        s_max=150,
        step_tokens=210,
        max_delay=50,
        price=0.01,
    )
    length = np.full(6, 100)
    age = np.array([0, 5, 2, 9, 1, 3])
    taken = choose(length, length * length, age, limits)
    assert np.flatnonzero(taken).tolist() == [1, 3]


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match="s_max = 2048 tokens must be at least the context window, 4096 tokens"
    ):
        packer(s_max=0.5)
    with pytest.raises(
        ValueError, match=r"a step may have at most 16384 tokens and a global batch brings 16384 "
    ):
        packer(step_tokens=1.0)
    with pytest.raises(
        ValueError, match=r"set packing.step_tokens above 1 global batch, and packing.s_max"
    ):
        packer(s_max=1.0, step_tokens=None)
    with pytest.raises(ValueError, match="max_delay = 0 must be at least 1"):
        packer(max_delay=0)
    for price in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="delay_price"):
            packer(delay_price=price)
    pack = packer(s_max=1.5)
    _, carry = pack.push(batch(0, [C, *ORDINARY[16:]]), pack.start())
    small = BoundedPacker(
        options=PackerOptions(num_micro_batches=4, context_window=C // 4, cost=COST), s_max=C // 2
    )
    with pytest.raises(ValueError, match="larger context window cut this piece"):
        small.push(None, carry)


def test_no_lengths_no_steps() -> None:
    pack = packer()
    assert pack.push(None, pack.start())[0] == ()
    empty = LengthSource(name="one", lengths=np.array([5]))
    assert (
        measure(
            pack,
            [b for b, _ in GlobalBatches(empty, tokens_per_batch=10, seed=0, epochs=1).iterate()],
            cost=COST,
        ).summary.num_tokens
        == 5
    )


def waiting_for(policy: str, lengths: list[int], arrival: list[int], step: int) -> Carry:
    pieces = Pieces.whole(Documents.from_lengths(lengths))
    pieces = replace(pieces, arrival_step=np.array(arrival))
    slot = np.zeros(len(lengths), np.int64)
    return Carry(policy=policy, pieces=pieces, slot=slot, next_step=step)


def small(n: int, window: int, s_max: int, step_tokens: int, max_delay: int) -> BoundedPacker:
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=0.6 * window)
    options = PackerOptions(num_micro_batches=n, context_window=window, cost=cost)
    return BoundedPacker(options=options, s_max=s_max, step_tokens=step_tokens, max_delay=max_delay)


def test_what_is_due_leaves_even_where_s_max_is_tight() -> None:
    pack = small(4, 1000, 1250, 5000, 5)
    carry = waiting_for("bounded", [756, 878, 976, 517, 572, 912], [0, 2, 2, 3, 5, 5], 5)
    documents = Documents.from_lengths([636, 914, 628, 705, 822], first_id=100)
    (plan,), _ = pack.push(GlobalBatch(index=5, documents=documents), carry)
    assert 0 in plan.pieces.document  # 756 tokens, 5 steps late
    assert plan.num_overdue == 0


@pytest.mark.parametrize(("max_delay", "num_pieces", "most"), [(2, 10, 30), (10, 30, 60)])
def test_steps_are_full_while_more_is_due_than_micro_batches_hold(
    max_delay: int, num_pieces: int, most: int
) -> None:
    """A document of many windows waits: three pieces are T tokens, and S_max admits only two."""
    pack = small(2, 1000, 1500, 3000, max_delay)
    batches = [[1000] * num_pieces, *[[100] * 20] * 40]
    at_once, _ = run(pack, batches[:1])
    assert [p.num_tokens for p in at_once] == [2000] * len(at_once)
    assert at_once[-1].num_held_tokens <= pack.most_held_tokens
    plans, carry = run(pack, batches)
    assert len(carry.pieces) == 0
    behind = [p for p in plans[len(at_once) :] if p.num_held_tokens >= 2000]
    assert [p.num_tokens for p in behind] == [3000] * len(behind)
    assert len(behind) >= num_pieces - 2 * len(at_once) - 4
    # Pieces of the first batch held up others.
    assert sum(p.num_overdue for p in plans) <= most


def test_due_documents_leave_past_one_that_the_caps_leave_out() -> None:
    """The oldest first; a due document too long for what is left of T stops no shorter one."""
    limits = StepLimits(
        num_micro_batches=2,
        tokens_per_step=200,
        s_max=150,
        step_tokens=210,
        max_delay=3,
        price=0.01,
    )
    length = np.array([100, 60, 100, 40, 40, 40])
    age = np.array([9, 8, 7, 3, 3, 0])
    taken = choose(length, length * length, age, limits)
    assert np.flatnonzero(taken).tolist() == [0, 1, 3]
    assert fitting(length, 210).tolist() == [0, 1, 3]
    assert fitting(np.array([300]), 210).tolist() == []


def test_the_flush_takes_what_is_due_first() -> None:
    pack = small(2, 100, 150, 220, 2)
    carry = waiting_for("bounded", [100, 100, 20] + [20] * 11, [1, 1, 1] + [0] * 11, 2)
    plans, _ = pack.push(None, carry)
    assert sum(p.num_overdue for p in plans) == 0


def test_no_nearly_empty_step_beside_a_pile() -> None:
    pack = small(4, 1000, 2000, 6000, 10)
    documents = Documents.from_lengths([1000, 1000, 1000, 501, 1, 501])
    (plan,), _ = pack.push(GlobalBatch(index=0, documents=documents), pack.start())
    assert plan.num_tokens >= 0.35 * 4000
    draw = np.random.default_rng(1)
    lengths = [draw.integers(1, C + 1, 2 * n).tolist() for n in [4] * 40]
    plans, _ = run(packer(), lengths)
    assert min(p.num_tokens for p in plans[1:]) >= 0.35 * 4 * C


@pytest.mark.parametrize("tokens", [1, 60])
def test_work_that_costs_nothing(tokens: int) -> None:
    options = PackerOptions(
        num_micro_batches=2, context_window=100, cost=FlopsWorkload(quadratic_ns=0)
    )
    pack = BoundedPacker(options=options, s_max=200)
    documents = Documents.from_lengths([tokens] * 4)
    plans, carry = pack.push(GlobalBatch(index=0, documents=documents), pack.start())
    assert len(plans) == (tokens == 60)  # less than half of a global batch waits for more
    flushed, carry = pack.push(None, carry)
    assert sum(p.num_tokens for p in (*plans, *flushed)) == 4 * tokens
    assert carry.num_tokens == 0


def test_plans_do_not_depend_on_the_unit_of_cost() -> None:
    """This also holds where tokens times cost is beyond 64 bits."""
    batches = fitted(24, 8)
    made: list[list[int]] = []
    for power in (0, 13, 18):
        cost = FlopsWorkload(
            quadratic_ns=2.0**power * 1670, linear_ns_per_token=2.0**power * 1000 * C
        )
        options = PackerOptions(num_micro_batches=8, context_window=C, cost=cost)
        pack = BoundedPacker(options=options, s_max=C * 11 // 10)
        carry, digests = pack.start(), list[int]()
        for b in batches:
            (plan,), carry = pack.push(b, carry)
            digests.append(hash(tuple(plan.pieces.document.tolist())))
        made.append(digests)
    assert made[0] == made[1] == made[2]


def test_a_piece_that_no_step_can_take_is_refused_not_flushed_for_ever() -> None:
    pack = small(1, 100, 200, 120, 5)
    with pytest.raises(ValueError, match=r"at most 120 tokens \(s_max or step_tokens\)"):
        pack.push(None, waiting_for("bounded", [150], [0], 0))
    options = PackerOptions(num_micro_batches=2, context_window=100, cost=COST)
    literal = VarLenPacker(options=options, s_max=101, queue_thresholds=(), literal=True)
    with pytest.raises(ValueError, match=r"at most 100 tokens \(s_max\)"):
        literal.push(None, waiting_for("var_len", [101], [0], 0))


def rare(num: int) -> list[GlobalBatch]:
    """Returns a full-window document every twelve batches, and some of 1/4 to 1/2 window
    between.
    """
    draw = np.random.default_rng(2)
    out: list[GlobalBatch] = []
    for i in range(num):
        some = draw.integers(C // 4, C // 2, 3).tolist()
        out.append(batch(i, [C] * (i % 12 == 5) + some + ORDINARY[: 64 - 4 * len(some)]))
    return out


def test_a_rare_tall_document_collects_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortfall term does it: without it the document leaves alone at its last moment."""
    batches = rare(96)
    ours = measure(packer(), batches, cost=COST).summary
    monkeypatch.setattr(bounded, "URGENCY", 0.0)
    without = measure(packer(), batches, cost=COST).summary
    assert ours.imbalance_time_weighted < without.imbalance_time_weighted - 0.005
    assert ours.imbalance_max < without.imbalance_max - 0.03


def test_moves_and_swaps_are_worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = fitted(80, 16)
    pack = packer(n=16)
    ours = measure(pack, batches, cost=COST).summary
    monkeypatch.setattr(bounded, "refine", lambda rows, *_, **__: rows)
    without = measure(pack, batches, cost=COST).summary
    assert ours.imbalance < without.imbalance - 0.001


def test_a_backlog_costs_more_the_longer_it_takes_to_catch_up() -> None:
    """Of two equally balanced choices the one that leaves less behind wins, the more so at a tight
    T.
    """
    batches = fitted(100, 4)
    pack = packer(step_tokens=1.1, s_max=1.5, max_delay=40)
    tight = measure(pack, batches, cost=COST).summary
    assert tight.mean_delay < 0.6
    assert tight.held_tokens < 0.8 * 4 * C
    assert tight.imbalance < 1.02


def test_sizes_are_whole_numbers() -> None:
    options = PackerOptions(num_micro_batches=2, context_window=64, cost=COST)
    made = BoundedPacker(options=options, s_max=np.int64(96), max_delay=np.int32(2))
    assert (type(made.s_max), type(made.max_delay)) == (int, int)
    for wrong in ({"s_max": 96.5}, {"max_delay": 2.5}, {"step_tokens": 200.0}):
        with pytest.raises(UserError, match="must be a whole number"):
            BoundedPacker(**{"options": options, "s_max": 96, **wrong})
