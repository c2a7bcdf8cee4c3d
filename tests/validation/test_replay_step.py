"""Tests simulated steps as waits: sizes by hand, the simulator on them by hand, and replayed."""

import numpy as np
import pytest

from experiments.beyond.validation.plans import PROCESSES, DrawnPlan, draw_plans
from wlb.cost import Scope, workload_for
from wlb.simulate import Simulation, Simulator, StepPrices
from wlb.simulate.order import PassKind
from wlb.simulate.pass_times import TermPrices
from wlb.spec import PipelineSection, Schedule, load
from wlb.validation.replay import StepWaits
from wlb.validation.replay_step import compare, simulated_s, waits_of

MS = 1_000_000


def calls(ns: float) -> TermPrices:
    return TermPrices(per_token={}, per_call={"calls": ns})


def simulation(
    schedule: Schedule,
    *,
    forward_ms: list[list[int]],
    linear: dict[PassKind, float],
    ends: dict[tuple[PassKind, bool], TermPrices] | None = None,
) -> Simulation:
    """Returns one step of two pipeline ranks with one stage each.

    forward_ms: attention, shape [n][cp]; backward takes twice that
    linear: ms per pass
    """
    attention = np.array(forward_ms, np.int64)[None, None] * MS
    n, cp = attention.shape[2:]
    v = 1 if schedule == Schedule.ONE_F_ONE_B else 2
    spec = load(
        "7b_64k",
        [
            "model.vocab_size=32000",
            f"parallel.cp={cp}",
            "parallel.pp=2",
            f"pp.schedule={schedule}",
            f"pp.virtual_stages={v}",
            f"data.num_windows={n}",
        ],
    )
    simulator = Simulator(spec=spec, cost=workload_for(spec, "cuda"))
    prices = StepPrices(
        tokens=np.array([[[100, 4096, 65536][:n]]]),
        attention_forward_ns=attention,
        attention_backward_ns=2 * attention,
        exchange_forward_ns=np.zeros_like(attention[..., 0]),
        exchange_backward_ns=np.zeros_like(attention[..., 0]),
        linear=({kind: calls(ms * MS) for kind, ms in linear.items()},),
        ends=ends or {},
        message=dict.fromkeys(Scope, calls(0.0)),
        kind_layers=((1,) * spec.num_stages,),
    )
    return simulator.run(prices)


def test_waits_keep_their_proportions_and_the_shortest_is_as_long_as_asked() -> None:
    step = simulation(
        Schedule.ONE_F_ONE_B,
        forward_ms=[[1, 3], [2, 4]],
        linear={PassKind.FORWARD: 1.0, PassKind.BACKWARD: 2.0},
        ends={(PassKind.FORWARD, True): calls(6.0 * MS)},
    )
    waits = waits_of(step, step=0, shortest_s=0.02)  # the shortest pass has 2 ms: ten times all
    assert waits.shape == (1, 2, 2, 2)
    first, last = (waits.forward[0, :, stage] for stage in (0, 1))
    np.testing.assert_allclose(first, [[0.02, 0.04], [0.03, 0.05]])
    np.testing.assert_allclose(last, first + 0.06)  # the head
    np.testing.assert_allclose(waits.backward[0, :, 0], [[0.04, 0.08], [0.06, 0.10]])
    assert not waits.weight.any()
    assert waits.rows.tolist() == [[1, 2]]  # of 100 and 4,096 tokens


def test_an_empty_micro_batch_does_not_stretch_the_step() -> None:
    """The floor is a twentieth of the mean pass."""
    step = simulation(
        Schedule.ONE_F_ONE_B,
        forward_ms=[[0], [400]],
        linear={PassKind.FORWARD: 0.0, PassKind.BACKWARD: 0.0},
    )
    waits = waits_of(step, step=0, shortest_s=0.02)
    np.testing.assert_allclose(waits.forward[0, :, 0, 0], [0.02, 0.8])  # 400 ms over 200 / 20
    np.testing.assert_allclose(waits.backward[0, :, 0, 0], [0.02, 1.6])


def test_zero_bubble_waits_for_weights_apart() -> None:
    step = simulation(
        Schedule.INTERLEAVED_ZERO_BUBBLE,
        forward_ms=[[1], [2]],
        linear={PassKind.FORWARD: 3.0, PassKind.BACKWARD_INPUT: 4.0, PassKind.BACKWARD_WEIGHT: 2.0},
    )
    waits = waits_of(step, step=0, shortest_s=0.02)
    assert waits.shape == (1, 2, 4, 1)
    np.testing.assert_allclose(waits.forward[0, :, 0, 0], [0.04, 0.05])
    np.testing.assert_allclose(waits.backward[0, :, 0, 0], [0.06, 0.08])
    np.testing.assert_allclose(waits.weight[0, :, 0, 0], [0.02, 0.02])  # no attention in it


# Two micro-batches on two ranks, F 20 and 60 ms, backward 40 and 120: of 1F1B the critical path is
# 0F0 | 1F0 1B0 | 1F1 (0F1 is over at 80 ms, like 1B0) 1B1 | 0B1 = 20 + 60 + 180 + 120 ms. With two
# CP ranks the slower one counts; a second pipeline of half the work changes nothing.
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_simulator_on_waits(cp: int, dp: int) -> None:
    share = np.array([1.0, 0.5])[:dp, None, None, None] * np.array([0.7, 1.0])[-cp:]
    forward = np.array([0.02, 0.06])[None, :, None, None] * np.ones((dp, 2, 2, cp)) * share
    waits = StepWaits(
        forward=forward,
        backward=2 * forward,
        weight=np.zeros_like(forward),
        rows=np.ones((dp, 2), np.int64),
    )
    found = simulated_s(waits, PipelineSection(schedule=Schedule.ONE_F_ONE_B), pp=2)
    assert found == pytest.approx(0.38)


def test_more_processes_than_can_be_replayed_are_refused() -> None:
    ones = np.ones((5, 4, 4, 2))
    waits = StepWaits(forward=ones, backward=ones, weight=0 * ones, rows=np.ones((5, 4), np.int64))
    with pytest.raises(
        ValueError,
        match=r"dp = 5, parallel.cp = 2 and parallel.pp = 4 needs 40 processes, but at most 32",
    ):
        compare([waits], ["large"], PipelineSection(schedule=Schedule.ONE_F_ONE_B), pp=4)


def test_plans_are_drawn_in_turn_and_the_same_again() -> None:
    plans = draw_plans(20, seed=0)
    assert plans == draw_plans(20, seed=0) != draw_plans(20, seed=1)
    assert {p.system for p in plans} == {"plain_4d", "fixed_4d", "paper", "wlb"}
    assert {p.schedule for p in plans} == set(Schedule)
    assert {p.virtual_stages for p in plans} == {1, 2, 4}
    assert all(p.processes in PROCESSES for p in plans)
    assert {8, 32} <= {p.processes for p in plans}


@pytest.mark.dist
@pytest.mark.full
def test_replayed_plans_take_no_less_than_simulated() -> None:
    """There are small plans of all schedules, balanced and not.

    How much longer they take depends on the machine; `python -m experiments.beyond.validation`
    measures that.
    """
    for system, schedule, v, layout in (
        ("plain_4d", Schedule.ONE_F_ONE_B, 1, (2, 2, 1)),
        ("wlb", Schedule.INTERLEAVED_1F1B, 2, (2, 1, 2)),
        ("paper", Schedule.INTERLEAVED_ZERO_BUBBLE, 2, (2, 2, 1)),
    ):
        pp, cp, dp = layout
        plan = DrawnPlan(
            system=system,
            variant=0,
            schedule=schedule,
            virtual_stages=v,
            pp=pp,
            cp=cp,
            dp=dp,
            num_micro_batches=3,
            seed=3,
            step=4,
        )
        waits = waits_of(plan.simulate(), step=0, shortest_s=0.04)
        (found,) = compare(
            [waits], [system], PipelineSection(schedule=schedule, virtual_stages=v), pp=pp
        )
        assert min(found.replayed_s) >= 0.999 * found.simulated_s, found
