"""Predicted and measured metrics: two records, one set of keys in metrics.jsonl."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_telemetry import record
from wlb.plan import MeasuredStep, StepMetrics, UserError

OLD_LINES = Path(__file__).parent / "data" / "step_lines_0.1.jsonl"
"""Two steps of a run that was trained when one class held both records; only the second has
telemetry (telemetry.interval = 2)."""


def old_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OLD_LINES.read_text("utf-8").splitlines()]


def through_json(metrics: StepMetrics | MeasuredStep) -> dict[str, Any]:
    return json.loads(json.dumps(metrics.to_json()))


def test_old_lines_are_read_and_written_with_the_same_keys_and_values() -> None:
    for line in old_lines():
        assert through_json(MeasuredStep.from_json(line["measured"])) == line["measured"]
        for name in ("predicted", "plain_4d"):
            assert through_json(StepMetrics.from_json(line[name])) == line[name]


def test_values_of_old_lines() -> None:
    without, with_telemetry = (MeasuredStep.from_json(line["measured"]) for line in old_lines())
    assert (without.telemetry, without.imbalance) == (None, None)
    assert with_telemetry.imbalance == pytest.approx(1.1343, abs=1e-4)
    assert with_telemetry.loss == pytest.approx(5.6475, abs=1e-4)
    predicted = StepMetrics.from_json(old_lines()[1]["predicted"])
    assert (predicted.num_tokens, predicted.max_workload_ns) == (936, 3664570)
    assert predicted.imbalance == pytest.approx(1.0346, abs=1e-4)


def test_a_measured_step_has_the_counts_of_its_plan() -> None:
    predicted = StepMetrics.from_json(old_lines()[1]["predicted"])
    measured = MeasuredStep.of(
        predicted, loss=2.5, grad_norm=0.5, step_time_s=0.1, telemetry=record()
    )
    assert (measured.num_tokens, measured.sharding_counts) == (936, predicted.sharding_counts)
    assert through_json(measured)["max_workload_ns"] == record().slowest_ns
    unmeasured = through_json(replace(measured, telemetry=None))
    assert (unmeasured["imbalance"], unmeasured["max_workload_ns"]) == (None, 0)


def test_the_other_record_and_unknown_keys_are_refused() -> None:
    line = old_lines()[0]
    with pytest.raises(UserError, match=r"measured metrics of step 0.*MeasuredStep measured"):
        StepMetrics.from_json(line["measured"])
    with pytest.raises(UserError, match="predicted metrics of step 0"):
        MeasuredStep.from_json(line["predicted"])
    with pytest.raises(UserError, match=r"unknown keys \['speed'\]"):
        StepMetrics.from_json({**line["predicted"], "speed": 1})
