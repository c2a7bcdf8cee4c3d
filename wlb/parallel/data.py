"""Data parallelism: FSDP2 over the dp and cp axes together; gradients are summed, not averaged.

The loss is already divided by the step's valid tokens over all ranks, so gradients only add up.
Gradients are reduced once a step, after the last micro-batch. Parameters stay gathered until then
(with a pipeline, gathering for every micro-batch would cost more than it saves) unless
`fsdp.reshard_after_forward` asks for memory.

With HSDP (`fsdp.shard_size`) a gradient is reduced and scattered within a group and then summed
with the other groups' copies of the shard.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from wlb.model import Llama
from wlb.parallel.mesh import Mesh
from wlb.parallel.tensor import placement
from wlb.spec import FsdpSection


def shard_stage(stage: Llama, mesh: Mesh, dtype: torch.dtype, fsdp: FsdpSection) -> None:
    """Apply FSDP2 to each layer and the stage, in place; nothing where it would do nothing."""
    if not needs_fsdp(mesh, dtype):
        return
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Inputs are of the right dtypes: a cast would round the rotary tables in Rows, which are
        # float32 as angles of thousands of radians need, and walk through Rows at every layer.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    options: dict[str, Any] = {"mesh": mesh.sharding, "mp_policy": policy}
    layers = [
        fully_shard(layer, reshard_after_forward=fsdp.reshard_after_forward, **options)
        for layer in stage.model.layers.values()
    ]
    # Embedding and head stay gathered: backward needs the head as soon as forward is done with it.
    whole = fully_shard(stage, reshard_after_forward=False, **options)
    for module in [*layers, whole]:
        # A divide factor alone asks Gloo for PREMUL_SUM, which it lacks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _gather_ahead([whole, *layers], fsdp.prefetch)
    if fsdp.reshard_after_forward:
        _drop_after_each_pass(whole, layers)


def needs_fsdp(mesh: Mesh, dtype: torch.dtype) -> bool:
    return mesh.fsdp_size > 1 or dtype != torch.float32


def _gather_ahead(modules: list[FSDPModule], ahead: int) -> None:
    """Have each of `modules`, in the order of forward, gather the `ahead` next ones when it begins,
    in backward the ones before; the stage itself begins both passes.

    torch's own order posts the next gather when the next module begins, after the host has launched
    this one's kernels: too late where the host is behind, as at a step's first micro-batch, the
    only one that gathers unless layers are dropped after each pass. In backward torch takes what
    ran before in forward, with several micro-batches under way not always the layer that is next.
    """
    if not ahead:
        return
    stage, layers = modules[0], modules[1:]
    for i, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + ahead])
    for i, layer in enumerate(layers):
        layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])
    stage.set_modules_to_backward_prefetch(layers[-ahead:][::-1])


class _NothingToWaitFor:
    def wait(self) -> None:
        pass


def _drop_after_each_pass(stage: FSDPModule, layers: list[FSDPModule]) -> None:
    """Hold layers gathered only while they are at work, in pipelines too.

    torch's pipeline runtime would keep them: it has whole stages gathered before their passes and
    asks that no backward pass but a step's last drops parameters. Layers are left out of both.
    """
    of_stage = partial(stage.set_reshard_after_backward, recurse=False)
    setattr(stage, "set_reshard_after_backward", of_stage)  # noqa: B010
    for layer in layers:
        setattr(layer, "unshard", lambda **_: _NothingToWaitFor())  # noqa: B010


def shard_start(num_rows: int, mesh: Mesh) -> int:
    """First of this rank's rows of a parameter that has `num_rows` of them (FSDP2 cuts axis 0)."""
    return min(num_rows, mesh.shard_rank * -(-num_rows // mesh.shard_size))


def set_gradient_sync(stage: nn.Module, *, is_last: bool) -> None:
    """Reduce gradients in the next backward only if it is the step's last (no pipeline)."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(is_last)
        stage.set_is_last_backward(is_last)
        stage.set_reshard_after_backward(is_last)


def widen_gradients(stage: nn.Module) -> None:
    """Add gradients that were made outside of FSDP's own backward pass to those of the passes
    before, in the dtype that they are reduced in.

    FSDP does so after a module's backward pass. Weights' passes of zero-bubble schedules come
    later, several in a row at a step's end: left to autograd, bfloat16 gradients of a step's
    micro-batches would be added in bfloat16. Nothing where gradients have that dtype already.
    """
    for module in stage.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
        # 2.11 has one group a module.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


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
    over the tp axis, or in other copies of the shards, counts on its first rank only. One sum over
    the world instead of DTensor's one a mesh axis, so that it can ride on another all-reduce.
    """
    counted = [
        local_tensor(p.grad)
        for name, p in ({} if mesh.replica else parameters).items()
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
