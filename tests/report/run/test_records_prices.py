"""Tests learned prices in a run's records and on its page."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.report.run.lines import SPEC, start, step, whole_run, write
from tests.report.run.test_page import text_of
from wlb.plan import AS_PROFILED, PriceChange, PriceFactors
from wlb.plan.prices import UNIT
from wlb.report import read_run, run_page
from wlb.report.run.plots import price_figure

HALF = PriceFactors(attention_forward=3 * UNIT // 2, attention_backward=3 * UNIT // 2)
WHOLE = PriceFactors(
    attention_forward=4 * UNIT, attention_backward=3 * UNIT, linear_forward=2 * UNIT
)


def decision(done: int, factor: float, change: PriceChange | None) -> dict[str, Any]:
    measured = {
        "attention_forward": factor,
        "attention_backward": factor - 0.4,
        "linear_forward": 1.0,
        "linear_backward": 0.9,
    }
    return {
        "kind": "prices",
        "step": done - 1,
        "steps_done": done,
        "base": "h100 sdpa",
        "votes": 16,
        "measured": measured,
        "change": change and change.to_json(),
    }


def priced(done: int, prices: PriceFactors) -> dict[str, Any]:
    return step(done) | {"prices": prices.to_json()}


def learned_run() -> list[dict[str, Any]]:
    """Returns 20 steps; what was decided after step 12 went with the steps that were left."""
    first, left = PriceChange(step=9, prices=HALF), PriceChange(step=16, prices=AS_PROFILED)
    second = PriceChange(step=15, prices=WHOLE)
    lines = [start(), *map(step, range(1, 10)), decision(4, 2.0, first)]
    lines += [priced(done, HALF) for done in range(10, 14)]
    lines += [decision(12, 1.0, left), start(11)]
    lines += [priced(done, HALF) for done in range(12, 16)] + [decision(13, 1.98, second)]
    lines += [priced(done, WHOLE) for done in range(16, 21)]
    return [*lines, {**decision(19, 2.02, None), "votes": 0, "measured": None}]


def test_prices_are_read_back_as_the_steps_held_them(tmp_path: Path) -> None:
    records = read_run(write(tmp_path, learned_run()))
    assert records.prices.base == "h100 sdpa"
    assert [c.step for c in records.prices.changes] == [9, 15]
    for record in records.steps:
        assert record.prices == records.prices.at(record.step)


def test_the_page_shows_prices_and_what_was_measured(tmp_path: Path) -> None:
    records = read_run(write(tmp_path, learned_run()))
    page = run_page(records)
    assert "Prices that the run learned while it trained (cost.online)" in text_of(page)
    (axes,) = price_figure(records).axes
    drawn = {line.get_label(): line for line in axes.lines}
    forward = np.array(drawn["attention forward"].get_ydata())
    assert forward.tolist() == [1.0] * 9 + [1.5] * 6 + [2.0] * 5
    assert set(drawn["linear backward"].get_ydata()) == {1.0, 0.5}
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in points] == [[4, 13]] * 3
    assert list(points[0].get_ydata()) == [2.0, 1.98]


def test_a_run_of_fixed_prices_has_no_such_figure(tmp_path: Path) -> None:
    records = read_run(write(tmp_path, whole_run()))
    assert records.prices.changes == ()
    assert not SPEC.cost.online
    assert "Prices that the run learned" not in text_of(run_page(records))
