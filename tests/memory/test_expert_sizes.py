"""Tests sizes of experts with literal numbers."""

from dataclasses import replace

import numpy as np
import pytest

from tests.models import EXPERTS as MODEL
from tests.models import MIXED_EXPERTS as MIXED
from wlb.memory.budget import num_communicators
from wlb.memory.estimate import (
    layer_activation_bytes,
    layer_parameters,
    memory_estimate,
    stage_gradient_bytes,
    stage_parameters,
)
from wlb.memory.expert_sizes import (
    experts_of_layer,
    hidden_values,
    mlp_values,
    order_bytes,
    stored_parameters,
)
from wlb.simulate.peak_memory import stage_bytes
from wlb.spec import ExpertsSpec, FsdpSection, ParallelSpec, Recompute, RunSpec, load


def tiny(recompute: Recompute = Recompute.NONE, **degrees: int) -> RunSpec:
    spec = RunSpec()
    return replace(
        spec,
        model=MODEL,
        parallel=ParallelSpec(**degrees),
        training=replace(spec.training, recompute=recompute),
    )


def test_parameters_of_a_rank() -> None:
    spec = tiny(tp=2, cp=2, dp=2, ep=4)
    assert experts_of_layer(spec) == 2 * 3 * 16 * 24  # 2 of 8 experts
    attention, shared, norms, router = 768, 3 * 16 * 24, 32, 128
    assert layer_parameters(spec) == (attention + shared) // 2 + norms + router + 2304
    # 8 ranks are two groups of 4: a rank stores half of its experts, a quarter of the rest.
    assert stored_parameters(spec, 2 * 2304 + 400, 2) == 2304 + 100
    dense = replace(spec, model=replace(MODEL, experts=ExpertsSpec()))
    assert stored_parameters(dense, 400, 2) == 100
    # Two copies of one group: a rank stores all of its experts, half of the rest.
    copies = replace(spec, fsdp=FsdpSection(shard_size=2))
    assert stored_parameters(copies, 2 * 2304 + 400, 2) == 2 * 2304 + 200


def test_what_a_layer_keeps() -> None:
    # Rows of two experts, their gate and up; gate, up and product of the shared one.
    assert mlp_values(MODEL) == 2 * (16 + 48) + 72
    assert mlp_values(replace(MODEL, experts=ExpertsSpec(), ffn_hidden_size=5)) == 15
    full = layer_activation_bytes(tiny(Recompute.FULL, dp=1), micro_batch_tokens=10)
    # The layer's input, three places of each copy, and the number of its expert in 16 bits.
    assert full == 10 * (16 * 4 + 2 * (3 * 8 + 2))
    # The z-loss keeps a router's logits and their logsumexp, unless backward computes them again.
    z_loss = replace(MODEL, experts=replace(MODEL.experts, z_loss=0.1))
    for how, more in ((Recompute.NONE, 10 * 4 * (8 + 1)), (Recompute.SELECTIVE, 0)):
        plain = tiny(how, dp=1)
        kept = [
            layer_activation_bytes(spec, micro_batch_tokens=10)
            for spec in (plain, replace(plain, model=z_loss))
        ]
        assert kept[1] - kept[0] == more


def test_stages_have_the_sizes_of_their_layers() -> None:
    spec = replace(tiny(tp=2, cp=2, pp=2, dp=2, ep=4), model=MIXED)
    assert (spec.stage_layers, spec.stage_expert_layers) == ((2, 2), (1, 2))
    routed = layer_parameters(spec)
    dense = layer_parameters(replace(spec, model=MIXED.layer_kinds[1].model))
    assert dense == (768 + 3 * 16 * 40) // 2 + 32
    ends = 256 * 16 // 2
    assert stage_parameters(spec, stage=0) == dense + routed + ends
    assert stage_parameters(spec, stage=1) == 2 * routed + ends + 16
    # A stage's first backward leaves gradients and FSDP's shard: a quarter of what is not experts.
    held = stage_parameters(spec, stage=0)
    shard = (held - 2304 + 3) // 4 + 1152
    assert stage_gradient_bytes(spec, stage=0) == 4 * (held + shard)
    kept, other = (
        layer_activation_bytes(s, micro_batch_tokens=64)
        for s in (spec, replace(spec, model=MIXED.layer_kinds[1].model))
    )
    found = stage_bytes(spec, np.array([64, 0]))
    assert [stage.kept.tolist() for stage in found] == [[kept + other, 0], [2 * kept, 0]]
    assert kept != other


def test_ranks_that_share_experts_have_communicators() -> None:
    spec = tiny(tp=2, cp=2, dp=2, ep=4)
    dense = replace(spec, model=replace(MODEL, experts=ExpertsSpec()))
    assert num_communicators(spec) == num_communicators(dense) + 2
    copies, dense = (replace(s, fsdp=FsdpSection(shard_size=2)) for s in (spec, dense))
    assert num_communicators(copies) == num_communicators(dense) + 2  # one of experts' copies


def test_sizes_are_those_of_the_rank_with_most_rows() -> None:
    """With 1.5 times the mean rank's rows."""
    keys = ["training.recompute=none", "model.experts.shared=8"]
    even, loaded = (
        load("qwen3_30b_a3b_128k", [*keys, f"cost.expert_load={r}"]) for r in (1.0, 1.5)
    )
    assert mlp_values(MODEL, load=1.5) == 3 * (16 + 48) + 72
    kept = [layer_activation_bytes(spec, micro_batch_tokens=1024) for spec in (even, loaded)]
    assert kept[0] < kept[1] < 1.5 * kept[0]
    # Of three places of each of two copies, two are at the rank of the expert.
    orders = [order_bytes(MODEL, is_recomputed=False, load=load) for load in (1.0, 1.5)]
    assert orders == [2 * 3 * 8, 2 * 4 * 8]
    assert [hidden_values(MODEL, load=load) for load in (1.0, 1.5)] == [2 * 24 + 24, 3 * 24 + 24]


def test_the_preset_fits_and_has_its_published_parameters() -> None:
    spec = load("qwen3_30b_a3b_128k")
    assert spec.model.num_parameters == 30_532_646_912  # published, and 128 rows of padding twice
    assert spec.model.num_active_parameters == pytest.approx(3.35e9, rel=0.01)
    assert memory_estimate(spec).total_bytes < 70 * 2**30
