"""Tests the probe of leaks between packed documents: it sees a ring's, and none of ours."""

import pytest

pytest.importorskip("transformers", reason="needs the extra [hf]")

from experiments.hosts.transformers_cp import RANKS, documents, measured
from wlb.launch.local import run_local

pytestmark = [pytest.mark.nightly, pytest.mark.dist]


def test_a_causal_row_leaks_and_our_plans_do_not() -> None:
    lengths = [len(row) for row in documents(512)]
    assert sum(lengths) == 512
    assert max(lengths) == 256
    preload = ("experiments.hosts.transformers_cp",)
    found = run_local(measured, RANKS, 512, 1, start_group=True, timeout_s=600, preload=preload)
    for results in found:
        ours, ring, unpacked, masked = results
        assert all(rate > 0 for _, rate, _ in results)
        assert ours[2] == 0.0
        assert ring[2] is not None
        assert ring[2] > 0.5
        assert unpacked[2] is masked[2] is None
