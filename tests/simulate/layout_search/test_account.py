"""Tests the account of a step's time: its terms add up, and mean what they say."""

from dataclasses import replace

import pytest

from tests.simulate.layout_search.searched import batches, sample, spec_of
from wlb.cost import workload_for
from wlb.simulate import Simulator, StepPrices, planner_of, sharded_steps, simulate_run
from wlb.simulate.layout_search.account import (
    BUBBLE,
    CP_RANKS,
    MICRO_BATCHES,
    RECOMPUTE,
    account,
    even_terms,
    mean_prices,
    work_terms,
)
from wlb.spec import RunSpec, Schedule

LAYOUTS = [
    ("pp.schedule=interleaved_1f1b", "pp.virtual_stages=2"),
    ("pp.schedule=interleaved_zero_bubble", "pp.virtual_stages=2"),
    ("pp.schedule=1f1b", "pp.virtual_stages=1"),
    ("pp.schedule=1f1b", "pp.virtual_stages=1", "pp.stage_layers=[1, 3]"),
    (
        "pp.schedule=interleaved_zero_bubble",
        "pp.virtual_stages=2",
        "pp.stage_layers=[0, 2, 2, 0]",
        "training.recompute=full",
    ),
    ("parallel.pp=1", "parallel.dp=2", "pp.virtual_stages=1"),
    ("training.recompute=full",),
    ("training.recompute=selective", "pp.schedule=interleaved_zero_bubble"),
    ("cluster.overhead=0.1",),
    (
        *("model.experts.num=8", "model.experts.hidden_size=704", "model.experts.dense_layers=[0]"),
        *("parallel.dp=2", "parallel.ep=8", "training.recompute=selective"),
    ),
    ("model.sliding_window=512", "model.full_every=3", "training.recompute=full"),
]


def one_step(spec: RunSpec) -> tuple[Simulator, StepPrices]:
    cost = workload_for(spec, "cuda")
    simulator = Simulator(spec=spec, cost=cost)
    steps = tuple(sharded_steps(planner_of(spec, cost, batches()), dp=spec.parallel.dp))
    return simulator, simulator.price(steps)


@pytest.mark.parametrize("overrides", LAYOUTS)
def test_terms_add_up_to_the_time(overrides: tuple[str, ...]) -> None:
    spec = spec_of(*overrides)
    simulator, prices = one_step(spec)
    time_s = float(simulator.run(prices).step_time_s.sum())
    terms = account(simulator, prices, time_s)
    assert sum(terms.values()) == pytest.approx(time_s, rel=1e-9)
    small = 1e-3 * time_s
    assert {n: s for n, s in terms.items() if s < -small and n != MICRO_BATCHES} == {}
    run = simulate_run(spec, simulator.cost, batches())
    even = sum(s for n, s in terms.items() if n not in (MICRO_BATCHES, CP_RANKS))
    assert even == pytest.approx(run.balanced_time_s(), rel=0.02)


def test_without_a_pipeline_there_is_no_bubble() -> None:
    simulator, prices = one_step(spec_of("parallel.pp=1", "parallel.dp=2", "pp.virtual_stages=1"))
    terms = even_terms(simulator, mean_prices(prices))
    assert abs(terms[BUBBLE]) < 1e-3 * sum(terms.values())


def test_recompute_is_what_full_takes_more_in_passes() -> None:
    work: dict[str, dict[str, float]] = {}
    for how in ("none", "selective", "full"):
        simulator, prices = one_step(spec_of(f"training.recompute={how}", "packing.policy=fixed"))
        work[how] = work_terms(mean_prices(prices), simulator.cost)
    for how in ("selective", "full"):
        more = sum(work[how].values()) - sum(work["none"].values())
        assert work[how][RECOMPUTE] == pytest.approx(more, rel=1e-3)
        assert work[how]["gemm"] == pytest.approx(work["none"]["gemm"], rel=1e-6)
    assert work["full"][RECOMPUTE] > work["selective"][RECOMPUTE] > 0


def test_more_virtual_stages_have_less_bubble_and_the_same_work() -> None:
    found: dict[int, dict[str, float]] = {}
    for v in (1, 2):
        spec = spec_of(f"pp.virtual_stages={v}")
        spec = replace(spec, pp=replace(spec.pp, schedule=Schedule.INTERLEAVED_1F1B))
        simulator, prices = one_step(spec)
        found[v] = even_terms(simulator, mean_prices(prices))
    assert found[2][BUBBLE] < 0.8 * found[1][BUBBLE]
    assert found[2]["gemm"] == pytest.approx(found[1]["gemm"])


def test_the_sample_is_what_packing_cuts() -> None:
    pieces = sample().pieces(1000)
    assert pieces.max() == 1000
    assert pieces.sum() == sample().num_tokens
