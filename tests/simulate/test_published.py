"""Tests what commands say of how far predictions were off published runs."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

import experiments.beyond.published_runs.__main__ as published_runs
from wlb.cost import load_profile
from wlb.simulate.published import ERRORS, trust_line
from wlb.spec import ParallelSpec, RunSpec

RESULTS = Path(published_runs.__file__).parent / "results" / "kinds.csv"
KINDS = {False: "data parallelism alone", True: "TP, CP or PP"}


def test_errors_are_those_of_the_experiment() -> None:
    with RESULTS.open(newline="") as file:
        rows = {(row["profile"], row["kind"]): row for row in csv.DictReader(file)}
    assert {(name, KINDS[kind]) for name, kind in ERRORS} == set(rows)
    for (name, kind), error in ERRORS.items():
        row = rows[name, KINDS[kind]]
        assert error.runs == int(row["rows"])
        assert error.largest == pytest.approx(float(row["largest error"]), abs=1e-4)


@pytest.mark.parametrize(
    ("profile", "tp", "expected"),
    [
        ("h100_runs", 8, "of 5 published H100 runs with TP, CP or PP were wrong by at most 6%"),
        ("h100_runs_500w", 1, "of 19 published H100 runs with data parallelism alone"),
        ("h100_sxm", 8, "24%; none of these runs packed documents. With cost.profile=h100_runs"),
        ("cpu", 1, "predictions with the profile cpu were not compared with published runs"),
    ],
)
def test_the_line_says_profile_kind_and_error(profile: str, tp: int, expected: str) -> None:
    spec = replace(RunSpec(), parallel=ParallelSpec(tp=tp, cp=1, pp=1, dp=8))
    assert expected in trust_line(spec, load_profile(profile))
