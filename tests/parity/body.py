"""Code that every rank of a parity test runs: it compares steps of a layout with one process."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
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
from wlb.launch.local import run_local
from wlb.model import Llama
from wlb.model.llama import EMBEDDING
from wlb.parallel.data import gradient_square
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import Mesh, build_mesh
from wlb.parallel.world import World, rank_device
from wlb.spec import RunSpec

OPTIMISERS = ("sgd", "adamw")


def optimisers_of(case: Case) -> tuple[str, ...]:
    """Returns the optimisers with which a case is trained.

    AdamW doubles the time of a test, and its update of a shard does not depend on the layout. So it
    is tested only on two ranks, and in all four dimensions.
    """
    return OPTIMISERS if case.world in (2, 16) else OPTIMISERS[:1]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def global_loss(executor: Executor, local: Tensor) -> float:
    """Sums a loss over ranks with different rows; tensor-parallel ranks have copies."""
    mesh = executor.mesh
    loss = local.clone() if mesh.at.tp == 0 else torch.zeros_like(local)
    dist.all_reduce(loss)
    return loss.item()


def run_step(executor: Executor, case: Case, *, shift: int) -> tuple[float, float]:
    """Evaluates and trains a step of literal documents; returns (training loss, evaluation loss).

    The evaluation comes first, with the same weights.
    """
    spec, mesh = executor.spec, executor.mesh
    plan = packing(case.num_micro_batches, shift=shift)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    held = global_loss(executor, executor.evaluate(mine, Reader())) / plan.num_targets
    if executor.pipeline is not None:  # an evaluation must not leave activations behind
        assert not any(stage.fwd_cache for stage in executor.pipeline.stages)
    loss = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    return global_loss(executor, loss), held


def gradient_error(executor: Executor, reference: Llama) -> tuple[float, str]:
    """Returns the worst max|diff| / max|ref| of a gradient on this rank, and its parameter."""
    return _gradient_error(executor, gradients_of(reference))


def _gradient_error(executor: Executor, wanted: dict[str, Any]) -> tuple[float, str]:
    worst = (0.0, "")
    for name, parameter in executor.named_parameters().items():
        assert parameter.grad is not None, name
        # A tied output head that is a copy must have the embedding's gradient.
        expected = wanted.get(name, wanted[EMBEDDING])
        error = np.abs(whole(parameter.grad).numpy() - expected).max() / np.abs(expected).max()
        assert np.isfinite(error), name
        worst = max(worst, (float(error), name))
    return worst


def gradients_of(reference: Llama) -> dict[str, Any]:
    """Returns copies of the model's gradients as arrays, by parameter name."""
    grads = {name: p.grad for name, p in reference.named_parameters()}
    return {name: grad.numpy().copy() for name, grad in grads.items() if grad is not None}


def new_optimiser(kind: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    # AdamW's first update is close to the sign of the gradient. With the default eps of 1e-8, a
    # gradient that is only rounding error would move a weight as much as any other, and the third
    # loss would differ by 1.1e-4 on some CPUs.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)


@dataclass(frozen=True)
class Expected:
    """Results of one process for three steps with two updates."""

    norm: float  # gradient norm of the first step
    gradients: dict[str, Any]  # gradients of the first step, by parameter name
    losses: dict[str, list[float]]  # losses of the steps, by optimiser
    parameters: dict[str, dict[str, Any]]  # final parameters, by optimiser and name


def expected_of(case: Case) -> Expected:
    """Returns the results of one process for a case's model and micro-batches.

    They are cached, because many layouts share them.
    """
    spec = spec_of(case)
    data = replace(spec.data, row_multiple=1)
    spec = replace(RunSpec(), model=spec.model, data=data)
    return _expected(spec, case.num_micro_batches, optimisers_of(case))


@cache
def _expected(spec: RunSpec, num_micro_batches: int, optimisers: tuple[str, ...]) -> Expected:
    gradients: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    parameters: dict[str, dict[str, Any]] = {}
    for kind in optimisers:
        reference = fresh_reference(spec)
        optimiser = new_optimiser(kind, reference.parameters())
        losses[kind] = []
        for step in range(3):
            optimiser.zero_grad()
            plan = packing(num_micro_batches, shift=step)
            losses[kind].append(reference_loss(reference, spec, plan, backward=True))
            gradients = gradients or gradients_of(reference)
            if step < 2:
                optimiser.step()
        parameters[kind] = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())))
    return Expected(norm=norm, gradients=gradients, losses=losses, parameters=parameters)


def parameter_error(executor: Executor, wanted: dict[str, Any]) -> float:
    """Returns the worst max|diff| / max|ref| over this rank's parameters."""
    worst = 0.0
    for name, parameter in executor.named_parameters().items():
        expected = wanted.get(name, wanted[EMBEDDING])
        error = np.abs(whole(parameter.detach()).numpy() - expected).max()
        assert np.isfinite(error), name
        worst = max(worst, float(error / np.abs(expected).max()))
    return worst


def train(executor: Executor, case: Case, *, shift: int) -> float:
    """Trains a step of literal documents in the layout and returns its loss."""
    plan = packing(case.num_micro_batches, shift=shift)
    mine = pipeline_plan(plan, executor.spec, executor.mesh.at.dp, case.strategy)
    local = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    return global_loss(executor, local)


def reset(executor: Executor, initial: dict[str, Tensor]) -> None:
    """Sets the model back to its initial weights."""
    with torch.no_grad():
        for name, parameter in executor.named_parameters().items():
            own(parameter).copy_(initial[name])


def own(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def parity(world: World, case: Case, expected: Expected, device: str = "cpu") -> dict[str, object]:
    """Trains a case on this rank with each optimiser and compares it with one process.

    Returns:
        "norm", the gradient norm; "held_out", the loss of an evaluation; "gradient", the worst
        error of a gradient; and by optimiser the losses of three steps and the error of the final
        parameters.
    """
    spec = spec_of(case)
    where = rank_device(world, device)
    mesh: Mesh = build_mesh(spec.parallel, where, shard_size=case.shard_size, model=spec.model)
    executor = Executor(spec, mesh)
    initial = {n: own(p.detach()).clone() for n, p in executor.named_parameters().items()}
    first, held = run_step(executor, case, shift=0)
    square = gradient_square(executor.counted_parameters(), mesh)
    dist.all_reduce(square)
    out: dict[str, object] = {
        "norm": square.sqrt().item(),
        "held_out": held,
        "gradient": _gradient_error(executor, expected.gradients),
    }
    for kind in optimisers_of(case):
        if kind != OPTIMISERS[0]:
            reset(executor, initial)
            for parameter in executor.named_parameters().values():
                parameter.grad = None
            first = train(executor, case, shift=0)
        optimisers = [new_optimiser(kind, s.parameters()) for s in executor.stages.values()]
        losses = [first]
        for shift in (1, 2):
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
            losses.append(train(executor, case, shift=shift))
        error = parameter_error(executor, expected.parameters[kind])
        out[kind] = {"losses": losses, "parameters": error}
    return out


def expect_equal_to_one_process(case: Case, device: str = "cpu") -> None:
    """Runs `parity` on all ranks of a case and expects the results of one process."""
    expected = expected_of(case)
    results = run_local(parity, case.world, case, expected, device, start_group=True, timeout_s=600)
    for result in results:
        expect_parity(result, expected)


def expect_parity(result: dict[str, Any], expected: Expected) -> None:
    """Expects that the result of `parity` on a rank equals the results of one process."""
    first = expected.losses["sgd"][0]
    assert result["sgd"]["losses"][0] == pytest.approx(first, rel=1e-6)
    assert result["held_out"] == pytest.approx(first, rel=1e-6)
    error, name = result["gradient"]
    assert error <= 1e-5, name
    assert result["norm"] == pytest.approx(expected.norm, rel=1e-5)
    assert result["sgd"]["losses"] == pytest.approx(expected.losses["sgd"], rel=1e-5)
    assert result["sgd"]["parameters"] <= 1e-5
    if "adamw" in result:
        assert result["adamw"]["losses"] == pytest.approx(expected.losses["adamw"], rel=1e-4)
