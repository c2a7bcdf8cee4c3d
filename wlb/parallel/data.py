"""Data parallelism: FSDP2 over the dp and cp axes together; gradients are summed, not averaged.

The loss is already divided by the step's valid tokens over all ranks, so gradients only add up.
Parameters stay gathered from forward to backward and gradients are reduced once a step, after the
last micro-batch: with a pipeline, gathering for every micro-batch would cost more than it saves.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from wlb.model import Llama
from wlb.parallel.mesh import Mesh
from wlb.parallel.tensor import placement


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


def shard_start(num_rows: int, mesh: Mesh) -> int:
    """First of this rank's rows of a parameter that has `num_rows` of them (FSDP2 cuts axis 0)."""
    return min(num_rows, mesh.fsdp_rank * -(-num_rows // mesh.fsdp_size))


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


def gradient_square(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> Tensor:
    """This rank's share of the squared gradient norm, float64 scalar; the sum over ALL ranks is it.

    Every element is counted once: shards are disjoint over all four axes, and what is replicated
    over the tp axis counts on its first rank only. One sum over the world instead of DTensor's one
    a mesh axis, so that it can ride on another all-reduce.
    """
    counted = [
        local_tensor(p.grad)
        for name, p in parameters.items()
        if p.grad is not None and not (mesh.tp_rank and placement(name).is_replicate())
    ]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    return torch.stack([grad.norm() for grad in counted]).double().square().sum()


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Scale gradients of global norm `norm` down to `max_norm` (0 = never)."""
    if max_norm and norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(max_norm / (norm + 1e-6))


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
