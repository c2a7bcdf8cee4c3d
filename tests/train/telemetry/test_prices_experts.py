"""Tests prices and loads of runs with experts, on known times and without processes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train.telemetry.test_meter import MODEL, first_step, ms
from tests.train.telemetry.test_prices import TRUE, RankPlace
from wlb.cost import (
    RankVote,
    StageLayers,
    ballot,
    counted_votes,
    stage_times,
    without_collectives,
    workload_for,
)
from wlb.parallel.mesh import Coordinates
from wlb.parallel.observe import Cell, Part, Pass
from wlb.plan import NO_CHANGES, TERMS, ExpertLoad
from wlb.plan.prices import UNIT
from wlb.spec import ExpertsSpec, ParallelSpec, Recompute, RunSpec
from wlb.train.telemetry import meter
from wlb.train.telemetry.clock import StepTimes
from wlb.train.telemetry.prices import LearnPrices, PriceMeter, expert_tokens


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_load_of_experts_is_in_no_price(device: str) -> None:
    """Experts' products take as long as the rows that a rank computes, or on CUDA those that it
    waits for: 0.4 and 1.6 times the mean. Ranks vote for TRUE all the same."""
    load = ExpertLoad(layers=(0,), expert=(2.0,), rank=(1.6,), ranks=(0.4, 1.6))
    spec = RunSpec(parallel=ParallelSpec(cp=2, ep=2))
    moe = ExpertsSpec(num=4, per_token=2, hidden_size=2**24)
    spec = replace(
        spec,
        model=replace(MODEL, experts=moe),
        training=replace(spec.training, recompute=Recompute.SELECTIVE),
        data=replace(spec.data, context_window=64, num_windows=4),
        cost=replace(spec.cost, expert_load=1.3),
    )
    cost = workload_for(spec, device)
    timed = replace(cost if device == "cuda" else without_collectives(cost), expert_load=1.0)
    once = replace(timed, recompute=Recompute.NONE)
    plan, votes = first_step(0), []
    for cp in range(2):
        mesh: Any = RankPlace(device, cp)
        mesh.parallel = spec.parallel
        mesh.experts = SimpleNamespace(get_local_rank=lambda axis, rank=cp: rank)
        lengths = np.array([sharding.num_tokens for sharding in plan.shardings])
        step: Any = SimpleNamespace(
            sums=SimpleNamespace(experts=load),
            plan=SimpleNamespace(
                packing=SimpleNamespace(rows=lengths), pipelines=np.arange(lengths.size)[None]
            ),
        )
        experts = expert_tokens(step, mesh)
        ratio = 1.6 if device == "cuda" else (0.4, 1.6)[cp]
        assert experts == pytest.approx(ratio * lengths)
        base, again, even = (
            stage_times(plan, w, StageLayers(layers=4))
            for w in (*(replace(w, expert_load=ratio) for w in (once, timed)), once)
        )
        changed = base.linear_forward_ns / even.linear_forward_ns
        assert abs(changed[0] - 1) > 0.05
        parts: dict[tuple[Cell, Part], int] = {}
        for i in range(lengths.size):
            for end in ("forward", "backward"):
                attention = getattr(base, f"attention_{end}_ns")[i] * TRUE[f"attention_{end}"]
                took = getattr(base, f"linear_{end}_ns")[i] * TRUE[f"linear_{end}"]
                if end == "backward":
                    twice = again.linear_backward_ns[i] - base.linear_backward_ns[i]
                    took += twice * TRUE["linear_forward"]
                wait = (attention.max() - attention[cp]) * (device == "cuda")
                cell = Cell(Pass(end), 0, i)
                parts[cell, Part.ATTENTION] = round(attention[cp])
                parts[cell, Part.LAYERS] = round(took + wait)
        prices = PriceMeter(spec, mesh, cost)
        prices.add(plan, StepTimes(parts, wall_ns=1), experts)
        votes.append(prices.ballot())
    measured = counted_votes(np.sum(votes, axis=0))
    assert measured is not None
    assert measured.num_votes == 2
    assert measured.factors == pytest.approx(TRUE, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_calibrated_profile_has_no_load_of_experts(device: str) -> None:
    """Predicted terms are those of the rows that experts computed, whatever cost.expert_load is."""
    moe = ExpertsSpec(num=4, per_token=2, hidden_size=2**24)
    spec = RunSpec(model=replace(MODEL, experts=moe), parallel=ParallelSpec(cp=2, ep=2))
    spec = replace(spec, data=replace(spec.data, context_window=64, num_windows=4))
    plan = first_step(0)
    mesh: Any = RankPlace(device, 0)
    lengths = np.array([sharding.num_tokens for sharding in plan.shardings])
    cells = [Cell(Pass(end), 0, i) for end in ("forward", "backward") for i in range(lengths.size)]
    times = StepTimes({(cell, Part.LAYERS): ms(1) for cell in cells}, wall_ns=1)
    found: list[dict[str, float]] = []
    for load in (1.0, 1.3, 1.6):
        spec = replace(spec, cost=replace(spec.cost, expert_load=load))
        measured = meter.TelemetryMeter(spec, mesh)
        measured.add(plan, times, experts=1.6 * lengths)
        found.append({name: measured._moments[name].predicted_s for name in TERMS[2:]})
    assert found[0] == pytest.approx(found[2], rel=1e-3)
    assert found[1] == pytest.approx(found[2], rel=1e-3)
    measured = meter.TelemetryMeter(spec, mesh)
    measured.add(plan, times, experts=1.0 * lengths)
    assert measured._moments["linear_forward"].predicted_s < 0.95 * found[2]["linear_forward"]


def test_stages_without_experts_are_priced_as_such() -> None:
    """Stage 0 has MLPs alone and stage 1 experts; a rank of either measures the same prices."""
    moe = ExpertsSpec(num=4, per_token=1, hidden_size=2**14, dense_layers=(0, 1))
    spec = RunSpec(model=replace(MODEL, experts=moe), parallel=ParallelSpec(cp=2, pp=2, ep=2))
    spec = replace(spec, data=replace(spec.data, context_window=64, num_windows=4))
    cost = workload_for(spec, "cpu")
    once = without_collectives(cost)
    plan = first_step(0)
    lengths = np.array([sharding.num_tokens for sharding in plan.shardings])
    for pp, (kind, load) in enumerate(((spec.model.dense, 1.0), (spec.model, 1.5))):
        model = replace(kind, experts=replace(kind.experts, dense_layers=()))
        of_kind = replace(once, model=model, expert_load=load)
        base = stage_times(plan, of_kind, StageLayers(layers=2))
        parts: dict[tuple[Cell, Part], int] = {}
        for i in range(lengths.size):
            for end in ("forward", "backward"):
                cell, factor = Cell(Pass(end), pp, i), TRUE[f"linear_{end}"]
                attention = getattr(base, f"attention_{end}_ns")[i, 0] * TRUE[f"attention_{end}"]
                parts[cell, Part.ATTENTION] = round(attention)
                parts[cell, Part.LAYERS] = round(getattr(base, f"linear_{end}_ns")[i] * factor)
        mesh: Any = RankPlace("cpu", 0)
        mesh.at = Coordinates(tp=0, cp=0, pp=pp, dp=0)
        prices = PriceMeter(spec, mesh, cost)
        prices.add(plan, StepTimes(parts, wall_ns=1), 1.5 * lengths)
        found = counted_votes(prices.ballot())
        assert found is not None
        assert found.factors == pytest.approx(TRUE, rel=0.02)
        assert found.linear_forward == pytest.approx(UNIT, rel=0.02)


def test_pipelines_that_meet_have_their_mean_tokens_at_experts() -> None:
    mesh: Any = RankPlace("cuda", 0)
    mesh.parallel, mesh.experts = ParallelSpec(dp=4, ep=2), object()
    mesh.at = Coordinates(tp=0, cp=0, pp=0, dp=3)
    load = ExpertLoad(layers=(0,), expert=(2.0,), rank=(1.5,), ranks=(1.0, 1.0))
    rows = np.array([10, 20, 30, 40, 50, 60, 70, 80])
    pipelines = np.array([[0, 1], [2, 3], [4, 7], [6, 5]])
    step: Any = SimpleNamespace(
        sums=SimpleNamespace(experts=load),
        plan=SimpleNamespace(packing=SimpleNamespace(rows=rows), pipelines=pipelines),
    )
    assert expert_tokens(step, mesh) == pytest.approx([1.5 * 60, 1.5 * 70])
    step.sums.experts = None
    assert expert_tokens(step, mesh) is None


def test_the_load_of_experts_is_counted_over_several_intervals() -> None:
    spec = RunSpec()
    learn = LearnPrices(spec, workload_for(spec, "cpu"))
    right = ballot(RankVote(dict.fromkeys(TERMS, 1.0), (0.0, 0.0)))
    run: Any = SimpleNamespace(is_last_step=False)
    known, found = NO_CHANGES, []
    for i, load in enumerate([1.01, 1.02, 1.0, 1.2, 1.4, 1.4, 1.4, 1.4, 1.4]):
        loads = ExpertLoad(layers=(0,), expert=(2.0,), rank=(load,), ranks=(1.0,))
        step: Any = SimpleNamespace(sums=SimpleNamespace(experts=loads), votes=None)
        learn.record(run, step)
        _, change = learn.decide(right, known, i)
        if change is not None:
            known = known.changed(change, base="cpu")
        found.append(change and change.prices.expert_load)
    # Of the last four: 1.0575, 1.155 and so on; within 3% of what holds, nothing changes.
    assert found == [None, None, None, 1_057_500, 1_155_000, 1_250_000, 1_350_000, 1_400_000, None]
    changes = [change.prices for change in known.changes]
    assert {prices.relative["attention_forward"] for prices in changes} == {1.0}


def test_a_learned_load_that_memory_was_not_planned_for_is_told_once() -> None:
    spec = RunSpec()
    spec = replace(spec, cost=replace(spec.cost, expert_load=1.2, online_max_change=9.0))
    learn, said = LearnPrices(spec, workload_for(spec, "cpu")), list[str]()
    right = ballot(RankVote(dict.fromkeys(TERMS, 1.0), (0.0, 0.0)))
    report = SimpleNamespace(say=said.append, write=lambda *_, **__: None)
    feed = SimpleNamespace(announce=lambda prices: None)
    run: Any = SimpleNamespace(
        is_last_step=False, report=report, feed=feed, prices=NO_CHANGES, steps_done=1
    )
    found: list[int] = []
    for i, load in enumerate([1.0] * 4 + [1.8] * 8):
        loads = ExpertLoad(layers=(0,), expert=(2.0,), rank=(load,), ranks=(1.0,))
        plan = SimpleNamespace(step=i)
        step: Any = SimpleNamespace(sums=SimpleNamespace(experts=loads), votes=right, plan=plan)
        learn.record(run, step)
        found.append(sum("exceeds cost.expert_load = 1.2" in text for text in said))
    changed = [change.prices.expert_load for change in run.prices.changes]
    assert changed == [1_000_000, 1_200_000, 1_400_000, 1_600_000, 1_800_000]
    assert found == [0] * 5 + [1] * 7
    (text,) = (text for text in said if "exceeds" in text)
    assert "1.400, exceeds" in text
    assert "set cost.expert_load = 1.400 and start again" in text
