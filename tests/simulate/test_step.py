"""Tests a simulated step: times, bubbles, work of each rank, metrics."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.simulate.runs import made, spec_of
from wlb.cost import StageLayers, stage_times, without_collectives
from wlb.plan import IntArray
from wlb.simulate import NodeKind, PassKind, Simulation, Simulator, StepPrices
from wlb.simulate.pass_times import TermPrices
from wlb.spec import Schedule

ALIGNED = [4096] * 4
MIXED = [4096, 3000, 1096, 2048, 2048, 1000, 3000, 96]


def prices_of(forward: IntArray, backward: IntArray) -> StepPrices:
    """Prices attention of these times, [steps, dp, n, cp], and nothing else that takes any."""
    free = TermPrices(per_token={}, per_call={})
    return StepPrices(
        tokens=np.ones(forward.shape[:3], np.int64),
        attention_forward_ns=forward,
        attention_backward_ns=backward,
        exchange_forward_ns=np.zeros(forward.shape[:3], np.int64),
        exchange_backward_ns=np.zeros(forward.shape[:3], np.int64),
        linear=({PassKind.FORWARD: free, PassKind.BACKWARD: free},),
        ends={},
        message=dict.fromkeys(("intra_node", "inter_node"), free),
        kind_layers=((1, 1),),
    )


def free_shards(simulator: Simulator) -> Simulator:
    """Makes collectives over pipelines and the optimiser take no time."""
    shards = simulator.shards
    none = replace(
        shards,
        gather_ns=(0,) * len(shards.gather_ns),
        reduce_ns=(0,) * len(shards.reduce_ns),
        norm_ns=0,
        optimizer_ns=(0,) * len(shards.optimizer_ns),
    )
    object.__setattr__(simulator, "shards", none)
    return simulator


def literal(dp: int = 1) -> Simulation:
    """Returns a step of two ranks, two micro-batches, 1F1B: forward 100 ns, backward 200.

    The second pipeline takes a tenth; the other CP rank needs half of it.
    """
    simulator, _ = made(spec_of(dp=dp, schedule=Schedule.ONE_F_ONE_B), ALIGNED)
    forward = np.array([100, 10])[:dp, None, None] * np.array([2, 1]) // 2
    forward = np.broadcast_to(forward, (1, dp, 2, 2)).astype(np.int64)
    return free_shards(simulator).run(prices_of(forward, 2 * forward))


def test_a_step_by_hand() -> None:
    """The step is 0F0 0F1 . . 0B0 . 0B1 of 900 ns: each rank works 600 of them."""
    step = literal()
    assert step.step_time_s.tolist() == pytest.approx([900e-9])
    assert step.busy_s[0].tolist() == [pytest.approx([600e-9, 600e-9])]
    assert step.bubble[0].tolist() == [pytest.approx([1 / 3, 1 / 3])]
    # Kernels: 2 * (100 + 200) on the slower CP rank, half on the other.
    assert step.attention_s[0, 0].tolist() == [pytest.approx([600e-9, 300e-9])] * 2
    assert step.compute_s[0, 0].tolist() == [pytest.approx([600e-9, 300e-9])] * 2


def test_pipelines_meet_where_parameters_are_gathered_and_at_the_norm() -> None:
    """The fast pipeline's rank 1 gathers its first layer once its input is there, with the slow
    pipeline's: at 100 ns. Then 1F0 10, 1B0 20, 1F1 10, 1B1 20, 0B1 20.
    """
    step = literal(dp=2)
    assert step.step_time_s.tolist() == pytest.approx([900e-9])
    assert step.bubble[0, 1].tolist() == pytest.approx([1 - 60 / 900] * 2)
    passes = step.ends_ns[step.simulator.graph.indices(NodeKind.PASS), 0]
    assert passes.max(axis=0).tolist() == [900, 180]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("pp", "dp", "cp", "tp"), [(2, 2, 2, 2), (4, 1, 1, 1), (1, 2, 4, 1)])
def test_a_step_is_longer_than_what_any_rank_does(schedule, pp, dp, cp, tp) -> None:
    spec = spec_of(schedule=schedule, pp=pp, dp=dp, cp=cp, tp=tp, n=4)
    simulator, steps = made(spec, MIXED * 2)
    found = simulator.run(simulator.price(steps))
    assert found.num_steps == len(steps)
    longest = found.step_time_s[:, None, None]
    assert (found.busy_s < longest).all()
    assert ((found.bubble > 0) & (found.bubble < 1)).all()
    # A CP group's slowest rank does no more than the pass takes.
    assert (found.compute_s.max(axis=3) <= found.busy_s * (1 + 1e-9)).all()
    assert (found.attention_s <= found.compute_s).all()
    even = simulator.run(simulator.price(steps).balanced())
    assert even.step_time_s.sum() < found.step_time_s.sum()


def test_overhead_is_a_share_of_what_ranks_do_on_average() -> None:
    plain = spec_of(dp=2)
    more = replace(plain, cluster=replace(plain.cluster, overhead=0.1))
    before, after = (
        sim.run(sim.price(steps)) for sim, steps in (made(s, MIXED) for s in (plain, more))
    )
    longer = after.step_time_s - before.step_time_s
    assert longer.tolist() == pytest.approx((0.1 * before.busy_s.mean(axis=(1, 2))).tolist())


@pytest.mark.parametrize("v", [1, 2])
def test_compute_is_all_kernels_without_collectives(v: int) -> None:
    """Layers are as on a machine whose collectives are free, less what a call costs; then the
    ends.
    """
    spec = spec_of(v=v, dp=1)
    simulator, (step,) = made(spec, [4096] * 2)
    cost, prices = simulator.cost, simulator.price([step])
    found = simulator.run(prices).compute_s[0, 0]
    free = without_collectives(cost)
    times = stage_times(
        step.pipelines[0], free, StageLayers(counts=(spec.model.num_layers // spec.num_stages,))
    )
    linear = float((times.linear_forward_ns + times.linear_backward_ns).sum())
    linear -= 2 * sum(free.linear.call_ns) / v
    attention = times.attention_forward_ns + times.attention_backward_ns
    layers = v * (attention.sum(axis=0) + linear)
    embedding = 8192 * sum(cost.linear.embedding_ns_per_token)
    head = 8192 * cost.linear.head_ns_per_token + 2 * cost.linear.head_backward_ns
    assert (found[0] * 1e9).tolist() == pytest.approx((layers + embedding).tolist(), rel=1e-5)
    assert (found[1] * 1e9).tolist() == pytest.approx((layers + head).tolist(), rel=1e-5)


def test_an_empty_micro_batch_takes_little_and_one_document_a_step_works() -> None:
    simulator, steps = made(spec_of(), [4096])
    found = simulator.run(simulator.price(steps))
    assert len(steps) == 1
    passes = found.prices.pass_ns(PassKind.FORWARD, stage=1)
    full = passes.max()
    assert (np.sort(passes.ravel())[:3] < full).all()
    assert found.metrics(steps)[0].num_tokens == 4096


def test_metrics_are_the_planners_with_simulated_times() -> None:
    simulator, steps = made(spec_of(), MIXED)
    found = simulator.run(simulator.price(steps))
    metrics = found.metrics(steps)
    assert [m.step_time_s for m in metrics] == found.step_time_s.tolist()
    for m, step in zip(metrics, steps, strict=True):
        assert m.origin == "predicted"
        assert m.num_tokens == step.plan.packing.num_tokens
        assert m.sharding_counts == (("per_document", 4),)
        assert m.cp_imbalance >= 1


def test_cp_imbalance_by_hand() -> None:
    """The slowest rank takes 600 of each micro-batch, the mean is 450."""
    step = literal()
    assert step._cp_imbalance(0) == pytest.approx(600 / 450)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_times_do_not_depend_on_what_is_priced_together(schedule: Schedule) -> None:
    simulator, steps = made(spec_of(schedule=schedule), MIXED * 3)
    together = simulator.run(simulator.price(steps)).step_time_s
    alone = [simulator.run(simulator.price([s])).step_time_s[0] for s in steps]
    assert together.tolist() == alone


@pytest.mark.process
def test_importing_the_simulator_leaves_torch_out() -> None:
    code = "import sys, wlb.simulate; print(sorted(m for m in sys.modules if 'torch' in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
