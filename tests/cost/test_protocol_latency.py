"""Tests attention_latency: literal sums over ranks, launches, collectives and recompute."""

from dataclasses import replace

import numpy as np
import pytest

from tests.models import LLAMA2_7B
from wlb.cost import (
    Collective,
    FlopsWorkload,
    ProfiledWorkload,
    attention_latency,
    exchange_ns,
    kernels_ns,
    load_profile,
)
from wlb.plan import KeyExchange, ShardingPlan, UserError
from wlb.sharding.paper import per_document, per_sequence
from wlb.spec import ParallelSpec, Recompute

MODEL = replace(LLAMA2_7B, num_kv_heads=8)


def workload(cp: int, **options) -> ProfiledWorkload:
    return ProfiledWorkload(
        model=MODEL,
        parallel=ParallelSpec(tp=8, cp=cp, pp=4),
        profile=load_profile("h100"),
        micro_batch_tokens=4096,
        **options,
    )


def test_segments_of_each_rank_add_up_literally():
    """Rank 0 holds [0, 2) and [6, 8), rank 1 [2, 6): q * (2 * kv - q) = 4 + 28 and 32 units."""
    plan = per_document([8], cp=2)
    latency = attention_latency(plan, FlopsWorkload(quadratic_ns=7))
    assert latency.forward_ns.tolist() == [2 * (4 + 28), 2 * 32]
    assert latency.backward_ns.tolist() == [5 * (4 + 28), 5 * 32]
    assert latency.latency_ns.tolist() == [7 * 32] * 2
    assert latency.slowest_ns == latency.slowest_kernels_ns == 7 * 32
    assert latency.imbalance == 1.0


class Uneven(FlopsWorkload):
    """Prices forward by rows and backward by keys, so that another rank is slowest in each pass."""

    def segment_times_ns(self, q, kv):
        return np.asarray(q) * 1000, np.asarray(kv)


def test_every_pass_waits_for_its_own_slowest_rank():
    plan = per_sequence([3, 4], cp=2)  # rank 0: [0, 2) and the last token of piece 1
    latency = attention_latency(plan, Uneven())
    spans = [plan.for_rank(r).spans for r in range(2)]
    forward = [1000 * sum(s.stop - s.start for s in mine) for mine in spans]
    backward = [sum(s.stop for s in mine) for mine in spans]
    assert latency.forward_ns.tolist() == forward
    assert latency.backward_ns.tolist() == backward
    assert latency.slowest_ns == max(forward) + max(backward)
    mean = (sum(forward) + sum(backward)) / 2
    assert latency.imbalance == pytest.approx((max(forward) + max(backward)) / mean)


def test_launches_are_paid_once_a_call_and_layer():
    cost = workload(2)
    plan = per_document([4096], cp=2)
    forward, backward = cost.segment_times_ns(plan.stop - plan.start, plan.stop)
    latency = attention_latency(plan, cost)
    layers = 8
    assert latency.forward_ns.tolist() == [
        int(forward[:2].sum()) + layers * cost.table.launch_forward_ns,
        int(forward[2:].sum()) + layers * cost.table.launch_forward_ns,
    ]
    assert latency.backward_ns[1] == int(backward[2]) + layers * cost.table.launch_backward_ns


def test_keys_are_gathered_forward_and_again_in_backward():
    """4,096 tokens of K and V, one KV head of 128 per tp rank, 2 bytes: 2 MiB per layer, 8
    layers.
    """
    found = attention_latency(per_document([4096], cp=4), workload(4))
    profile = load_profile("h100")
    gather, scatter = (
        8 * profile.collective(op, span_ranks=32, num_ranks=4).time_ns(size, num_ranks=4)
        for op, size in (
            (Collective.ALL_GATHER, 2 * 2**20),
            (Collective.REDUCE_SCATTER, 4 * 2**20),  # gradients travel in float32
        )
    )
    assert found.gather_forward_ns == round(gather)
    assert found.exchange_backward_ns == round(gather + scatter)
    assert found.slowest_ns - found.slowest_kernels_ns == round(gather) + round(gather + scatter)


def by_need(plan: ShardingPlan) -> ShardingPlan:
    return replace(plan, exchange=KeyExchange.NEEDED)


def test_an_exchange_by_need_is_priced_by_its_busiest_rank():
    """Rank 0's tail chunk of 512 reads 3 x 1,024 rows of others; a KV head of 128 takes 512 bytes a
    row of K and V.

    TP 8 fills a node, so all rows come over the rank's own link between nodes.
    """
    found = attention_latency(by_need(per_document([4096], cp=4)), workload(4))
    profile = load_profile("h100")
    link = profile.collective(Collective.P2P, span_ranks=16).bytes_per_s
    alpha = profile.collective(Collective.ALL_GATHER, span_ranks=32).alpha_ns
    there, back = (8 * (alpha + 3 * 1024 * size / link * 1e9) for size in (512, 1024))
    assert found.gather_forward_ns == round(there)
    assert found.exchange_backward_ns == round(there + back)


def test_rows_of_the_same_node_come_faster():
    """CP 8 without TP is a node; of CP 16 half of the ranks are in the other node."""
    profile = load_profile("h100")
    inside = profile.collective(Collective.ALL_GATHER, span_ranks=8).bytes_per_s
    link = profile.collective(Collective.P2P, span_ranks=16).bytes_per_s
    for cp, near, far in ((8, 7, 0), (16, 7, 8)):
        cost = replace(workload(1), parallel=ParallelSpec(tp=1, cp=cp, pp=4))
        moved = 1000 * (np.ones((cp, cp), np.int64) - np.eye(cp, dtype=np.int64))
        row = 2 * MODEL.kv_dim * 2
        alpha = profile.collective(Collective.ALL_GATHER, span_ranks=cp).alpha_ns
        wire = 1000 * row * (near / inside + far / link) * 1e9
        assert cost.needed_exchange_ns(moved)[0] == round(8 * (alpha + wire))
        # The busiest link decides, whichever way its rows go.
        moved[3] *= 2
        more, other = cost.needed_exchange_ns(moved)[0], cost.needed_exchange_ns(moved.T)[0]
        assert more == other == round(8 * (alpha + 2 * wire))


def test_a_workload_without_a_price_for_it_says_so():
    class Plain:
        def kv_exchange_ns(self, num_tokens, *, cp):
            return 5, 7

    plan = per_document([8], cp=2)
    assert exchange_ns(plan, Plain()) == (5, 7)
    with pytest.raises(UserError, match="Plain has no method needed_exchange_ns"):
        exchange_ns(by_need(plan), Plain())


def test_one_rank_exchanges_nothing():
    latency = attention_latency(per_document([4096], cp=1), workload(1))
    assert (latency.gather_forward_ns, latency.exchange_backward_ns) == (0, 0)


def test_full_recompute_runs_attention_again_and_selective_does_not():
    plan = per_document([4096, 77], cp=4)
    plain, half, again = (attention_latency(plan, workload(4, recompute=r)) for r in Recompute)
    assert np.array_equal(half.backward_ns, plain.backward_ns)
    assert half.exchange_backward_ns == plain.exchange_backward_ns
    assert np.array_equal(again.forward_ns, plain.forward_ns)
    assert np.abs(again.backward_ns - plain.forward_ns - plain.backward_ns).max() <= 16  # rounding
    # Attention that runs again gathers K and V for backward as well.
    assert again.exchange_backward_ns == plain.exchange_backward_ns


def test_linear_work_counts_the_second_gather():
    """W_l's CP term is the same exchange, by its bandwidth part: a gather of K and V in bfloat16,
    and the way back of their gradients in float32.
    """
    cost, tokens = workload(4), 100_000
    size = tokens * 2 * 128 * 2
    gather, scatter = (
        8 * cost.profile.collective(op, span_ranks=32, num_ranks=4).wire_ns(sent, num_ranks=4)
        for op, sent in ((Collective.ALL_GATHER, size), (Collective.REDUCE_SCATTER, 2 * size))
    )
    found = int(cost.terms([tokens])["cp_comm_backward"][0])
    assert found == pytest.approx(gather + scatter, rel=1e-6)


@pytest.mark.parametrize("profile", ["h100", "cpu"])
def test_plans_priced_together_are_bit_equal_to_one_by_one(profile):
    rng = np.random.default_rng(5)
    cost = replace(workload(4), profile=load_profile(profile))
    lengths = [rng.integers(1, 3000, rng.integers(0, 20)).tolist() for _ in range(30)]
    plans = [method(d, cp=4) for d in lengths for method in (per_document, per_sequence)]
    forward, backward = kernels_ns(plans, cost, cp=4)
    for i, plan in enumerate(plans):
        alone = attention_latency(plan, cost)
        assert np.array_equal(forward[i], alone.forward_ns)
        assert np.array_equal(backward[i], alone.backward_ns)
    assert [x.shape for x in kernels_ns([], cost, cp=4)] == [(0, 4), (0, 4)]
