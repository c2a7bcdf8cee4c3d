"""Tests mixed precision: bfloat16 compute, float32 master weights and reduction, near fp32."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.parity.body import global_loss, whole
from tests.parity.case import Case, Reader, packing, pipeline_plan, reference_loss, spec_of
from tests.sets import full, nightly
from wlb.launch.local import run_local
from wlb.model import build_reference, llama
from wlb.model.elementwise import rotate
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.plan import KeyExchange
from wlb.spec import Dtype, Recompute, Schedule

IZB = Schedule.INTERLEAVED_ZERO_BUBBLE


def bf16(world: World, case: Case, device: str) -> dict[str, object]:
    """Returns losses in bf16 and fp32, and how the gradients compare.

    They are the worst gradient angle, the least share of a matrix's gradients that bfloat16 could
    not hold, dtypes of what layers rotate and by what, and the backend.
    """
    spec = spec_of(case)
    spec = replace(spec, training=replace(spec.training, dtype=Dtype.BFLOAT16))
    mesh = build_mesh(spec.parallel, rank_device(world, device), model=spec.model)
    executor = Executor(spec, mesh)
    rotated: set[tuple[torch.dtype, ...]] = set()

    def noted(
        x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, fused: bool
    ) -> torch.Tensor:
        rotated.add((x_THD.dtype, cos.dtype, sin.dtype))
        return rotate(x_THD, cos, sin, fused=fused)

    llama.rotate = noted
    plan = packing(case.num_micro_batches)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    local = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    loss = global_loss(executor, local)
    llama.rotate = rotate
    reference = build_reference(spec.model, seed=spec.run.seed)
    expected = reference_loss(reference, spec, plan, backward=True)
    wanted = dict(reference.named_parameters())
    worst, wide = 1.0, list[float]()
    for name, parameter in executor.named_parameters().items():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        got, other = whole(parameter.grad).flatten(), wanted[name].grad
        assert other is not None
        worst = min(worst, torch.cosine_similarity(got, other.flatten(), dim=0).item())
        if "proj" in name:  # many rows of an embedding have one use, and nothing is added up
            wide.append((got.bfloat16().float() != got).float().mean().item())
    dist.barrier()
    return {
        "loss": loss,
        "expected": expected,
        "cosine": worst,
        "wide": min(wide),
        "rotated": rotated,
        "backend": str(executor.backend),
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        *full(
            Case(tp=2, cp=2, pp=2, v=2),
            Case(cp=4, exchange=KeyExchange.NEEDED, own_first=True),
            Case(tp=2, pp=2, dp=2, v=2, schedule=IZB, num_micro_batches=8),
            # The last rank's weight passes follow each other; no sum over ranks widens them.
            Case(pp=2, schedule=IZB, num_micro_batches=8, weight_delay=8),
        ),
        *nightly(
            Case(cp=2, recompute=Recompute.FULL),
            Case(tp=2, cp=2, exchange=KeyExchange.NEEDED),
            Case(dp=2),
        ),
    ],
    ids=str,
)
def test_bf16_is_near_fp32(case: Case) -> None:
    for result in run_local(bf16, case.world, case, "cpu", start_group=True, timeout_s=600):
        assert result["loss"] == pytest.approx(result["expected"], rel=2e-2)
        assert result["loss"] != result["expected"]
        assert result["rotated"] == {(torch.bfloat16, torch.float32, torch.float32)}
        assert result["cosine"] > 0.99
        # Summed over micro-batches and ranks in float32: in bfloat16 none would be left.
        assert result["wide"] > 0.2
