"""Tests prices that change while a run trains: which hold when, what is kept, what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.test_compose import planner
from wlb.plan import (
    AS_PROFILED,
    NO_CHANGES,
    PlannerState,
    PriceChange,
    PriceFactors,
    PriceSchedule,
    StepPlan,
)

DEARER = PriceFactors(attention_forward=1_500_000, attention_backward=1_400_000)
DEAREST = PriceFactors(
    attention_forward=2_000_000, linear_forward=500_000, linear_forward_extra_ns=70
)
LEARNED = PriceSchedule(
    base="h100 sdpa",
    changes=(PriceChange(step=4, prices=DEARER), PriceChange(step=9, prices=DEAREST)),
)


def test_prices_hold_from_their_step_on() -> None:
    held = [LEARNED.at(step) for step in (0, 3, 4, 8, 9, 100)]
    assert held == [AS_PROFILED, AS_PROFILED, DEARER, DEARER, DEAREST, DEAREST]
    assert NO_CHANGES.at(7) == NO_CHANGES.latest == AS_PROFILED
    assert (LEARNED.latest, LEARNED.last_step, NO_CHANGES.last_step) == (DEAREST, 9, 0)


@pytest.mark.parametrize(("step", "kept"), [(0, 2), (3, 2), (4, 2), (8, 2), (9, 1), (50, 1)])
def test_what_no_later_step_depends_on_is_dropped(step: int, kept: int) -> None:
    rest = LEARNED.from_step(step)
    assert len(rest.changes) == kept
    assert [rest.at(s) for s in range(step, 60)] == [LEARNED.at(s) for s in range(step, 60)]


def test_plans_depend_on_factors_relative_to_linear_layers_forward() -> None:
    assert DEAREST.by_term["attention_forward"] == 2.0
    assert DEAREST.relative == {
        "attention_forward": 4.0,
        "attention_backward": 2.0,
        "linear_forward": 1.0,
        "linear_backward": 2.0,
    }


def test_another_base_has_other_prices() -> None:
    assert LEARNED.of_base("h100 sdpa") is LEARNED
    assert LEARNED.of_base("a100 sdpa") == NO_CHANGES
    change = PriceChange(step=20, prices=DEARER)
    assert LEARNED.changed(change, base="h100 sdpa").latest == DEARER
    with pytest.raises(ValueError, match="'a100 sdpa' cannot follow prices of 'h100 sdpa'"):
        LEARNED.changed(change, base="a100 sdpa")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PriceFactors(attention_forward=0),
            "attention_forward = 0 must be a whole number of at",
        ),
        (lambda: PriceFactors(linear_backward=1.5), "linear_backward = 1.5 must be a whole"),  # type: ignore[arg-type]
        (lambda: PriceFactors(linear_forward_extra_ns=-1), "linear_forward_extra_ns = -1 must be"),
        (
            lambda: LEARNED.changed(PriceChange(step=9, prices=DEARER), base=LEARNED.base),
            r"must be in the order of their steps, got \[4, 9, 9\]",
        ),
        (lambda: PriceSchedule.from_json({"base": ""}), "no price schedule .*'changes' is missing"),
        (lambda: PriceFactors.from_json({"attention": 1}), "no record of prices"),
    ],
)
def test_what_is_no_price_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_states_and_plans_keep_their_prices_in_json_and_read_those_that_have_none() -> None:
    assert PriceSchedule.from_json(json.loads(json.dumps(LEARNED.to_json()))) == LEARNED
    made = planner()
    (plan, *_) = made.steps()
    priced = replace(plan, prices=DEARER)
    data = json.loads(json.dumps(priced.to_json()))
    assert StepPlan.from_json(data).prices == DEARER
    state = json.loads(json.dumps(plan.state.with_prices(LEARNED).to_json()))
    assert PlannerState.from_json(state).prices == LEARNED
    del data["prices"], state["prices"]
    assert StepPlan.from_json(data).prices == AS_PROFILED
    assert PlannerState.from_json(state).prices == NO_CHANGES


def test_plans_of_other_prices_have_other_digests() -> None:
    (plan, *_) = planner().steps()
    digests = {replace(plan, prices=p).digest() for p in (AS_PROFILED, DEARER, DEAREST)}
    assert len(digests) == 3
