"""Tests prices of models with linear layers: attention, the rest by kind of layer, summaries."""

from dataclasses import replace

import numpy as np
import pytest

from wlb.cost import ProfiledWorkload, link_bandwidths, load_profile, summaries_ns
from wlb.plan import summaries_moved
from wlb.sharding.paper import per_document
from wlb.spec import LinearSpec, ModelSpec, ParallelSpec, Recompute

LINEAR = LinearSpec(num_key_heads=8, num_value_heads=16, key_head_dim=64, value_head_dim=96)
HYBRID = ModelSpec(
    hidden_size=2048,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    ffn_hidden_size=5504,
    full_every=4,
    linear=LINEAR,
)


def priced(
    model: ModelSpec, recompute: Recompute = Recompute.NONE, cp: int = 4
) -> ProfiledWorkload:
    return ProfiledWorkload(
        model=model,
        parallel=ParallelSpec(tp=2, cp=cp, pp=1),
        profile=load_profile("h100"),
        micro_batch_tokens=16384,
        recompute=recompute,
    )


@pytest.mark.parametrize("recompute", Recompute)
def test_attention_is_that_of_the_layers_that_have_it(recompute: Recompute) -> None:
    dense = replace(HYBRID, num_layers=2, full_every=0, linear=LinearSpec())
    lengths = np.array([100, 5000, 16384])
    found, expected = priced(HYBRID, recompute), priced(dense, recompute)
    assert np.abs(found.attention_ns(lengths) - expected.attention_ns(lengths)).max() <= 2
    assert (found.linear_ns(lengths) > 3 * expected.linear_ns(lengths)).all()


def test_linear_work_is_the_mean_of_both_kinds() -> None:
    kinds = {kind.is_linear: kind for kind in HYBRID.layer_kinds}
    assert {is_linear: kind.layers for is_linear, kind in kinds.items()} == {True: 6, False: 2}
    alone = {
        is_linear: priced(replace(kind.model, num_layers=8)) for is_linear, kind in kinds.items()
    }
    for term in ("gemm_forward", "gemm_backward", "elementwise_forward", "elementwise_backward"):
        own, linear, full = (
            cost.linear.ns_per_token[term] for cost in (priced(HYBRID), alone[True], alone[False])
        )
        assert own == pytest.approx((6 * linear + 2 * full) / 8)
        assert linear > full


def test_a_summary_is_moved_by_each_linear_layer() -> None:
    cost = priced(HYBRID)
    # A TP rank has half of the heads: transitions of 64 x 64, and states of 64 x 96, in float32.
    size = 4 * 8 * 64 * (64 + 96)
    assert cost.summary_ns == pytest.approx(6 * size / link_bandwidths(cost.profile).inside * 1e9)
    dense = replace(HYBRID, full_every=0, linear=LinearSpec())
    assert priced(dense).summary_ns == priced(HYBRID, cp=1).summary_ns == 0.0


def test_a_plan_waits_for_the_summaries_of_its_busiest_rank() -> None:
    cost = priced(HYBRID)
    plan = per_document([9000, 4000, 500], cp=4)
    moved = summaries_moved(plan)
    most = int(max(moved.sum(0).max(), moved.sum(1).max()))
    assert most > 3
    assert summaries_ns(plan, cost) == round(most * cost.summary_ns)
    assert summaries_ns(plan, priced(replace(HYBRID, full_every=0, linear=LinearSpec()))) == 0
