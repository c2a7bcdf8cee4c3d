"""Tests the critical path: durations that add up to the step, and whom they name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.runs import made, spec_of
from tests.simulate.steps import random_durations
from tests.simulate.test_step import literal
from wlb.simulate import NodeKind, Simulation, critical_path
from wlb.simulate.critical import CP_IMBALANCE
from wlb.spec import ExchangeChoice, Schedule, Strategy

MIXED = [4096, 3000, 1096, 2048, 2048, 1000, 3000, 96]


def test_a_path_by_hand() -> None:
    """The path is 0F0 100, 1F0 100, then rank 1 to its end 200 + 100 + 200, and 0B1 200.

    Rank 1 is to blame, and a quarter of its attention is waiting for the slower CP rank.
    """
    path = critical_path(literal())
    names = [str(event.node.action) for event in path.events]
    assert names == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert [event.duration_s for event in path.events] == pytest.approx(
        [100e-9, 100e-9, 200e-9, 100e-9, 200e-9, 200e-9]
    )
    assert path.by_rank == {(0, 1): pytest.approx(600e-9), (0, 0): pytest.approx(300e-9)}
    assert path.by_micro_batch == {(0, 1): pytest.approx(500e-9), (0, 0): pytest.approx(400e-9)}
    assert path.by_term == {"attention": pytest.approx(675e-9), CP_IMBALANCE: pytest.approx(225e-9)}
    assert {event.cp_rank for event in path.events} == {0}
    assert path.describe()[0] == "micro-batch 1 of pipeline 0: 56% of the critical path"


def test_the_slower_pipeline_is_named() -> None:
    path = critical_path(literal(dp=2))
    assert {event.pipeline for event in path.events} == {0}


@pytest.mark.parametrize("schedule", list(Schedule))
def test_terms_of_passes_by_need_add_up(schedule: Schedule) -> None:
    spec = spec_of(schedule=schedule, cp=4, n=4, v=1 if schedule == Schedule.ONE_F_ONE_B else 2)
    how = {"strategy": Strategy.PER_SEQUENCE, "exchange": ExchangeChoice.NEEDED}
    spec = replace(spec, sharding=replace(spec.sharding, **how))
    simulator, steps = made(spec, MIXED)
    prices = simulator.price(steps)
    assert (prices.exchange_forward_ns < 0).any()
    passes = [e for e in critical_path(simulator.run(prices)).events if "attention" in e.terms_s]
    assert passes
    for event in passes:
        assert sum(event.terms_s.values()) == pytest.approx(event.duration_s, abs=2e-9)
        assert event.terms_s.get("cp_comm", 0.0) > -2e-9  # rounded to whole ns a layer


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("pp", "dp", "v"), [(1, 2, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_terms_and_durations_add_up(schedule: Schedule, pp: int, dp: int, v: int) -> None:
    if schedule == Schedule.ONE_F_ONE_B or pp == 1:
        v = 1
    simulator, steps = made(spec_of(schedule=schedule, pp=pp, dp=dp, v=v, n=4), MIXED * 3)
    found = simulator.run(simulator.price(steps))
    for step in range(len(steps)):
        path = critical_path(found, step=step)
        assert path.events[0].start_s == 0
        for before, after in zip(path.events, path.events[1:], strict=False):
            assert before.stop_s == after.start_s
        assert path.events[-1].stop_s == path.step_time_s
        for event in path.events:
            terms = sum(event.terms_s.values())
            assert terms == pytest.approx(event.duration_s, abs=1e-9)  # rounded to whole ns
        assert sum(path.by_term.values()) == pytest.approx(path.step_time_s, rel=1e-4)
        assert path.events[-1].node.kind == NodeKind.OPTIMIZER
        assert all(isinstance(line, str) for line in path.describe())


@given(st.sampled_from(list(Schedule)), st.integers(0, 2**32 - 1), st.booleans())
def test_any_durations_add_up_exactly(schedule: Schedule, seed: int, has_fsdp: bool) -> None:
    size = 2 if has_fsdp else 1
    simulator, steps = made(spec_of(schedule=schedule, n=4, cp=1, dp=size), MIXED * 3)
    prices = simulator.price(steps)
    durations = random_durations(simulator.graph, seed, steps=len(steps), dp=size)
    found = Simulation(
        simulator=simulator,
        prices=prices,
        durations_ns=durations,
        ends_ns=simulator.graph.ends(durations),
    )
    for step in range(len(steps)):
        path = critical_path(found, step=step)
        ns = [round(event.duration_s * 1e9) for event in path.events]
        assert sum(ns) == found.ends_ns[:, step].max()
        assert sum(ns) == round(path.step_time_s * 1e9)
