"""Tests that predicted times of micro-batches on stages add up to what the planner prices."""

from dataclasses import fields, replace

import numpy as np
import pytest

from wlb.cost import (
    ProfiledWorkload,
    StageLayers,
    attention_latency,
    end_times_ns,
    load_profile,
    stage_times,
    without_collectives,
)
from wlb.cost.stages import linear_prices
from wlb.plan import PipelinePlan
from wlb.planner import Planner
from wlb.spec import ExpertsSpec, ModelSpec, ParallelSpec, RunSpec

MODEL = ModelSpec(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, ffn_hidden_size=1408)


def priced(profile: str = "h100", cp: int = 2) -> ProfiledWorkload:
    return ProfiledWorkload(
        model=MODEL,
        parallel=ParallelSpec(tp=2, cp=cp, pp=2),
        profile=load_profile(profile),
        micro_batch_tokens=8192,
    )


def first_plan(cp: int = 2) -> PipelinePlan:
    lengths = [8192, 5000, 3100, 2400, 900, 800, 700, 400, 120, 60]
    planner = Planner.for_lengths(lengths, context_window=8192, num_micro_batches=2, cp=cp)
    return planner.shard(next(planner.steps()), pipeline=0)


@pytest.mark.parametrize("profile", ["h100", "cpu"])
def test_stages_add_up_to_a_pipeline_ranks_layers(profile: str) -> None:
    cost, plan = priced(profile), first_plan()
    times = stage_times(plan, cost, StageLayers(counts=(2,)))
    assert times.attention_forward_ns.shape == (2, 2)
    for i, sharding in enumerate(plan.shardings):
        latency = attention_latency(sharding, cost)
        assert np.abs(2 * times.attention_forward_ns[i] - latency.forward_ns).max() <= 1
        assert np.abs(2 * times.attention_backward_ns[i] - latency.backward_ns).max() <= 1
        linear = 2 * (times.linear_forward_ns[i] + times.linear_backward_ns[i])
        calls = sum(cost.linear.call_ns)
        assert linear == pytest.approx(cost.linear_ns([sharding.num_tokens])[0] + calls, abs=8)
        # Two GEMMs backward for one forward, and more to read and to send.
        assert 1.3 < times.linear_backward_ns[i] / times.linear_forward_ns[i] < 2.7


LATE = ExpertsSpec(num=4, per_token=2, hidden_size=1408, dense_layers=(0, 1, 2, 3))
EARLY_WINDOWS = replace(MODEL, sliding_window=512, full_every=3)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (
            replace(MODEL, experts=LATE),
            (MODEL, replace(MODEL, experts=replace(LATE, dense_layers=()))),
        ),
        (EARLY_WINDOWS, (replace(MODEL, sliding_window=512), MODEL)),
    ],
)
def test_stages_are_priced_by_their_own_layers(
    model: ModelSpec, kinds: tuple[ModelSpec, ModelSpec]
) -> None:
    """Of 8 layers: stages of 4 with an MLP and of 4 with experts; stages of 5 and 3 layers of which
    4 and 2 slide.
    """
    spec = RunSpec(model=model, parallel=ParallelSpec(tp=2, cp=2, pp=2))
    counts, slides = ((4, 0), (0, 4)), model is EARLY_WINDOWS
    if slides:
        counts = ((4, 1), (2, 1))
        spec = replace(spec, pp=replace(spec.pp, stage_layers=(5, 3)))
        assert spec.stage_other_layers == (4, 2)
    cost, plan = replace(priced(), model=model), first_plan()
    own = [stage_times(plan, replace(priced(), model=m), StageLayers(counts=(1,))) for m in kinds]
    for stage, of in enumerate(counts):
        times = stage_times(plan, cost, StageLayers.of(spec, stage))
        for f in fields(times):
            first, second = (getattr(times_of_one, f.name) for times_of_one in own)
            expected = of[0] * first + of[1] * second
            assert np.abs(getattr(times, f.name) - expected).max() <= 8, f.name
    differing = "attention_forward_ns" if slides else "linear_forward_ns"
    first, second = (getattr(times, differing) for times in own)
    assert np.abs(first / second - 1).max() > 0.05


def test_embedding_and_head_of_all_rows() -> None:
    """Padding counts too; the head's gradient is scaled once per micro-batch."""
    cost, plan = priced(), first_plan()
    rows = 2 * sum(plan.local_tokens)
    assert rows >= sum(s.num_tokens for s in plan.shardings)
    embedding, head = end_times_ns(plan, cost)
    assert embedding == pytest.approx(rows * sum(cost.linear.embedding_ns_per_token), abs=1)
    once = len(plan.micro_batches) * cost.linear.head_backward_ns
    assert head == pytest.approx(rows * cost.linear.head_ns_per_token + once, abs=1)


def test_without_collectives_only_they_are_free() -> None:
    cost = priced()
    free = without_collectives(cost)
    before, after = cost.terms([4096]), free.terms([4096])
    for name, values in after.items():
        expected = 0 if "_comm_" in name else before[name][0]
        assert values.tolist() == [expected]
    assert before["tp_comm_forward"][0] > 0
    plan = first_plan()
    with_them, without = (stage_times(plan, c, StageLayers(counts=(4,))) for c in (cost, free))
    assert (without.linear_forward_ns < with_them.linear_forward_ns).all()
    assert (without.attention_forward_ns == with_them.attention_forward_ns).all()


def test_prices_of_a_workload_are_made_once() -> None:
    """Telemetry asks for them in every step; those of another workload are its own."""
    cost, layers = priced(), StageLayers(counts=(2,))
    assert cost.of_other_layers is cost.of_other_layers
    assert linear_prices(cost, layers) is linear_prices(cost, layers)
    slower = replace(cost, parallel=replace(cost.parallel, tp=1))
    assert linear_prices(slower, layers).per_token > linear_prices(cost, layers).per_token
