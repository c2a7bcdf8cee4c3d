"""Tests that JSON which is no record is refused with the name of the record."""

from typing import Any

import pytest

from tests.plan.case import plan
from wlb.plan import Carry, PackingPlan, PlannerState, ShardingPlan, StepPlan


@pytest.mark.parametrize("kind", [Carry, PackingPlan, PlannerState, ShardingPlan, StepPlan])
@pytest.mark.parametrize(
    "data", [{}, [], None, 3, {"pieces": {}}, {"pieces": 3}, {"more": 1}, {"carry": [1]}]
)
def test_what_is_no_record_is_refused_by_its_name(kind: Any, data: Any) -> None:
    with pytest.raises(ValueError, match=r"not a [a-z ]+ as `to_json` returns it[: ].+; give"):
        kind.from_json(data)


def test_a_record_that_lacks_a_value_is_refused_with_its_name() -> None:
    data = plan().to_json()
    del data["offsets"]
    with pytest.raises(ValueError, match=r"not a packing plan .* missing .* 'offsets'"):
        PackingPlan.from_json(data)
    with pytest.raises(
        ValueError, match=r"not a carry as `to_json` returns it \('pieces' is missing\)"
    ):
        Carry.from_json({"policy": "p", "slot": [], "next_step": 0})
    with pytest.raises(ValueError, match="must increase from 0 to 3"):  # the record's own words
        PackingPlan.from_json({**plan().to_json(), "offsets": [0, 2]})
    with pytest.raises(ValueError, match="not a packing plan"):
        PackingPlan.from_json({**plan().to_json(), "offsets": []})
