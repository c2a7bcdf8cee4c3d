"""Runs on every rank of a parity test: the same steps as one process, and the differences."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parity.case import (
    Case,
    Reader,
    fresh_reference,
    packing,
    pipeline_plan,
    reference_loss,
    spec_of,
)
from wlb.model import Llama
from wlb.model.llama import EMBEDDING
from wlb.parallel.data import gradient_square
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import Mesh, build_mesh
from wlb.parallel.world import World, rank_device
from wlb.spec import RunSpec


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def global_loss(executor: Executor, local: Tensor) -> float:
    """Sums a loss over the ranks that hold different rows (tp ranks hold copies)."""
    mesh = executor.mesh
    loss = local.clone() if mesh.at.tp == 0 else torch.zeros_like(local)
    dist.all_reduce(loss)
    return loss.item()


def run_step(executor: Executor, case: Case, *, shift: int) -> tuple[float, float]:
    """Returns (loss of the layout, loss of an evaluation before it) of one literal step."""
    spec, mesh = executor.spec, executor.mesh
    plan = packing(case.num_micro_batches, shift=shift)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    held = global_loss(executor, executor.evaluate(mine, Reader())) / plan.num_targets
    if executor.pipeline is not None:  # nothing of an evaluation is kept until the next step
        assert not any(stage.fwd_cache for stage in executor.pipeline.stages)
    loss = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    return global_loss(executor, loss), held


def gradient_error(executor: Executor, reference: Llama) -> tuple[float, str]:
    """Returns the worst max|diff| / max|ref| over this rank's parameters, and which it is."""
    worst = (0.0, "")
    wanted = dict(reference.named_parameters())
    for name, parameter in executor.named_parameters().items():
        assert parameter.grad is not None, name
        # A tied head that is a copy has the embedding's gradient.
        expected = wanted.get(name, wanted[EMBEDDING]).grad
        assert expected is not None
        got = whole(parameter.grad)
        error = (got - expected).abs().max() / expected.abs().max()
        worst = max(worst, (error.item(), name))
    return worst


def gradient_norm(reference: Llama) -> float:
    grads = [p.grad for p in reference.parameters() if p.grad is not None]
    return torch.stack([grad.norm() for grad in grads]).double().norm().item()


def optimise(
    executor: Executor, reference: Llama, case: Case, kind: str
) -> tuple[list[float], list[float], float]:
    """Takes two optimiser steps of the layout and of one process.

    Returns the losses of both and the error of the parameters.
    """
    spec: RunSpec = executor.spec
    made: type = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    # AdamW's first steps are signs of gradients. With the default eps of 1e-8 the sign of one that
    # is nothing but rounding counts in full: the third loss differs by 1.1e-4 on some CPUs.
    options = {"lr": 0.05} if kind == "sgd" else {"lr": 0.01, "eps": 1e-6}
    optimisers = [made(s.parameters(), **options) for s in executor.stages.values()]
    other = made(reference.parameters(), **options)
    ours: list[float] = []
    theirs: list[float] = []
    for step in range(3):
        for optimiser in [*optimisers, other]:
            optimiser.zero_grad()
        plan = packing(case.num_micro_batches, shift=step)
        ours.append(run_step(executor, case, shift=step)[0])
        theirs.append(reference_loss(reference, spec, plan, backward=True))
        if step < 2:
            for optimiser in [*optimisers, other]:
                optimiser.step()
    wanted = dict(reference.named_parameters())
    error = max(
        ((whole(p) - w).abs().max() / w.abs().max()).item()
        for p, w in (
            (p, wanted.get(n, wanted[EMBEDDING])) for n, p in executor.named_parameters().items()
        )
    )
    return ours, theirs, error


def reset(executor: Executor, reference: Llama, initial: dict[str, Tensor]) -> None:
    """Sets both models back to their initial weights."""
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(initial[f"ref.{name}"])
        for name, parameter in executor.named_parameters().items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(initial[f"own.{name}"])


def snapshot(executor: Executor, reference: Llama) -> dict[str, Tensor]:
    out = {f"ref.{n}": p.detach().clone() for n, p in reference.named_parameters()}
    for name, parameter in executor.named_parameters().items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        out[f"own.{name}"] = local.detach().clone()
    return out


def parity(world: World, case: Case, device: str = "cpu") -> dict[str, object]:
    """Returns losses, gradient errors and the end of two optimiser steps, as seen from this
    rank."""
    spec = spec_of(case)
    where = rank_device(world, device)
    mesh: Mesh = build_mesh(
        spec.parallel,
        where,
        shard_size=case.shard_size,
        passes_on=spec.passes_rows_on,
        experts=bool(spec.model.experts.num),
    )
    executor = Executor(spec, mesh)
    reference = fresh_reference(spec)
    initial = snapshot(executor, reference)
    plan = packing(case.num_micro_batches)
    expected = reference_loss(reference, spec, plan, backward=True)
    loss, held = run_step(executor, case, shift=0)
    square = gradient_square(executor.counted_parameters(), mesh)
    dist.all_reduce(square)
    out: dict[str, object] = {
        "norm": square.sqrt().item(),
        "expected_norm": gradient_norm(reference),
        "loss": loss,
        "held_out": held,
        "expected": expected,
        "gradient": gradient_error(executor, reference),
    }
    for kind in ("sgd", "adamw"):
        reset(executor, reference, initial)
        ours, theirs, error = optimise(executor, reference, case, kind)
        out[kind] = {"ours": ours, "theirs": theirs, "parameters": error}
    return out


def expect_parity(result: dict[str, Any]) -> None:
    """Expects that what `parity` found on a rank equals one process: losses, gradients, steps."""
    assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
    assert result["held_out"] == pytest.approx(result["expected"], rel=1e-6)
    error, name = result["gradient"]
    assert error <= 1e-5, name
    assert result["norm"] == pytest.approx(result["expected_norm"], rel=1e-5)
    assert result["sgd"]["ours"] == pytest.approx(result["sgd"]["theirs"], rel=1e-5)
    assert result["sgd"]["parameters"] <= 1e-5
    assert result["adamw"]["ours"] == pytest.approx(result["adamw"]["theirs"], rel=1e-4)
