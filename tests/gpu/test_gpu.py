"""Tests parity over NCCL, bf16 and the varlen kernel on GPUs; visibly skipped without one."""

import pytest
import torch

from tests.parity.body import expected_of, parity
from tests.parity.case import Case
from tests.parity.test_bf16 import bf16
from wlb.launch.local import run_local
from wlb.spec import AttentionBackend, Schedule

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU: none here"),
]

CASES = [
    Case(),
    Case(tp=2),
    Case(cp=2),
    Case(pp=2, v=2),
    Case(pp=2, v=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
    Case(dp=2),
    Case(tp=2, cp=2, pp=2, v=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_equals_one_process_over_nccl(case: Case) -> None:
    if case.world > NUM_GPUS:
        pytest.skip(f"needs {case.world} GPUs: {NUM_GPUS} here")
    expected = expected_of(case)
    results = run_local(
        parity, case.world, case, expected, "cuda", device="cuda", start_group=True, timeout_s=600
    )
    for result in results:
        assert result["sgd"]["losses"] == pytest.approx(expected.losses["sgd"], rel=1e-5)
        error, name = result["gradient"]
        assert error <= 1e-4, name
        assert result["sgd"]["parameters"] <= 1e-4


def test_bf16_on_the_varlen_kernel_is_near_fp32() -> None:
    (result,) = run_local(
        bf16, 1, Case(head_dim=16), "cuda", device="cuda", start_group=True, timeout_s=600
    )
    assert result["backend"] == AttentionBackend.TORCH_VARLEN
    assert result["loss"] == pytest.approx(result["expected"], rel=2e-2)
    assert result["cosine"] > 0.99
