"""Tests the comparison of collators: it times equal batches, and its ratios are ratios."""

import re

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra [hf]")
pytest.importorskip("trl.trainer.sft_trainer", reason="needs the extra [hf]")

from experiments.collation.__main__ import (
    HUGGING_FACE,
    OURS,
    SOURCES,
    calls_of,
    check,
    lengths_of,
    speeds,
    verdict,
)

pytestmark = pytest.mark.full


def test_lengths_are_those_of_the_papers_data_sets() -> None:
    for source, (mean, _) in SOURCES.items():
        lengths = lengths_of(source, 100_000, np.random.default_rng(0))
        assert lengths.mean() == pytest.approx(mean, rel=0.03)
        assert lengths.min() >= 1


def test_a_batch_that_is_not_transformers_is_not_timed() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([3, 1, 5])
    calls = calls_of(lengths, rng)
    check(calls)
    calls["lists", OURS] = calls_of(lengths, rng)["lists", OURS]  # other tokens
    with pytest.raises(RuntimeError, match=re.escape("input_ids of ('lists', 'ours')")):
        check(calls)


def test_ratios_are_to_transformers_on_the_same_input() -> None:
    rows = speeds("FLAN", 2, batches=1, turns=1, seed=0)
    rates = {(row.form, row.collator): row.rate for row in rows}
    assert len(rates) == len(rows) == 7
    for row in rows:
        same_input = "lists" if row.form == "buffer" else row.form
        assert row.ratio == pytest.approx(row.rate / rates[same_input, HUGGING_FACE])
    assert len(verdict(rows)) == 3
