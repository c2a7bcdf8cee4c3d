"""Tests the fit of published calls on a synthetic table whose truth is known."""

import numpy as np
import pytest

from kernels_profile.fit_published import errors, fit, gather_alpha_beta, read_rows
from wlb.cost import tile_pairs

LAUNCH_NS = 30_000


def write_table(path):
    """Writes calls of a device with 30 us of launch and TFLOP/s = 400 * kv / (kv + 200)."""
    lines = ["total_tokens,doc_length,num_docs,tp,cp,latency_ms"]
    for length in 2 ** np.arange(5, 17):
        for tp in (1, 8):
            for cp in (1, 2, 8):
                q, kv = length / cp, length * (0.5 + 0.5 / cp)
                pairs = tile_pairs(np.array([q]), np.array([kv]), tile_rows=128)[0]
                num_docs = 131072 // length
                flops = 4 * 128 * (64 // tp) * num_docs * pairs
                ms = LAUNCH_NS * 1e-6 + flops / (400 * kv / (kv + 200)) * 1e-9
                lines.append(f"131072,{length},{num_docs},{tp},{cp},{ms}")
    path.write_text("\n".join(lines) + "\n", "utf-8")


@pytest.mark.full
def test_fit_recovers_a_known_device(tmp_path):
    write_table(tmp_path / "table.csv")
    rows = read_rows(tmp_path / "table.csv")
    assert len(rows) == 72
    fitted = fit(rows)
    assert errors(rows, fitted)["mape"] < 0.02
    assert fitted.launch_ns == pytest.approx(LAUNCH_NS, rel=0.15)
    assert fitted.heads_efficiency[[0, -1]] == pytest.approx([1, 1], abs=0.03)


def test_gather_points_give_a_plausible_line():
    alpha_ns, bytes_per_s = gather_alpha_beta()
    assert 40e3 < alpha_ns < 70e3
    assert 350e9 < bytes_per_s < 400e9
