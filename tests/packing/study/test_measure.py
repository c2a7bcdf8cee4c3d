"""Tests every number of a PackingSummary on cases small enough to work out by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from wlb.cost import FlopsWorkload
from wlb.packing import FixedPacker, OriginalPacker, PackerOptions, VarLenPacker, measure
from wlb.packing.base import PolicyPacker, Pushed
from wlb.packing.study.measure import PackingSummary
from wlb.plan import Carry, Documents, GlobalBatch, Layout, Pieces

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=10)


def batch(index: int, lengths: list[int]) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=100 * index)
    return GlobalBatch(index=index, documents=documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted(PolicyPacker):
    """Puts the i-th batch's documents where `rows[i]` says; row numbers count waiting pieces."""

    policy = "scripted"
    rows: tuple[tuple[tuple[int, ...], ...], ...]

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        step = carry.next_step
        waiting = Pieces.concat(carry.pieces, self.options.arrived(batch, step))
        if not len(waiting):
            return (), carry
        num = self.num_micro_batches
        everything = (tuple(range(len(waiting))), *[()] * (num - 1))
        rows = self.rows[step] if batch is not None else everything
        used = [row for members in rows for row in members]
        held = waiting.take(np.setdiff1d(np.arange(len(waiting)), used))
        plan = self._plan(
            step,
            waiting,
            [list(members) for members in rows],
            work_ns=self.options.workloads(waiting),
            num_held_tokens=held.num_tokens,
            max_delay=1,
        )
        return (plan,), self._carry(held, step + 1)


def scripted(*rows: tuple[tuple[int, ...], ...], n: int = 2) -> Scripted:
    options = PackerOptions(num_micro_batches=n, context_window=100, cost=COST)
    return Scripted(options=options, rows=rows)


def test_imbalance_in_its_three_times_and_its_three_means() -> None:
    # Step 0: 10 | 10: 200 ns each. Step 1: 20 | 10: 600 and 200 ns; attention 400 and 100.
    run = measure(scripted(((0,), (1,)), ((0,), (1,))), [batch(0, [10, 10]), batch(1, [20, 10])],
                  cost=COST)  # fmt: skip
    s = run.summary
    assert run.imbalance.tolist() == [1.0, 1.5]
    assert s.imbalance == pytest.approx(1.25)
    assert s.imbalance_max == 1.5
    assert s.imbalance_p95 == pytest.approx(np.percentile([1.0, 1.5], 95))
    assert s.imbalance_time_weighted == pytest.approx((200 + 600) / (200 + 400))
    assert s.imbalance_attention == pytest.approx((1.0 + 400 * 2 / 500) / 2)
    assert s.attention_p95 == pytest.approx(np.percentile([1.0, 1.6], 95))
    assert s.attention_time_weighted == pytest.approx((100 + 400) * 2 / (200 + 500))
    assert s.imbalance_step == s.imbalance  # this cost has one ratio of forward to backward
    assert s.step_time_weighted == s.imbalance_time_weighted
    assert s.imbalance_dear == pytest.approx((1.0 + (600 + 0.6 * 400) * 2 / (800 + 0.6 * 500)) / 2)
    assert s.lower_bound == pytest.approx(1.25)  # the 20 alone is 1.5 of the mean


def test_padding_and_joined_documents_are_priced_as_they_are_computed() -> None:
    # 20 and 10 in one micro-batch, 10 in the other.
    seen: dict[Layout, PackingSummary] = {}
    for layout in Layout:
        packer = scripted(((0, 1), (2,)))
        packer = replace(packer, options=replace(packer.options, layout=layout))
        seen[layout] = measure(packer, [batch(0, [20, 10, 10])], cost=COST).summary
    # Forward: 600 + 200 | 200 apart, 600 + 600 | 200 padded, 30 x 30 + 300 = 1200 | 200 joined.
    apart, padded, joined = (seen[layout] for layout in Layout)
    assert apart.imbalance == pytest.approx(800 * 2 / 1000)
    assert padded.imbalance == joined.imbalance == pytest.approx(1200 * 2 / 1400)
    assert apart.imbalance_attention == pytest.approx(500 * 2 / 600)
    assert padded.imbalance_attention == pytest.approx(800 * 2 / 900)
    assert joined.imbalance_attention == pytest.approx(900 * 2 / 1000)
    for s in seen.values():
        assert s.imbalance_step == pytest.approx(s.imbalance)  # what packing reckons with
        assert 1.0 <= s.lower_bound <= s.imbalance


def test_forward_and_both_passes_are_told_apart() -> None:
    class Backward(FlopsWorkload):
        """Prices backward as attention only."""

        def workload_ns(self, lengths):
            return super().workload_ns(lengths) + 2 * self.attention_ns(lengths)

        def forward_latency_ns(self, lengths):
            return super().workload_ns(lengths)

    cost = Backward(quadratic_ns=1, linear_ns_per_token=10)
    options = PackerOptions(num_micro_batches=2, context_window=100, cost=cost)
    packer = Scripted(options=options, rows=(((0,), (1,)),))
    s = measure(packer, [batch(0, [20, 10])], cost=cost).summary
    assert s.imbalance == pytest.approx(600 * 2 / 800)
    assert s.imbalance_step == pytest.approx(1400 * 2 / (1400 + 400))


def test_delay_counts_tokens_and_the_flush() -> None:
    # The 30 of batch 0 waits for step 2, the 5 of batch 1 for the flush (step 3).
    batches = [batch(0, [30, 10, 10]), batch(1, [5, 10]), batch(2, [10])]
    # Waiting at step 1: 30, 5, 10 -> rows 1, 2 are 5 and 10; at step 2: 30, 10.
    packer = scripted(((1,), (2,)), ((2,), ()), ((0,), (2,)))
    s = measure(packer, batches, cost=COST).summary
    assert (s.num_steps, s.flush_steps, s.flushed_tokens) == (3, 1, 5)
    total = 30 + 10 + 10 + 5 + 10 + 10
    assert s.num_tokens == total
    # delays: 30 x 2, 5 x 2 (batch 1, step 3), the others 0.
    assert s.mean_delay == pytest.approx((60 + 10) / total)
    assert (s.max_delay, s.p99_delay) == (2, 2)
    assert s.num_overdue == 2  # max_delay 1 in the scripted packer
    assert s.held_tokens == pytest.approx((30 + 35 + 5) / 3)
    assert s.tokens_per_step == pytest.approx((20 + 10 + 40) / 3)


def test_p99_is_by_tokens() -> None:
    packer = scripted(((1,), ()), ((0,), (1,)))
    s = measure(packer, [batch(0, [1, 99]), batch(1, [100])], cost=COST).summary
    assert (s.p99_delay, s.max_delay) == (0, 1)  # 1 token of 200 waits
    packer = scripted(((1,), ()), ((0,), (1,)))
    s = measure(packer, [batch(0, [10, 90]), batch(1, [100])], cost=COST).summary
    assert (s.p99_delay, s.max_delay) == (1, 1)  # 10 of 200 do


def test_windowed_policies_train_some_documents_early() -> None:
    options = PackerOptions(num_micro_batches=1, context_window=10, cost=COST)
    packer = FixedPacker(options=options, window_batches=2)
    run = measure(packer, [batch(0, [2, 8]), batch(1, [10])], cost=COST)
    s = run.summary
    # Step order is random: either the loader's order, or both batches change places.
    assert (s.mean_advance, s.mean_delay) in ((0.0, 0.0), (0.5, 0.5))
    assert s.num_steps == 2


def test_tokens_cuts_and_the_histogram() -> None:
    options = PackerOptions(num_micro_batches=1, context_window=10, cost=COST)
    run = measure(OriginalPacker(options=options), [batch(0, [6, 6]), batch(1, [8])], cost=COST)
    s = run.summary
    assert run.tokens.tolist() == [10, 10]
    assert (s.tokens_cv, s.longest_step, s.longest_micro_batch) == (0.0, 10, 10)
    assert s.cut_documents == 1
    assert s.num_documents == 3
    assert run.delay_tokens.tolist() == [18, 2]  # 2 tokens of the second 6 wait a step
    packer = VarLenPacker(options=options, s_max=20, queue_thresholds=())
    s = measure(packer, [batch(0, [6, 6]), batch(1, [8])], cost=COST).summary
    assert (s.cut_documents, s.longest_step) == (0, 12)
    assert s.tokens_cv == pytest.approx(2 / 10)


def test_weight_of_the_longest_documents_by_hand() -> None:
    # Steps of 30 and 10 labels (a document's last token has none): all alike, each would count
    # 1/40 of two steps; in a mean of the first it counts 1/30 of one.
    alone = scripted(((0,), ()), ((0,), ()))
    s = measure(alone, [batch(0, [31]), batch(1, [11])], cost=COST).summary
    assert s.long_weight == pytest.approx(20 / 30)
    # A document that waits for the flush is in no step of the stream, its length notwithstanding.
    held = scripted(((0,), ()), ((1,), ()))
    s = measure(held, [batch(0, [31, 90]), batch(1, [11])], cost=COST).summary
    assert (s.flushed_tokens, s.long_weight) == (90, pytest.approx(20 / 30))
    only_flush = VarLenPacker(
        options=PackerOptions(num_micro_batches=4, context_window=10, cost=COST),
        s_max=20,
        queue_thresholds=(1,),
    )
    s = measure(only_flush, [batch(0, [3])], cost=COST).summary
    assert (s.flush_steps, s.long_weight) == (1, 1.0)


@pytest.mark.parametrize("policy", [OriginalPacker, VarLenPacker])
def test_weight_of_the_longest_documents_counted_label_by_label(policy) -> None:
    rng = np.random.default_rng(5)
    options = PackerOptions(num_micro_batches=2, context_window=40, cost=COST)
    more = {"s_max": 60, "queue_thresholds": (30,)} if policy is VarLenPacker else {}
    packer = policy(options=options, **more)
    batches = [batch(i, list(rng.integers(1, 39, 4))) for i in range(30)]
    found = measure(packer, batches, cost=COST).summary

    plans, carry = [], packer.start()
    for each in batches:
        made, carry = packer.push(each, carry)
        plans += made
    lengths = {}
    for each in batches:
        ids = each.documents.id.tolist()
        lengths |= dict(zip(ids, each.documents.length.tolist(), strict=True))
    labels = {}
    share = {}
    for plan in plans:
        for piece in plan.pieces:
            labels[piece.document] = labels.get(piece.document, 0) + piece.num_targets
            told = share.setdefault(piece.document, 0.0)
            share[piece.document] = told + piece.num_targets / plan.num_targets
    total, chosen = sum(labels.values()), []
    for document in sorted(labels, key=lambda d: (-lengths[d], d)):
        if sum(labels[d] for d in chosen) < total / 10:
            chosen.append(document)
    weight = sum(share[d] for d in chosen) / len(plans) / (sum(labels[d] for d in chosen) / total)
    assert found.long_weight == pytest.approx(weight)
    assert abs(found.long_weight - 1) > 1e-3
    assert found.num_documents == len(lengths)


def test_nothing_to_train_is_refused() -> None:
    options = PackerOptions(num_micro_batches=1, context_window=10, cost=COST)
    with pytest.raises(ValueError, match="there are no documents to pack"):
        measure(OriginalPacker(options=options), [], cost=COST)


def test_a_stream_that_is_all_flush_has_no_imbalance() -> None:
    options = PackerOptions(num_micro_batches=4, context_window=10, cost=COST)
    s = measure(OriginalPacker(options=options), [batch(0, [3])], cost=COST).summary
    assert (s.num_steps, s.flush_steps, s.imbalance, s.lower_bound) == (0, 1, 1.0, 1.0)


def test_labels_and_json() -> None:
    s = measure(scripted(((0,), ())), [batch(0, [3])], cost=COST, label="mine").summary
    assert (s.label, s.policy) == ("mine", "scripted")
    assert s.to_json()["label"] == "mine"
    assert s.packing_ms > 0


def test_delays_beyond_the_histogram_count_in_full() -> None:
    num = 1100
    rows = tuple([((1,), ())] * (num - 1) + [((0,), (1,))])
    batches = [batch(0, [1, 1]), *[batch(i, [1]) for i in range(1, num)]]
    run = measure(scripted(*rows), batches, cost=COST)
    assert run.summary.max_delay == num - 1
    assert run.summary.mean_delay == pytest.approx((num - 1) / (num + 1))
    assert int(run.delay_tokens.sum()) == num + 1
    assert len(run.delay_tokens) == 1024
