"""On GPUs: parity over NCCL, bf16, the varlen kernel. Skipped, visibly, without one."""

from dataclasses import replace

import pytest
import torch

from tests.parity.body import parity
from tests.parity.case import Case, Reader, packing, pipeline_plan, reference_loss, spec_of
from wlb.model import build_reference
from wlb.parallel.execute import Executor
from wlb.parallel.launch import run_local
from wlb.parallel.mesh import World, build_mesh, rank_device
from wlb.spec import AttentionBackend, Dtype, Schedule

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
    results = run_local(
        parity, case.world, case, "cuda", device="cuda", start_group=True, timeout_s=240.0
    )
    for result in results:
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-5)
        error, name = result["gradient"]
        assert error <= 1e-4, name
        assert result["sgd"]["parameters"] <= 1e-4


def bf16(world: World, case: Case) -> tuple[float, float, float, str]:
    """Loss in bf16 on the varlen kernel, in fp32 on CPU, worst gradient angle, backend."""
    spec = spec_of(case)
    spec = replace(spec, training=replace(spec.training, dtype=Dtype.BFLOAT16))
    executor = Executor(spec, build_mesh(spec.parallel, rank_device(world, "cuda")))
    plan = packing(case.num_micro_batches)
    mine = pipeline_plan(plan, spec, 0, case.strategy)
    loss = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    reference = build_reference(spec.model, seed=spec.run.seed)
    expected = reference_loss(reference, spec, plan, backward=True)
    wanted = dict(reference.named_parameters())
    worst = 1.0
    for name, parameter in executor.named_parameters().items():
        got = parameter.grad.full_tensor().float().cpu().flatten()
        other = wanted[name].grad.flatten()
        worst = min(worst, torch.cosine_similarity(got, other, dim=0).item())
    return loss.item(), expected, worst, str(executor.backend)


def test_bf16_on_the_varlen_kernel_is_near_fp32() -> None:
    ((loss, expected, cosine, backend),) = run_local(
        bf16, 1, Case(), device="cuda", start_group=True, timeout_s=240.0
    )
    assert backend == AttentionBackend.TORCH_VARLEN
    assert loss == pytest.approx(expected, rel=2e-2)
    assert cosine > 0.99
