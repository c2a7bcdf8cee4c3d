"""Tests states and plans that versions with learned prices (`cost.online`) wrote."""

import json
from typing import Any

import pytest

from tests.planner.test_compose import fingerprint, planner
from wlb.plan import PlannerState, StepPlan, UserError

NO_CHANGES = {"base": "", "changes": []}
FACTORS = {
    "attention_forward": 1_300_000,
    "attention_backward": 1_000_000,
    "linear_forward": 1_000_000,
    "linear_backward": 1_000_000,
    "linear_forward_extra_ns": 0,
    "linear_backward_extra_ns": 0,
    "expert_load": 0,
}


def written(value: PlannerState | StepPlan) -> dict[str, Any]:
    return json.loads(json.dumps(value.to_json()))


@pytest.mark.parametrize("prices", [NO_CHANGES, None])
def test_a_state_whose_run_had_learned_nothing_goes_on_as_the_same_one(prices: Any) -> None:
    made = planner()
    plans = list(made.steps())
    data = written(plans[2].state)
    assert "prices" not in data
    state = PlannerState.from_json(data | {"prices": prices})
    assert state == plans[2].state
    assert [fingerprint(made, p) for p in made.steps(state)] == [
        fingerprint(made, p) for p in plans[3:]
    ]


def test_a_state_with_learned_prices_is_refused_by_the_step_and_with_what_works() -> None:
    made = planner()
    data = written(next(made.steps()).state)
    data["prices"] = {"base": "cpu sdpa", "changes": [{"step": 9, "prices": FACTORS}]}
    problem = (
        r"cost\.online, which adjusted the predicted times of profile 'cpu sdpa' to measured times "
        r"from step 10 on; .* Resume from a checkpoint of an earlier step, use the version .*, or "
        r"start a new run from its weights \(checkpoint\.init_from\)"
    )
    with pytest.raises(UserError, match=problem):
        PlannerState.from_json(data)


def test_a_step_plan_with_prices_as_profiled_is_read() -> None:
    made = planner()
    plan = next(made.steps())
    data = written(plan)
    assert "prices" not in data
    data["prices"] = dict.fromkeys(FACTORS, 1_000_000)
    data["state"]["prices"] = NO_CHANGES
    assert fingerprint(made, StepPlan.from_json(data)) == fingerprint(made, plan)
    data["state"]["prices"] = {"base": "h100", "changes": [{"step": 0, "prices": FACTORS}]}
    with pytest.raises(UserError, match="to measured times from step 1 on"):
        StepPlan.from_json(data)
