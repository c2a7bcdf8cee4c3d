"""Tests that ours stays near perfect balance however many pipelines there are."""

import csv

import pytest

from experiments.evaluation import outcome, system
from experiments.many_pipelines.__main__ import LEAST, PIPELINES, RESULTS, cases


@pytest.mark.full
@pytest.mark.parametrize("dp", [2, 8])
def test_a_run_of_several_pipelines_is_near_perfect_balance(dp: int) -> None:
    ((config, overrides),) = list(cases((dp,)).values())[:1]
    case, *_ = system("wlb", config, *overrides, steps=80)
    assert outcome(case).of_bound >= LEAST


def test_the_committed_runs_are_near_perfect_balance() -> None:
    with (RESULTS / "pipelines.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row[""] for row in rows] == list(cases())
    assert len(rows) == len(PIPELINES) + 3
    for row in rows:
        assert LEAST <= float(row["of bound"]) <= 1, row
        assert float(row["ours"]) > float(row["WLB-LLM"]), row
