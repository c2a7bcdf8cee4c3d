"""Tests training by every packing method: the runs, what they leave, statistics over seeds."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from experiments.paper.packing_methods.lengths import DATASETS
from experiments.paper.packing_training import __main__ as command
from experiments.paper.packing_training.cases import (
    GASES,
    NAMES,
    Case,
    Result,
    Study,
    all_cases,
    rate_cases,
    read_result,
)
from experiments.paper.packing_training.page import (
    against_rows,
    pictures,
    rates_table,
    training_table,
)
from experiments.paper.packing_training.summary import groups_of, noise_band, paper_pair
from experiments.paper.packing_training.words import words
from wlb.spec import METHODS, load

pytestmark = pytest.mark.full

CASES = all_cases(range(3), 1e-3)


def result(heldout: float = 3.0, **values: Any) -> Result:
    made = Result(
        steps=10,
        tokens=1000,
        targets=700,
        positions=1000,
        train_loss=3.5,
        heldout_before=7.0,
        heldout_after=heldout,
        compute_s=2.0,
        peak_mib=500.0,
        commit="0",
    )
    return replace(made, **values)


def found() -> dict[Case, Result]:
    """Returns padding at 3.0, 3.1, 3.2, everything else 0.01 above, the second gas's 0.5."""
    out: dict[Case, Result] = {}
    for case in CASES:
        above = 0.0 if case.method == "random_padding" else 0.01 + 0.02 * (case.seed - 1)
        above += 0.5 * (case.gas == GASES[1])
        out[case] = result(3.0 + 0.1 * case.seed + above, compute_s=2.0 / (1 + (above > 0.4)))
    return out


def test_every_method_is_trained_with_every_seed() -> None:
    assert set(NAMES) == set(METHODS)
    assert len({case.name for case in CASES}) == len(CASES) == 3 * (3 + 2 * 6)
    # Whole seeds first, so that an interrupted study can be looked at.
    assert [case.seed for case in CASES] == sorted(case.seed for case in CASES)
    assert {case.method for case in CASES} == set(METHODS)


@pytest.mark.parametrize("case", CASES[:15], ids=lambda case: case.name)
def test_a_case_is_a_run_that_is_accepted(case: Case) -> None:
    sets = [f"{name}={value}" for name, value in case.keys.items()]
    spec = load("sft_demo", [*sets, "data.context_window=1024", "model.vocab_size=4096"])
    rows = spec.num_micro_batches * (1 if case.is_fixed else 4)
    assert rows == 4 * case.gas
    assert spec.packing.method == case.method
    assert spec.run.seed == case.seed


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_case_but_ours_has_a_row_of_the_paper(dataset: str) -> None:
    for case in CASES[:15]:
        pair = paper_pair(dataset, case)
        assert (pair is None) == (case.method == "multipack_bfd_posid")
        if pair is not None:
            assert pair.row.method == case.title
            assert pair.padding.method == "RandomSampling+Padding"
            assert (pair.row.bs, pair.row.msl) == (
                (2, 4096) if case.layout.startswith("4, 1024") else (1, 8192)
            )
    few, many = (Case(method="random_posid", gas=g, seed=0, learning_rate=1e-3) for g in GASES)
    first, second = paper_pair(dataset, few), paper_pair(dataset, many)
    assert first is not None
    assert second is not None
    assert first.row.steps < first.padding.steps / 2  # as few steps as ours are
    assert abs(second.row.steps / second.padding.steps - 1) < 0.25


def test_a_number_of_the_paper() -> None:
    case = Case(method="mini_batch_posid", gas=8, seed=0, learning_rate=1e-3)
    pair = paper_pair("FLAN", case)
    assert pair is not None
    assert pair.difference == pytest.approx(1.123 - 1.117)
    assert pair.faster == pytest.approx(2289 / 1671)


def test_differences_are_paired_by_seed() -> None:
    groups = groups_of(found())
    assert len(groups) == 15
    padding = groups[0]
    assert padding.difference == 0
    assert padding.spread("heldout_after") == pytest.approx(0.1)
    compared = groups[1:]
    # By hand: t of all seeds' freedom, the pooled deviation, over the root of the seeds.
    variance = np.mean([np.var(g.differences, ddof=1) for g in compared])
    expected = stats.t.ppf(0.975, 14 * 2) * math.sqrt(variance / 3)
    assert noise_band(groups) == pytest.approx(expected)
    assert variance == pytest.approx(0.02**2)
    assert noise_band(groups) < 0.05 < padding.spread("heldout_after")  # the seeds' own spread
    late = [g for g in groups if g.case.gas == GASES[1]]
    assert all(abs(g.difference - 0.51) < 0.05 for g in late)
    assert all(g.faster == pytest.approx(2.0) for g in late)


def test_seeds_that_are_missing_are_said() -> None:
    some = found()
    del some[CASES[-1]]
    with pytest.raises(ValueError, match=f"{CASES[-1].method}.*: 2 seeds, padding has 3"):
        groups_of(some)


def test_the_page(tmp_path: Path) -> None:
    groups = groups_of(found())
    rates = {case: result(3.0 + i / 100) for i, case in enumerate(rate_cases())}
    table = training_table(groups)
    verdicts = [row[-1] for row in table.rows]
    assert verdicts[0] is None
    assert verdicts[-6:] == ["worse"] * 6
    assert set(verdicts[1:9]) == {"noise"}
    assert len(rates_table(rates).rows) == 8
    assert len(against_rows(groups)) == 2 * 12
    assert "noise" in words(groups, rates)
    for picture in pictures(groups):
        picture.figure.savefig(tmp_path / f"{picture.name}.png", dpi=50)
    assert command.best_rate(rates) == rate_cases()[0].learning_rate


def test_what_metrics_say(tmp_path: Path) -> None:
    def step(tokens: int, padding: int, targets: int, loss: float | None) -> dict[str, Any]:
        compute = {"compute": {"mean_s": 0.5}} if loss else None
        measured = {"num_tokens": tokens, "num_filler_tokens": padding, "num_targets": targets}
        return {"kind": "step", "measured": measured | {"loss": loss, "telemetry": compute}}

    lines = [
        {"kind": "start"},
        {"kind": "evaluation", "heldout_loss": 7.0},
        step(100, 20, 60, 4.0),
        step(50, 10, 30, 1.0),
        step(5, 0, 0, None),
        {"kind": "evaluation", "heldout_loss": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = read_result(tmp_path, peak_mib=1.0)
    assert (made.steps, made.tokens, made.targets, made.positions) == (2, 155, 90, 185)
    assert made.train_loss == pytest.approx(3.0)  # (4 * 60 + 1 * 30) / 90
    assert (made.heldout_before, made.heldout_after) == (7.0, 3.0)
    assert made.tokens_per_s == pytest.approx(155.0)


@pytest.mark.process
@pytest.mark.nightly
def test_a_run_is_measured_and_kept(tmp_path: Path) -> None:
    study = Study.open(tmp_path)
    case = Case(method="random_padding", gas=1, seed=0, learning_rate=1e-3)
    made = study.try_out(case, steps=1)
    assert made.positions > made.tokens > made.targets > 0
    assert 100 < made.peak_mib < 4000
    assert study.result(case) == made
    with pytest.raises(RuntimeError, match="failed, exit status"):
        study.try_out(replace(case, learning_rate=-1.0), steps=1)
