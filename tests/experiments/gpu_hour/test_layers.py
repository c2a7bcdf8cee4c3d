"""Tests what stands for a rank's layer, and what measured times replace in a simulation."""

import numpy as np
import pytest
import torch

from experiments.gpu_hour.layers import RankLayer, SharedOps, layer_ns, predicted_ns, with_measured
from experiments.harness.constants import profile
from experiments.harness.evaluation import Case, batches_of, spec_of
from wlb.cost import workload_of
from wlb.cost.flops import rank_model
from wlb.model.llama import DecoderLayer
from wlb.sharding.paper import per_document
from wlb.simulate import ShardedStep, Simulator, StepPrices, planner_of, sharded_steps
from wlb.spec import ModelSpec, RunSpec

SMALL = (
    *("model.hidden_size=64", "model.num_heads=32", "model.num_kv_heads=32"),
    *("model.ffn_hidden_size=64", "data.context_window=512", "data.row_multiple=16"),
)


def planned() -> tuple[RunSpec, list[ShardedStep], Simulator, StepPrices]:
    case = Case(name="wlb", config="7b_128k", overrides=SMALL, steps=1)
    spec = spec_of(case)
    cost = workload_of(spec, profile())
    batches = batches_of(spec, family=case.family, steps=1, seed=1)
    steps = list(sharded_steps(planner_of(spec, cost, batches), dp=1))
    simulator = Simulator(spec=spec, cost=cost)
    return spec, steps, simulator, simulator.price(steps)


def test_predicted_layers_in_the_place_of_themselves_change_nothing() -> None:
    """The same pass times come out, up to rounding, if measured layers are as predicted."""
    _, _, simulator, prices = planned()
    again = with_measured(prices, predicted_ns(prices))
    before, after = (simulator.run(p).step_time_s for p in (prices, again))
    np.testing.assert_allclose(after, before, rtol=1e-6)
    slower = with_measured(prices, 2 * predicted_ns(prices))
    assert (simulator.run(slower).step_time_s > before).all()


def test_every_rank_with_tokens_is_timed() -> None:
    spec, steps, _, prices = planned()
    found = layer_ns(spec, steps, device=torch.device("cpu"), rounds=1)
    assert found.shape == predicted_ns(prices).shape
    tokens = [
        [plan.for_rank(rank).num_tokens for rank in range(spec.parallel.cp)]
        for step in steps
        for pipeline in step.pipelines
        for plan in pipeline.shardings
    ]
    assert np.array_equal(found.reshape(-1, 2).min(axis=1) > 0, np.ravel(tokens) > 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_attends_to_its_own_keys_and_those_of_others(rank: int) -> None:
    """A row's output depends on its own rows, and changes with what other ranks hold."""
    model = rank_model(
        ModelSpec(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=4, ffn_hidden_size=64), 2
    )
    assert (model.num_heads, model.head_size, model.ffn_hidden_size) == (2, 8, 32)
    torch.manual_seed(0)
    layer = DecoderLayer(model, SharedOps(2, fused=False))
    plan = per_document([40, 9, 5], cp=2)
    rows = 32
    first, second = (RankLayer(layer, model, plan, rank, rows) for _ in range(2))
    second.x_TC = first.x_TC
    out, other = first.forward(), second.forward()
    assert out.shape == (rows // 2, 32)
    # Other ranks' keys are drawn anew, and this rank's queries read some of them.
    assert not torch.equal(out, other)
    first.backward(out)
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
