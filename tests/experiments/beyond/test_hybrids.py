"""Tests the rows of the page on context parallelism in models with linear layers."""

import numpy as np
import pytest

from experiments.beyond.hybrids.__main__ import contiguous, hybrids_table, packed_windows
from wlb.plan import summaries_made

pytestmark = pytest.mark.full


def test_windows_are_full_and_documents_end_with_them() -> None:
    windows = packed_windows(32_768, 5)
    assert [int(pieces.sum()) for pieces in windows] == [32_768] * 5
    assert all((pieces > 0).all() for pieces in windows)


def test_a_stretch_for_each_rank_cuts_one_document_at_most() -> None:
    plan = contiguous(np.array([500, 300, 900, 300]), 4)
    assert plan.validate() is plan
    assert summaries_made(plan).max() <= 1


def test_ours_is_no_slower_than_one_layout_of_others() -> None:
    """In the times that the plan minimises; two layouts may be as fast."""
    table = hybrids_table((131_072,), 3)
    column = {name: i for i, name in enumerate(table.columns)}
    for row in table.rows:
        if row[column["sharding"]] in ("contiguous", "zigzag", "per document", "attention only"):
            assert row[column["NVLink"]] > 1
            assert row[column["between nodes"]] > 1
        if row[column["sharding"]] == "ours":
            assert row[column["NVLink"]] == row[column["between nodes"]] == 1
            assert row[column["area"]] < 1.06
            assert row[column["made"]] < 6
