"""Tests prices of experts with literal numbers."""

from dataclasses import replace

import numpy as np
import pytest

from tests.models import EXPERTS as MODEL
from tests.models import MIXED_EXPERTS as MIXED
from wlb.cost.expert_rows import RoutedWork, smaller_products_ns
from wlb.cost.flops import (
    head_flops,
    layer_linear_flops,
    layer_matrices,
    linear_flops_per_token,
    rank_model,
)
from wlb.cost.profile_file import load_profile
from wlb.cost.workload import ProfiledWorkload, workload_for
from wlb.spec import ParallelSpec, Recompute, load


def test_a_token_is_computed_by_its_experts() -> None:
    # Two chosen and one shared expert, 24 wide each, and the router's 16 x 8.
    assert layer_matrices(MODEL)[4:] == ((16, 72), (16, 72), (72, 16))
    attention = 16 * 16 * 2 + 2 * 16 * 8
    assert layer_linear_flops(MODEL) == 2 * (attention + 3 * 16 * 72 + 16 * 8)
    # A TP rank has half of the rows of all experts: as much as half of one MLP.
    assert rank_model(MODEL, 2).ffn_hidden_size == 36
    assert not rank_model(MODEL, 2).experts.num


def test_work_is_that_of_each_kind_of_layer() -> None:
    parallel = ParallelSpec(tp=2, cp=2, dp=2, ep=4)
    every_layer = replace(MIXED, experts=replace(MIXED.experts, dense_layers=()))
    profile = load_profile("h100")
    mixed, dense, routed = (
        ProfiledWorkload(model=model, parallel=parallel, profile=profile)
        for model in (MIXED, MIXED.layer_kinds[1].model, every_layer)
    )
    for name, ns in mixed.ns_per_token.items():
        want = dense.ns_per_token[name] / 4 + routed.ns_per_token[name] * 3 / 4
        assert ns == pytest.approx(want), name
    assert dense.ns_per_token["ep_comm_forward"] == 0 < mixed.ns_per_token["ep_comm_forward"]
    assert dense.ns_per_token["gemm_forward"] != routed.ns_per_token["gemm_forward"]
    shared = [sum(cost.linear.routed_ns_per_token) for cost in (mixed, routed)]
    assert shared[0] == pytest.approx(shared[1] * 3 / 4)
    both = 3 * layer_linear_flops(every_layer) + layer_linear_flops(MIXED.layer_kinds[1].model)
    assert linear_flops_per_token(MIXED) == 3 * (both + head_flops(MIXED))


WORK = RoutedWork(wire=8, forward=12, gradients=12, weights=6)
AGAIN = replace(WORK, recomputed=8, is_recomputed=True)


@pytest.mark.parametrize(
    ("work", "forward", "backward"),
    [
        # Alone there and back, 8 + 8; the way back of gradients hides behind those of weights.
        (WORK, (16, 8, 4), (8 + 2, 4, 2)),
        # Rows that are computed again hide gradients' way there.
        (AGAIN, (16, 8, 4), (8 + 2, 4, 2)),
        # Full recompute: gradients travel during attention, rows after it.
        (replace(AGAIN, before=20), (16, 8, 4), (8 + 2, 4, 2)),
        (replace(WORK, defers_weights=True), (16, 8, 4), (16, 8, 4)),
        # Shared experts hide the first stage in forward and the last one in backward.
        (replace(WORK, shared_forward=3, shared_backward=1), (13, 5, 2), (8 + 1, 4, 2)),
    ],
)
def test_what_ranks_wait_for(
    work: RoutedWork, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    found = [work.waits(stages) for stages in (1, 2, 4)]
    assert [wait[0] for wait in found] == pytest.approx(forward)
    assert [wait[1] for wait in found] == pytest.approx(backward)
    # Eight all-to-alls of 2 + 1 take longer than four stages of 12 / 4.
    assert WORK.waits(4, alpha=1.0)[0] == pytest.approx(3 + 4 * 3 - 12 + 9)


@pytest.mark.parametrize("how", list(Recompute))
def test_expert_parallelism_costs_its_all_to_alls(how: Recompute) -> None:
    def priced(*keys: str) -> ProfiledWorkload:
        more = [f"training.recompute={how}", "model.vocab_size=151936", *keys]
        return workload_for(load("qwen3_30b_a3b_128k", more), "cuda")

    alone, one, two = priced("parallel.ep=1", "ep.stages=1"), priced("ep.stages=1"), priced()
    assert two.ns_per_token.keys() - alone.ns_per_token.keys() == {
        "ep_comm_forward",
        "ep_comm_backward",
    }
    for name, ns in alone.ns_per_token.items():
        # Rows that travel are put into another order at both ends.
        assert (two.ns_per_token[name] > ns) == name.startswith("elementwise")
    for end in ("forward", "backward"):
        waits = [w.ns_per_token[f"ep_comm_{end}"] for w in (one, two)]
        assert waits[1] < 0.6 * waits[0]
    # Stages take launches, smaller products and latency.
    assert alone.linear.call_ns < one.linear.call_ns < two.linear.call_ns


def test_the_preset_has_the_fastest_number_of_stages() -> None:
    taken = load("qwen3_30b_a3b_128k").ep.stages
    times = {
        stages: sum(
            sum(w.ns_per_token.values()) * w.micro_batch_tokens + sum(w.linear.call_ns)
            for w in [workload_for(load("qwen3_30b_a3b_128k", [f"ep.stages={stages}"]), "cuda")]
        )
        for stages in (1, 2, 4, 8)
    }
    assert min(times, key=times.__getitem__) == taken


def test_work_is_that_of_the_rank_with_most_rows() -> None:
    """With 1.5 times the mean rank's rows: products of experts, exchanges and kept rows."""
    # In profile h100 products of all sizes have one throughput.
    keys = ["training.recompute=none", "model.vocab_size=151936", "cost.profile=h100"]
    keys.append("model.experts.shared=8")
    even, loaded = (
        load("qwen3_30b_a3b_128k", [*keys, f"cost.expert_load={r}"]) for r in (1.0, 1.5)
    )
    of_even, of_loaded = (workload_for(spec, "cuda") for spec in (even, loaded))
    forward, backward, _ = of_even.linear.routed_ns_per_token
    for name, routed_ns in (("gemm_forward", forward), ("gemm_backward", backward)):
        more = of_loaded.ns_per_token[name] - of_even.ns_per_token[name]
        assert more == pytest.approx(0.5 * routed_ns)
        # 37.7M of the 94.4M parameters that compute a token in a layer.
        assert more == pytest.approx(0.5 * of_even.ns_per_token[name] * 37.7 / 94.4, rel=0.01)
    # Without shared experts, all that an exchange hides behind grows with it.
    alone = [
        replace(w, model=replace(w.model, experts=replace(w.model.experts, shared=0)))
        for w in (of_loaded, of_even)
    ]
    for end in ("forward", "backward"):
        both = (w.ns_per_token[f"ep_comm_{end}"] for w in alone)
        assert next(both) == pytest.approx(1.5 * next(both))
    pooled = [w.pooled_ns(np.array([1000])) for w in (of_even, of_loaded)]
    assert pooled[1] == pytest.approx(1.5 * pooled[0], abs=2)
    whole = [w.linear.weight_products_ns_per_token for w in (of_even, of_loaded)]
    assert whole[1] - whole[0] == pytest.approx(0.5 * backward / 2)


def test_a_cpu_pays_nothing_for_smaller_products() -> None:
    """Its products are not computed in waves of tiles, which cost a GPU half a wave a stage."""
    for name, costs in (("cpu", False), ("h100", True)):
        found = smaller_products_ns(
            MODEL, 2, profile=load_profile(name), tflops=100.0, is_recomputed=False
        )
        assert [ns > 0 for ns in found] == [costs, costs]
