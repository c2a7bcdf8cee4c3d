"""Tests what a comparison of policies says about GPU hours."""

from dataclasses import replace

import pytest

from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, lengths_of_family
from wlb.packing.study.compare import compare
from wlb.packing.study.measure import PackingSummary
from wlb.packing.study.saving import saving_of
from wlb.spec import RunSpec


@pytest.fixture(scope="module")
def row() -> PackingSummary:
    """Returns a row of a real comparison, whose figures the tests replace."""
    window = 2048
    spec = replace(RunSpec(), data=replace(RunSpec().data, context_window=window, num_windows=4))
    source = lengths_of_family("wlb_paper", window=window, num_documents=900, seed=1)
    stream = GlobalBatches(source, tokens_per_batch=4 * window, seed=1)
    batches = [b for b, _ in zip((b for b, _ in stream.iterate()), range(2), strict=False)]
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=1000)
    return next(iter(compare(spec, batches, cost))).summary


def test_the_share_is_that_of_the_column(row: PackingSummary) -> None:
    def of(label: str, time: float, *, delay: float = 0.0, steps: int = 5) -> PackingSummary:
        figures = {"step_time_weighted": time, "mean_delay": delay, "num_steps": steps}
        return replace(row, label=label, **figures)

    rows = [of("original", 1.4), of("original, long whole", 1.5), of("var_len (run)", 1.2)]
    found = saving_of(rows)
    assert found is not None
    assert (found.best.label, found.usual.label) == ("var_len (run)", "original")
    assert found.gain.saved == pytest.approx(1 / 7)
    late, never = of("bounded", 1.05, delay=1.5), of("holds all", 1.0, steps=0)
    assert saving_of([*rows, late, never]) == found
    later = saving_of([*rows, late, never], mean_delay=2)
    assert later is not None
    assert later.gain.saved == pytest.approx(1 / 4)
    own = saving_of([of("original, long whole (run)", 1.5), of("capacity", 1.6)])
    assert own is not None
    assert own.best is own.usual
    assert own.to_json()["share"] == 0
    assert saving_of(rows[2:]) is None
