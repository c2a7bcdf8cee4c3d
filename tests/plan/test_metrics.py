"""Tests predicted and measured metrics: two records, one set of keys in metrics.jsonl."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.case import plan
from tests.plan.test_telemetry import record
from wlb.plan import (
    KeyRows,
    MeasuredStep,
    PackingPlan,
    StepMetrics,
    UserError,
    imbalance,
    int_array,
    merge,
    predict,
)

OLD_LINES = Path(__file__).parent / "data" / "step_lines_0.1.jsonl"
"""These are two steps of a run that was trained when one class held both records.

Only the second has telemetry, which runs of then could record of every second step.
"""


def old_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OLD_LINES.read_text("utf-8").splitlines()]


def through_json(metrics: StepMetrics | MeasuredStep) -> dict[str, Any]:
    return json.loads(json.dumps(metrics.to_json()))


def test_old_lines_are_read_and_written_with_the_same_keys_and_values() -> None:
    for line in old_lines():
        assert through_json(MeasuredStep.from_json(line["measured"])) == line["measured"]
        for name in ("predicted", "plain_4d"):
            assert through_json(StepMetrics.from_json(line[name])) == line[name]


def test_key_rows_are_written_where_there_are_any() -> None:
    old = MeasuredStep.from_json(old_lines()[0]["measured"])
    assert old.key_rows is None
    rows = KeyRows(num_by_need=3, received=200, gathered=800)
    line = through_json(replace(old, key_rows=rows))
    assert line["key_rows"] == {"num_by_need": 3, "received": 200, "gathered": 800}
    assert MeasuredStep.from_json(line).key_rows == rows


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
    with pytest.raises(UserError, match=r"step 0 have origin = measured.* with MeasuredStep"):
        StepMetrics.from_json(line["measured"])
    with pytest.raises(UserError, match="of step 0 have origin = predicted"):
        MeasuredStep.from_json(line["predicted"])
    with pytest.raises(UserError, match="unknown key 'speed'"):
        StepMetrics.from_json({**line["predicted"], "speed": 1})


def test_predicted_metrics() -> None:
    metrics = predict(plan(), num_padding_tokens=2)
    assert metrics.imbalance == pytest.approx(90 * 3 / 120)
    assert (metrics.mean_delay, metrics.max_delay) == (3.0, 3)
    assert (metrics.num_documents, metrics.num_tokens, metrics.num_targets) == (3, 16, 13)
    assert StepMetrics.from_json(json.loads(json.dumps(metrics.to_json()))) == metrics
    assert imbalance(int_array("w", [0, 0])) == 1.0


def test_a_token_that_is_trained_early_does_not_cancel_another_ones_delay() -> None:
    # At step 3: 5 tokens a step late, 2 in time, 9 two steps early.
    pieces = replace(plan().pieces, arrival_step=int_array("arrival_step", [2, 3, 5]))
    metrics = predict(replace(plan(), pieces=pieces))
    assert (metrics.mean_delay, metrics.max_delay) == (5 / 16, 1)
    early = replace(plan(), pieces=replace(plan().pieces, arrival_step=[4, 4, 4]))
    assert (predict(early).mean_delay, predict(early).max_delay) == (0.0, 0)


def test_steps_merge_into_one() -> None:
    other = PackingPlan(
        step=4, policy="literal", pieces=plan().pieces, offsets=[0, 1, 2, 3], workload_ns=[40] * 3
    )
    both = merge(predict(plan()), predict(other))
    assert merge(None, predict(plan())) == predict(plan())
    assert (both.step, both.num_tokens, both.num_documents) == (4, 32, 6)
    assert both.max_workload_ns == 90 + 40
    assert both.imbalance == pytest.approx((90 + 40) / (40 + 40))
    assert (both.mean_delay, both.max_delay) == (3.5, 4)
