"""Tests that a communicator for the whole pipeline costs time, and one for each link none."""

import csv

import pytest

from experiments.transfers.__main__ import FOLDER, pipelines, row_of


@pytest.mark.full
def test_one_communicator_costs_a_step_and_most_of_the_gain() -> None:
    *_, links_s, one_s, ratio, gain, gain_of_one = row_of("7b_128k", steps=2, seed=1)
    assert ratio == pytest.approx(one_s / links_s) == pytest.approx(1.44, abs=0.01)
    assert (gain, gain_of_one) == pytest.approx((1.462, 1.166), abs=0.002)


def test_the_committed_table_has_every_preset_with_a_pipeline() -> None:
    with (FOLDER / "results" / "transfers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["preset"] for row in rows] == pipelines()
    for row in rows:
        ratio = float(row["one / links"])
        # Two pipeline ranks, or one stage a rank: hardly anything can stand behind a receive.
        is_affected = int(row["PP"]) > 2 and not row["schedule, virtual stages"].startswith("1f1b")
        assert (1.1 < ratio < 4) if is_affected else (1 <= ratio < 1.02), row
