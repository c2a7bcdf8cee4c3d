"""Tests parity over NCCL, bf16 and the varlen kernel on GPUs; visibly skipped without one.

Where there are fewer GPUs than ranks, all ranks share one (`tests.gpu.one_gpu`).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm

from tests.gpu.one_gpu import run_on_one_gpu
from tests.parity.body import expected_of, parity
from tests.parity.case import Case
from tests.parity.test_bf16 import bf16
from wlb.kernels.grouped import weight_gradients
from wlb.launch.local import run_local
from wlb.plan import KeyExchange
from wlb.spec import AttentionBackend, ExpertsSpec, Recompute, Schedule
from wlb.spec.checks import MOST_EXPERTS_OF_RANK

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU: none here"),
]

IZB = Schedule.INTERLEAVED_ZERO_BUBBLE
NEEDED = KeyExchange.NEEDED
TWO_KV, ONE_KV = (("num_kv_heads", 2),), (("num_kv_heads", 1),)
EXPERTS = ExpertsSpec(num=8, per_token=2, hidden_size=16)

CASES = [
    Case(),
    Case(tp=2),
    Case(cp=2),
    Case(pp=2, v=2),
    Case(pp=2, v=2, schedule=IZB),
    Case(dp=2),
    Case(cp=4, exchange=NEEDED),
    Case(pp=4, schedule=Schedule.ONE_F_ONE_B, num_micro_batches=8),
    Case(dp=4, shard_size=2, num_micro_batches=8),
    Case(dp=2, pp=2, v=2, reshard=True, num_micro_batches=8),
    Case(cp=2, recompute=Recompute.FULL),
    Case(tp=2, cp=2, pp=2, v=2),
    Case(tp=2, cp=2, pp=2, v=2, schedule=IZB, exchange=NEEDED),
    Case(cp=2, dp=2, experts=EXPERTS, ep=2, ep_stages=2, num_micro_batches=8),
    # Copies of KV heads.
    Case(tp=4, keys=TWO_KV),
    Case(tp=2, dp=2, keys=ONE_KV, num_micro_batches=8),
    Case(tp=4, cp=2, exchange=NEEDED, keys=ONE_KV),
]
BF16 = [
    Case(head_dim=16),
    Case(head_dim=16, cp=2),
    Case(head_dim=16, cp=4, exchange=NEEDED, own_first=True),
    Case(head_dim=16, cp=4, exchange=NEEDED, own_first=True, stages=2),
    Case(head_dim=16, cp=2, own_first=True),
    Case(head_dim=16, tp=2, cp=2, pp=2, v=2),
    Case(head_dim=16, tp=2, pp=2, dp=2, v=2, schedule=IZB, num_micro_batches=8),
    Case(head_dim=16, tp=4, cp=2, keys=TWO_KV),
    Case(head_dim=16, tp=4, pp=2, v=2, schedule=IZB, keys=ONE_KV),
]


def run_ranks(fn: Callable[..., Any], case: Case, *args: Any) -> list[Any]:
    """Runs a function on the ranks of a case: on a GPU each, or all on one."""
    if case.world > NUM_GPUS:
        return run_on_one_gpu(fn, case.world, case, *args)
    options: dict[str, Any] = {"device": "cuda", "start_group": True, "timeout_s": 600}
    return run_local(fn, case.world, case, *args, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_equals_one_process_over_nccl(case: Case) -> None:
    expected = expected_of(case)
    for result in run_ranks(parity, case, expected, "cuda"):
        assert result["sgd"]["losses"] == pytest.approx(expected.losses["sgd"], rel=1e-5)
        error, name = result["gradient"]
        assert error <= 1e-4, name
        assert result["sgd"]["parameters"] <= 1e-4


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_on_the_varlen_kernel_is_near_fp32(case: Case) -> None:
    for result in run_ranks(bf16, case, "cuda"):
        assert result["backend"] == AttentionBackend.TORCH_VARLEN
        assert result["loss"] == pytest.approx(result["expected"], rel=2e-2)
        assert result["cosine"] > 0.99


@pytest.mark.parametrize("rows", [[5, 0, 3, 0], [0, 0, 0, 8], [0] * 4, [1] * MOST_EXPERTS_OF_RANK])
def test_products_of_experts_without_rows(rows: list[int]) -> None:
    """An expert without rows has no output, and gradients of zero for its weights."""
    ends = torch.tensor(rows, device="cuda").cumsum(0, dtype=torch.int32)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x, grad = (torch.randn(sum(rows), size, **options) for size in (64, 32))
    weights = torch.randn(len(rows), 32, 64, **options)
    made = grouped_mm(x, weights.transpose(-2, -1), offs=ends)
    (of_weights,) = weight_gradients([grad], x, ends)
    assert made.shape == (sum(rows), 32)
    for expert, (part, its_x, its_grad) in enumerate(
        zip(made.split(rows), x.split(rows), grad.split(rows), strict=True)
    ):
        expected = its_x.float() @ weights[expert].float().t()
        torch.testing.assert_close(part.float(), expected, rtol=2e-2, atol=1e-1)
        expected = its_grad.float().t() @ its_x.float()
        torch.testing.assert_close(of_weights[expert].float(), expected, rtol=2e-2, atol=1e-1)
