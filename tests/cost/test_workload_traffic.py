"""Tests prices of trainers whose operators are not fused, or that recompute other parts."""

from dataclasses import replace

import pytest

from tests.simulate.runs import MODEL
from wlb.cost import PLAIN_TORCH, ProfiledWorkload, RecomputedWork, load_profile
from wlb.spec import ParallelSpec, Recompute

COST = ProfiledWorkload(
    model=MODEL, parallel=ParallelSpec(dp=1), profile=load_profile("h100"), micro_batch_tokens=4096
)
"""8 layers of hidden 512, 8 heads and 4 key heads of 64, an MLP of 1,408; 3 TB/s."""


def test_unfused_operators_by_hand() -> None:
    """Forward: two norms of 18 values, two additions of 3, rotations of 10 and SwiGLU of 5."""
    plain = replace(COST, traffic=PLAIN_TORCH)
    rotated = 512 + 256
    forward = 2 * 18 * 512 + 2 * 3 * 512 + 10 * rotated + 5 * 1408
    backward = 2 * 34 * 512 + 2 * 3 * 512 + 10 * rotated + 9 * 1408
    for name, values in (("forward", forward), ("backward", backward)):
        found = plain.ns_per_token[f"elementwise_{name}"]
        assert found == pytest.approx(values * 2 * 8 / 3e12 * 1e9)
    fused = 2 * 2 * 512 + 2 * 3 * 512 + 2 * rotated + 3 * 1408
    assert COST.ns_per_token["elementwise_forward"] == pytest.approx(fused * 2 * 8 / 3e12 * 1e9)


def test_other_parts_that_run_again() -> None:
    """K (512 x 256) and O (512 x 512) once more in backward, at 600 TFLOP/s in 8 layers."""
    again = RecomputedWork(matrices=(1, 3), calls={}, tp=(0, 0), attention=False)
    # What wlb itself would recompute does not count.
    found = replace(COST, recompute=Recompute.FULL, recomputed=again)
    more = found.ns_per_token["gemm_backward"] - COST.ns_per_token["gemm_backward"]
    assert more == pytest.approx(2 * (512 * 256 + 512 * 512) / 600e12 * 1e9 * 8)
    assert found.ns_per_token["elementwise_backward"] == COST.ns_per_token["elementwise_backward"]
