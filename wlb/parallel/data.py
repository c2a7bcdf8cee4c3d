"""Data parallelism: FSDP2 over the dp and cp axes together; gradients are summed, not averaged.

The loss is already divided by the step's valid tokens over all ranks, so gradients only add up.
Parameters stay gathered from forward to backward and gradients are reduced once a step, after the
last micro-batch: with a pipeline, gathering for every micro-batch would cost more than it saves.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from wlb.model import Llama
from wlb.parallel.mesh import Mesh


def shard_stage(stage: Llama, mesh: Mesh, dtype: torch.dtype) -> None:
    """Apply FSDP2 to each layer and the stage, in place; nothing where it would do nothing."""
    if not needs_fsdp(mesh, dtype):
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    for module in [*stage.model.layers.values(), stage]:
        fully_shard(module, mesh=mesh.fsdp, reshard_after_forward=False, mp_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # A divide factor alone asks Gloo for PREMUL_SUM, which it lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def needs_fsdp(mesh: Mesh, dtype: torch.dtype) -> bool:
    return mesh.fsdp_size > 1 or dtype != torch.float32


def set_gradient_sync(stage: nn.Module, *, is_last: bool) -> None:
    """Reduce gradients in the next backward only if it is the step's last (no pipeline)."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(is_last)
        stage.set_is_last_backward(is_last)
        stage.set_reshard_after_backward(is_last)


def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients that are still partial over the tp axis (norm weights where FSDP is absent)."""
    for parameter in parameters:
        grad = parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(grad, DTensor)):
            continue
        if grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def clip_gradients(parameters: list[nn.Parameter], mesh: Mesh, max_norm: float) -> float:
    """Scale gradients to a global norm of at most `max_norm` (0 = measure only); returns the norm.

    One norm over all axes: shards by DTensor, pipeline stages by an all-reduce of squares.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm: Tensor = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    square = norm.detach().to(mesh.device).double() ** 2
    if mesh.pp_size > 1:
        dist.all_reduce(square, group=mesh.pp_group)
    total = square.sqrt()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.float())
    return float(total)
