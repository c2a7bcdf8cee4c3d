"""Tests the counts of `experiments.cp_traffic`, by hand and of the fitted stream."""

import csv

import numpy as np
import pytest

from experiments.cp_traffic.__main__ import CHOICES, NEAREST, RESULTS, SOURCES, table, traffic_of
from experiments.cp_traffic.step import EXCHANGES, WINDOW, plans_of, with_exchange
from wlb.sharding import per_document, per_sequence


def test_traffic_by_hand() -> None:
    """One document of 256 tokens on 2 ranks: the rank with head and tail reads all of the other's
    rows, which reads half of the first one's."""
    one = per_document([256], cp=2)
    found = traffic_of([one])
    assert (found.gathered, found.received, found.sent, found.mean) == (128, 128, 128, 96.0)
    assert found.least == 128
    # Two documents, one after the other, each of which both ranks share.
    both = traffic_of([one, per_sequence([128, 128], cp=2)])
    assert (both.gathered, both.received, both.sent, both.least) == (256, 192, 192, 192)


@pytest.mark.full
def test_the_fitted_stream_has_the_counts_of_the_page() -> None:
    """An exchange by need receives no more than the bound; the page's rows are computed again."""
    with (RESULTS / "traffic.csv").open() as file:
        page = [list(row.values()) for row in csv.DictReader(file)]
    found = table(SOURCES[:1], count=48, seed=0, degrees=(4,))
    assert len(found.rows) == 2 * len(CHOICES)
    for row in found.rows:
        (same,) = [r for r in page if r[:5] == [str(x) for x in row[:5]]]
        assert [float(x) for x in same[5:]] == pytest.approx(row[5:], rel=1e-5)
        assert 1 <= row[8] <= NEAREST


def test_steps_are_measured_on_whole_micro_batches_of_the_stream() -> None:
    """Both exchanges train the same documents, whose tokens are read as often as asked."""
    plans, reader = plans_of(2, 3)
    assert [len(plan.micro_batches) for plan in plans] == [1, 1, 1]
    for plan in plans:
        (gather,), (needed,) = (with_exchange(plan, e).shardings for e in EXCHANGES)
        assert (gather.exchange, needed.exchange) == EXCHANGES
        assert WINDOW // 2 < gather.num_tokens <= WINDOW * 3 // 2
        assert np.array_equal(gather.start, needed.start)
        piece = plan.micro_batches[0].pieces[0]
        tokens = reader.read(piece.document, piece.start, piece.stop)
        assert tokens.size == piece.stop - piece.start
        assert np.array_equal(tokens, reader.read(piece.document, piece.start, piece.stop))


@pytest.mark.parametrize(
    ("tp", "cp", "most"), [(1, 4, 1.03), (1, 8, 1.03), (1, 16, 1.06), (8, 4, 1.03)]
)
def test_attention_and_waits_are_near_ideal_attention(tp: int, cp: int, most: float) -> None:
    """Predicted, committed; per document with all-gathers is never as near."""
    with (RESULTS / "times.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if (int(r["TP"]), int(r["CP"])) == (tp, cp)]
    times = {(r["strategy"], r["exchange"], r["stages"]): float(r["with waits"]) for r in rows}
    best = min(times["balanced", "auto", str(stages)] for stages in (1, 2, 3, 4))
    assert best <= most < times["per_document", "gather", "0"]
