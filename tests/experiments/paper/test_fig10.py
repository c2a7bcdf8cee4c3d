"""Tests the made-up kernels of Figure 10's page, and what choosing by a wrong profile costs."""

import numpy as np
import pytest

from experiments.paper.fig10 import sensitivity
from experiments.paper.fig10.sensitivity import changed, rows_of
from wlb.cost import load_profile

pytestmark = pytest.mark.full


def test_only_few_rows_change() -> None:
    table = load_profile("h100_runs").table(backend="flash_attention_3", head_dim=128, num_heads=4)
    q, kv = np.array([16.0, 128, 256, 4096]), np.full(4, 8192.0)
    shape = {"num_heads": 4, "head_dim": 128}
    before = np.array(table.times_ns(q, kv, **shape))
    after = np.array(changed(table, 1.25).times_ns(q, kv, **shape))
    np.testing.assert_allclose(after / before, [[0.8, 0.8, 1, 1]] * 2)


def test_a_wrong_profile_costs_only_where_choices_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "FACTORS", (0.5, 1.0))
    (_, _, _, *slow), (_, _, _, *same) = rows_of(65536, count=32)
    assert same == [0, 0.0, 0.0]
    num_differ, missed, imagined = slow
    assert num_differ > 0
    assert 0 < missed < 0.01
    assert 0 < imagined < 0.01
