"""Tests what moves to the weights' pass if a schedule computes weight gradients separately."""

import pytest

from wlb.cost import Collective, load_profile
from wlb.cost.workload import LinearCost
from wlb.simulate.pass_times import split_backward
from wlb.spec import ModelSpec, ParallelSpec, Recompute

MODEL = ModelSpec(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, ffn_hidden_size=1408)


def linear(*, tp: int = 2, recompute: Recompute = Recompute.NONE, tp_overlap: float = 0.0):
    return LinearCost(
        model=MODEL,
        parallel=ParallelSpec(tp=tp, cp=2, pp=2),
        profile=load_profile("h100"),
        micro_batch_tokens=8192,
        recompute=recompute,
        tp_overlap=tp_overlap,
    )


def test_half_of_backwards_products_move() -> None:
    cost = linear()
    split = split_backward(cost)
    assert split.product_ns_per_token == pytest.approx(cost.ns_per_token["gemm_backward"] / 2)
    assert split.saved_ns_per_token < cost.ns_per_token["gemm_backward"]


def test_gathers_by_hand() -> None:
    """A rank has 4 layers and rows of 512 bfloat16 values over cp 2.

    One of two parts is fetched: 256 bytes per gather. The weights' pass has four gathers per layer,
    the inputs' pass two fewer.
    """
    cost = linear()
    split = split_backward(cost)
    gather = cost.profile.collective(Collective.ALL_GATHER, span_ranks=2)
    wire = 4 * 256 / gather.bytes_per_s * 1e9
    assert split.weight_ns_per_token - split.product_ns_per_token == pytest.approx(4 * wire)
    assert split.saved_ns_per_token - split.product_ns_per_token == pytest.approx(2 * wire)
    assert split.weight_call_ns == 4 * 4 * gather.alpha_ns
    assert split.saved_call_ns == 2 * 4 * gather.alpha_ns


def test_gathers_hide_behind_products_in_both_passes() -> None:
    plain, half, all_ = (split_backward(linear(tp_overlap=share)) for share in (0.0, 0.5, 1.0))
    for name in ("weight_ns_per_token", "saved_ns_per_token"):
        product = plain.product_ns_per_token
        assert getattr(all_, name) == product
        assert getattr(half, name) - product == pytest.approx((getattr(plain, name) - product) / 2)


def test_one_rank_gathers_nothing() -> None:
    split = split_backward(linear(tp=1))
    assert split.weight_ns_per_token == split.saved_ns_per_token == split.product_ns_per_token
    assert (split.weight_call_ns, split.saved_call_ns) == (0, 0)


@pytest.mark.parametrize("how", list(Recompute))
def test_what_runs_again_stays_in_the_inputs_pass(how: Recompute) -> None:
    plain, again = split_backward(linear()), split_backward(linear(recompute=how))
    assert again == plain
