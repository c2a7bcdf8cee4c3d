"""What each number of a `PackingSummary` is, on plans of a handful of documents."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import ClassVar

import numpy as np
import pytest

from wlb.cost import FlopsWorkload
from wlb.packing import (
    FixedPacker,
    OriginalPacker,
    PackerOptions,
    PackingRun,
    PackingSummary,
    StepGrouping,
    measure,
)
from wlb.packing.measure import DELAY_BINS
from wlb.plan import Carry, Documents, GlobalBatch, PackingPlan, Pieces, offsets_of

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=10)
"""10 tokens take 200 ns (100 of them attention), 20: 600 (400), 40: 2000 (1600)."""

Row = tuple[int, int, int]
"""(document, tokens, step that was next when it came)."""


def plan(
    step: int,
    rows: Sequence[Sequence[Row]],
    *,
    workload_ns: Sequence[int] | None = None,
    held: int = 0,
    overdue: int = 0,
) -> PackingPlan:
    """A plan whose micro-batches are `rows`."""
    flat = np.array([row for members in rows for row in members], np.int64).reshape(-1, 3)
    zero = np.zeros(len(flat), np.int64)
    pieces = Pieces(
        document=flat[:, 0],
        start=zero,
        stop=flat[:, 1],
        num_targets=zero,
        source=zero,
        arrival=flat[:, 2],
    )
    work = workload_ns or [int(COST.workload_ns([n for _, n, _ in r]).sum()) for r in rows]
    return PackingPlan(
        step=step,
        policy="scripted",
        pieces=pieces,
        offsets=offsets_of([len(members) for members in rows]),
        workload_ns=np.array(work, np.int64),
        num_held_tokens=held,
        num_overdue=overdue,
    )


@dataclass(frozen=True)
class Scripted:
    """Push i returns `pushes[i]`; the push at the end of data, `flush`."""

    policy: ClassVar[str] = "scripted"
    pushes: tuple[tuple[PackingPlan, ...], ...]
    flush: tuple[PackingPlan, ...] = ()
    num_micro_batches: int = 2

    def start(self) -> Carry:
        return Carry.empty(self.policy)

    def push(
        self, batch: GlobalBatch | None, carry: Carry
    ) -> tuple[tuple[PackingPlan, ...], Carry]:
        done = carry.next_step
        plans = self.flush if batch is None else self.pushes[done]
        return plans, Carry.empty(self.policy, next_step=done + 1)


def batch(index: int, lengths: Sequence[int] = ()) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=100 * index, arrival=index)
    return GlobalBatch(index=index, documents=documents)


def measured(*pushes: PackingPlan, flush: tuple[PackingPlan, ...] = ()) -> PackingRun:
    """One plan a push."""
    packer = Scripted(tuple((p,) for p in pushes), flush)
    return measure(packer, [batch(i) for i in range(len(pushes))], cost=COST)


def test_imbalance_is_slowest_times_number_over_total() -> None:
    run = measured(
        plan(0, [[(0, 40, 0)], [(1, 20, 0), (2, 20, 0)]], workload_ns=[3, 1]),
        plan(1, [[(3, 10, 1), (4, 10, 1)], [(5, 10, 1)]], workload_ns=[7, 7]),
    )
    s = run.summary
    # Forward latency: 2000 and 1200 ns, then 400 and 200.
    assert run.imbalance.tolist() == [2000 * 2 / 3200, 400 * 2 / 600]
    assert s.imbalance == pytest.approx((1.25 + 4 / 3) / 2)
    assert s.imbalance_max == pytest.approx(4 / 3)
    assert s.imbalance_p95 == pytest.approx(1.25 + 0.95 * (4 / 3 - 1.25))
    # The step of 3800 ns counts for more than the one of 600.
    assert s.imbalance_time_weighted == pytest.approx((2000 + 400) * 2 / (3200 + 600))
    # Attention: 1600 and 800 ns, then 200 and 100.
    assert s.imbalance_attention == pytest.approx(4 / 3)
    # Forward + backward, as the packer priced it: 3 and 1, then 7 and 7.
    assert s.imbalance_step == pytest.approx((1.5 + 1.0) / 2)
    # No packing of step 0 is faster than its document of 40; step 1 could be even.
    assert s.lower_bound == pytest.approx((1.25 + 1.0) / 2)


def test_delay_is_counted_in_iterations_and_by_token() -> None:
    run = measured(
        plan(0, [[(0, 10, 0)], []]),
        plan(1, [[], []]),
        plan(2, [[(1, 30, 0)], []]),
        plan(3, [[(2, 60, 2)], []]),
    )
    assert run.delay_tokens.tolist() == [10, 60, 30]
    assert run.summary.mean_delay == pytest.approx((10 * 0 + 60 * 1 + 30 * 2) / 100)
    assert (run.summary.p99_delay, run.summary.max_delay) == (2, 2)
    assert run.summary.mean_advance == 0


@pytest.mark.parametrize(("late_tokens", "p99"), [(10, 0), (11, 5)])
def test_p99_is_the_delay_that_99_percent_of_tokens_do_not_exceed(
    late_tokens: int, p99: int
) -> None:
    s = measured(plan(5, [[(0, 1000 - late_tokens, 5)], [(1, late_tokens, 0)]])).summary
    assert (s.p99_delay, s.max_delay) == (p99, 5)


def test_the_longest_delays_share_a_bin_and_the_maximum_is_exact() -> None:
    run = measured(plan(5000, [[(0, 10, 0)], [(1, 10, 5000)]]))
    assert run.summary.max_delay == 5000
    assert run.delay_tokens.size == DELAY_BINS
    assert (run.delay_tokens[0], run.delay_tokens[-1]) == (10, 10)


def test_what_is_trained_before_its_step_is_an_advance_and_no_negative_delay() -> None:
    s = measured(plan(0, [[(0, 30, 2)], [(1, 10, 0)]])).summary
    assert s.mean_advance == pytest.approx(30 * 2 / 40)
    assert (s.mean_delay, s.p99_delay, s.max_delay) == (0, 0, 0)


def test_a_window_of_two_batches_delays_one_half_and_advances_the_other() -> None:
    options = PackerOptions(num_micro_batches=1, context_window=100, cost=COST)
    packer = FixedPacker(options=options, window_batches=2, grouping=StepGrouping.IN_ORDER)
    run = measure(packer, [batch(0, [60, 40]), batch(1, [100])], cost=COST, label="W = 2")
    # The longest document first: step 0 trains batch 1, step 1 batch 0.
    assert run.delay_tokens.tolist() == [100, 100]
    assert (run.summary.mean_delay, run.summary.max_delay) == (0.5, 1)
    assert run.summary.mean_advance == 0.5
    assert (run.summary.label, run.summary.policy) == ("W = 2", "fixed")


def test_tokens_of_steps_and_micro_batches() -> None:
    run = measured(
        plan(0, [[(0, 70, 0)], [(1, 30, 0)]], held=10),
        plan(1, [[(2, 90, 1)], [(3, 90, 1), (4, 120, 1)]], held=30),
    )
    s = run.summary
    assert run.tokens.tolist() == [100, 300]
    assert s.tokens_per_step == 200
    assert s.tokens_cv == pytest.approx(100 / 200)
    assert (s.longest_step, s.longest_micro_batch) == (300, 210)
    assert s.held_tokens == 20
    assert (s.num_steps, s.num_tokens, s.num_documents) == (2, 400, 5)


def test_the_flush_counts_for_delay_and_not_for_balance() -> None:
    even = plan(0, [[(0, 10, 0)], [(1, 10, 0)]], held=40)
    without = measured(even).summary
    run = measured(even, flush=(plan(4, [[(2, 20, 0)], []]), plan(5, [[(3, 20, 0)], []])))
    s = run.summary
    assert (s.num_steps, s.flush_steps, s.flushed_tokens) == (1, 2, 40)
    assert (s.imbalance, s.imbalance_time_weighted, s.lower_bound) == (1, 1, 1)
    assert run.imbalance.size == run.tokens.size == 1
    assert (s.tokens_per_step, s.longest_step) == (20, 20)
    assert (without.mean_delay, without.max_delay) == (0, 0)
    assert s.mean_delay == pytest.approx((20 * 4 + 20 * 5) / 60)
    assert s.max_delay == 5
    assert (without.num_tokens, s.num_tokens) == (20, 60)


def test_cut_documents_are_those_in_more_than_one_piece() -> None:
    packer = OriginalPacker(
        options=PackerOptions(num_micro_batches=1, context_window=10, cost=COST)
    )
    # Windows: 6 + 4 | 1 + 5 + 4 | 10, then 10 + 2 in the flush.
    batches = [batch(0, [6, 5, 5, 26])]
    s = measure(packer, batches, cost=COST).summary
    assert (s.cut_documents, s.num_documents) == (2, 4)
    assert (s.num_steps, s.flush_steps, s.flushed_tokens) == (4, 1, 2)
    assert s.held_tokens == pytest.approx((32 + 22 + 12 + 2) / 4)


def test_documents_of_two_sources_may_have_the_same_number() -> None:
    one = plan(0, [[(7, 10, 0)], [(7, 10, 0)]])
    assert (measured(one).summary.num_documents, measured(one).summary.cut_documents) == (1, 1)
    columns = {**one.pieces.columns(), "source": np.array([0, 1])}
    two = PackingPlan(
        step=0,
        policy="scripted",
        pieces=Pieces(**columns),
        offsets=one.offsets,
        workload_ns=one.workload_ns,
    )
    assert (measured(two).summary.num_documents, measured(two).summary.cut_documents) == (2, 0)


def test_overdue_pieces_are_added_up_over_steps() -> None:
    rows = [[(0, 10, 0)], [(1, 10, 0)]]
    late = plan(4, rows, overdue=2)
    assert measured(plan(3, rows, overdue=1), flush=(late,)).summary.num_overdue == 3


def test_packing_time_is_that_of_a_batch_and_not_of_the_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = count()

    def clock() -> float:
        return float(next(ticks)) ** 2  # 0 to 1, then 4 to 9

    monkeypatch.setattr(time, "perf_counter", clock)
    one = [plan(i, [[(i, 10, i)], []]) for i in range(2)]
    assert measured(*one).summary.packing_ms == (1 + 5) / 2 * 1000


def test_batches_that_make_no_step_and_steps_without_work() -> None:
    last = plan(0, [[(0, 10, 0)], []])
    run = measure(Scripted(((), ()), (last,)), [batch(0), batch(1)], cost=COST)
    assert (run.summary.num_steps, run.summary.imbalance, run.summary.tokens_cv) == (0, 1, 0)
    idle = measured(plan(0, [[], []]), plan(1, [[(0, 10, 1)], []]))
    assert idle.imbalance.tolist() == [1, 2]
    assert idle.summary.imbalance_time_weighted == 2


def test_batches_may_come_from_a_generator() -> None:
    def stream() -> Iterator[GlobalBatch]:
        yield batch(0)

    packer = Scripted(((plan(0, [[(0, 10, 0)], []]),),))
    assert measure(packer, stream(), cost=COST).summary.num_tokens == 10


def test_no_document_is_refused() -> None:
    with pytest.raises(ValueError, match="no documents to pack; check the lengths"):
        measure(Scripted(()), [], cost=COST)


def test_a_summary_is_plain_json() -> None:
    summary = measured(plan(0, [[(0, 10, 0)], [(1, 20, 0)]])).summary
    data = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert list(data) == [f.name for f in fields(PackingSummary)]
    assert PackingSummary(**data) == summary
