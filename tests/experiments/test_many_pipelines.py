"""Tests that ours holds 98% of the bound of perfect balance at every number of pipelines.

Times are simulated, so they do not depend on the clock: whole runs of 160 global batches.
"""

import csv

import pytest

from experiments.harness import constants
from experiments.harness.evaluation import STEPS, batches_of, simulate, spec_of
from experiments.many_pipelines.__main__ import RESULTS, TARGET, fastest, layouts
from experiments.many_pipelines.losses import losses
from tests.sets import full

QUICK = ("DP 1",)
FULL = ("DP 2",)
NIGHTLY = tuple(name for name in layouts() if name not in (*QUICK, *FULL))
SETS = [*QUICK, *full(*FULL), *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]


@pytest.mark.full
@pytest.mark.parametrize("name", SETS)
def test_ours_is_within_two_percent_of_perfect_balance(name: str) -> None:
    """That is so against the steps as they were made and against equal ones, every document
    being trained."""
    layout = layouts()[name]
    # The first alternative is the fastest wherever it fits.
    found = fastest(layout.cases("wlb", steps=STEPS, seed=1)[:1])
    assert found.losses.of_bound >= TARGET
    assert found.losses.of_equal_steps >= TARGET
    spec = spec_of(layout.cases("wlb", steps=STEPS, seed=1)[0])
    batches = batches_of(spec, family=constants.FAMILY, steps=STEPS, seed=1)
    assert found.tokens == sum(batch.documents.num_tokens for batch in batches)


def test_the_committed_runs_are_near_perfect_balance() -> None:
    rows: list[dict[str, str]] = []
    for name in ("dp", "scale"):
        with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    assert [row[""] for row in rows] == list(layouts())
    for row in rows:
        assert TARGET <= float(row["of bound"]) <= 1, row
        assert TARGET <= float(row["of equal steps"]) <= 1, row
        assert float(row["ours"]) > float(row["WLB-LLM"]), row


@pytest.mark.full
def test_few_steps_lose_no_more_where_the_end_is_known() -> None:
    """Ten batches of four pipelines: what was flushed by itself cost several percent."""
    layout = layouts()["DP 4"]
    cases = layout.cases("wlb", steps=10, seed=1)[:1]
    known, unknown = (fastest(cases, knows_end=flag) for flag in (True, False))
    assert known.tokens == unknown.tokens
    assert known.losses.of_bound >= TARGET > unknown.losses.of_bound
    assert known.time_s < unknown.time_s


def test_causes_add_up_to_what_is_lost() -> None:
    case = layouts()["DP 2"].cases("plain_4d", steps=6, seed=1)[0]
    run = simulate(case)
    found = losses(run, num_batches=6, start=2)
    assert sum(found.shares().values()) == pytest.approx(1 - found.of_equal_steps)
    assert found.bound_s == pytest.approx(run.balanced_time_s())
    assert min(list(found.shares().values())[:3]) > 0
    lost = found.time_s - found.bound_s
    # Start and end are parts of the same sum; Plain-4D flushes a seventh step.
    assert found.num_extra_steps == 1
    whole = losses(run, num_batches=6, start=7)
    assert whole.start_s == pytest.approx(lost)
    assert 0 < found.start_s < lost
