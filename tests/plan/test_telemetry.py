"""Tests moments against NumPy, what cannot be told from them, and the record's JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.plan import TERMS, MeasuredStep, Moments, Spread, Telemetry, Work

PAIRS = st.lists(
    st.tuples(st.floats(1e-6, 10.0), st.floats(1e-6, 10.0)), min_size=2, max_size=30, unique=True
)


def moments(pairs: list[tuple[float, float]]) -> Moments:
    return sum((Moments.of(*pair) for pair in pairs), Moments())


def record(**changes: object) -> Telemetry:
    values: dict[str, object] = {
        "num_steps": 2,
        "slowest_ns": 30,
        "mean_ns": 20.0,
        "predicted_slowest_ns": 24,
        "predicted_mean_ns": 20.0,
        "whole_slowest_ns": 44,
        "whole_mean_ns": 40.0,
        "terms": tuple((name, moments([(1.0, 2.0), (2.0, 5.0)])) for name in TERMS),
        "embedding_s": 0.1,
        "head_s": 0.2,
        "compute": Spread(mean_s=1.0, max_s=2.0, max_rank=3),
        "bubble": Spread(mean_s=0.5, max_s=0.75, max_rank=0),
        "work": Work(rank_s=8.0, model_flops=4e12, window_flops=6e12, peak_flops=1.6e13),
    }
    return Telemetry(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def test_literal_moments() -> None:
    """Predicted 1, 2, 3 and measured 2, 4, 5 have errors of 1/2, 1/2 and 2/5."""
    m = moments([(1.0, 2.0), (2.0, 4.0), (3.0, 5.0)])
    assert m.ratio == pytest.approx(11 / 6)
    assert m.mape == pytest.approx((0.5 + 0.5 + 0.4) / 3)
    assert m.correlation == pytest.approx(9 / 84**0.5)


@given(PAIRS)
def test_moments_are_those_of_numpy(pairs: list[tuple[float, float]]) -> None:
    predicted, measured = np.array(pairs).T
    m = moments(pairs)
    assert m.mape == pytest.approx(np.mean(np.abs(measured - predicted) / measured), rel=1e-9)
    spread = min(predicted.std() / predicted.mean(), measured.std() / measured.mean())
    if spread > 1e-3:
        expected = np.corrcoef(predicted, measured)[0, 1]
        assert m.correlation == pytest.approx(expected, abs=1e-6)


def test_what_the_sums_do_not_tell_is_none() -> None:
    assert (Moments().ratio, Moments().mape, Moments().correlation) == (None, None, None)
    assert Moments.of(1.0, 2.0).correlation is None
    assert moments([(0.1, 2.0), (0.1, 3.0), (0.1, 4.0)]).correlation is None
    assert moments([(0.0, 2.0)]).ratio is None


def test_records_survive_json_inside_metrics() -> None:
    metrics = MeasuredStep(step=1, num_documents=1, num_tokens=2, num_targets=1, telemetry=record())
    data = json.loads(json.dumps(metrics.to_json()))
    assert MeasuredStep.from_json(data) == metrics
    shown = data["telemetry"]
    assert (shown["imbalance"], shown["predicted_imbalance"], shown["whole_imbalance"]) == (
        1.5,
        1.2,
        1.1,
    )
    assert shown["terms"]["linear_forward"]["ratio"] == pytest.approx(7 / 3)
    work = {n: shown["work"][n] for n in ("tflops", "mfu", "window_tflops", "window_mfu")}
    assert work == {"tflops": 0.5, "mfu": 0.25, "window_tflops": 0.75, "window_mfu": 0.375}


def test_records_of_before_the_head_was_predicted_are_read() -> None:
    data = record(predicted_head_s=0.1).to_json()
    assert Telemetry.from_json(data).head_ratio == pytest.approx(2.0)
    del data["predicted_head_s"], data["predicted_embedding_s"]
    assert Telemetry.from_json(data) == record()
    assert record().head_ratio is None


def test_imbalance_of_no_time_is_one() -> None:
    assert record(slowest_ns=0, mean_ns=0.0).imbalance == 1.0


def test_records_of_before_work_was_counted_are_read() -> None:
    data = record().to_json()
    del data["work"]
    assert Telemetry.from_json(data) == record(work=None)
    assert Telemetry.from_json(record(work=None).to_json()) == record(work=None)


def test_works_add_up_and_have_no_mfu_where_a_part_has_no_peak() -> None:
    known = Work(rank_s=2.0, model_flops=3e12, window_flops=6e12, peak_flops=1e13)
    other = Work(rank_s=4.0, model_flops=9e12, window_flops=9e12, peak_flops=3e13)
    total = Work() + known + other
    assert (total.tflops, total.window_tflops) == (2.0, 2.5)
    assert (total.mfu, total.window_mfu) == (0.3, 0.375)
    unknown = known + Work(rank_s=4.0, model_flops=9e12, window_flops=9e12)
    assert (unknown.tflops, unknown.mfu, unknown.window_mfu) == (2.0, None, None)
    assert (Work().tflops, Work().window_tflops, Work().mfu) == (0.0, 0.0, None)
