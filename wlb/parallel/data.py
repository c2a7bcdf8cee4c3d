"""Data parallelism: FSDP2 over dp x cp, with gradients summed instead of averaged.

The loss is already divided by the valid tokens of the step on all ranks, so gradients only add up.
They are reduced once a step, after the last micro-batch; until then parameters stay gathered unless
`fsdp.reshard_after_forward` trades traffic for memory. With HSDP (`fsdp.shard_size`) gradients are
reduce-scattered within a group and then summed with the other groups' shards.
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
    """Apply FSDP2 to each layer and then to the stage, in place, if `needs_fsdp`."""
    if not needs_fsdp(mesh, dtype):
        return
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Inputs have the right dtypes already. A cast would round the rotary tables in Rows, which
        # need float32 for angles of thousands of radians, and traverse Rows at every layer.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    options: dict[str, Any] = {"mesh": mesh.sharding, "mp_policy": policy}
    layers = [
        fully_shard(layer, reshard_after_forward=fsdp.reshard_after_forward, **options)
        for layer in stage.model.layers.values()
    ]
    # Keep embedding and head gathered: backward needs the head right after forward.
    whole = fully_shard(stage, reshard_after_forward=False, **options)
    for module in [*layers, whole]:
        # With the factor alone FSDP2 reduces by PREMUL_SUM, which Gloo does not have
        # (https://github.com/pytorch/pytorch/pull/155915).
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _gather_ahead([whole, *layers], fsdp.prefetch)
    if fsdp.reshard_after_forward:
        _drop_after_each_pass(whole, layers)


def needs_fsdp(mesh: Mesh, dtype: torch.dtype) -> bool:
    return mesh.fsdp_size > 1 or dtype != torch.float32


def _gather_ahead(modules: list[FSDPModule], ahead: int) -> None:
    """Make each module prefetch the next `ahead` ones: forward in order, backward in reverse.

    modules: the stage, which begins both passes, then its layers. By default torch posts a gather
    when its module begins, after the host has launched the kernels before it. That is too late if
    the host lags, as at a step's first micro-batch, usually the only one that gathers. In backward
    torch prefetches what ran before in forward, which is not always the next layer if several
    micro-batches are in flight.
    """
    if not ahead:
        return
    stage, layers = modules[0], modules[1:]
    for i, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + ahead])
    for i, layer in enumerate(layers):
        layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])
    stage.set_modules_to_backward_prefetch(layers[-ahead:][::-1])


class _NoHandle:
    """An unshard handle of nothing."""

    def wait(self) -> None:
        pass


def _drop_after_each_pass(stage: FSDPModule, layers: list[FSDPModule]) -> None:
    """Keep layers gathered only while they compute, in pipelines too.

    torch's pipeline runtime gathers whole stages before their passes and lets only a step's last
    backward pass drop parameters. Exclude the layers from both.
    """
    of_stage = partial(stage.set_reshard_after_backward, recurse=False)
    setattr(stage, "set_reshard_after_backward", of_stage)  # noqa: B010
    for layer in layers:
        setattr(layer, "unshard", lambda **_: _NoHandle())  # noqa: B010


def shard_start(num_rows: int, mesh: Mesh) -> int:
    """First row of this rank's shard of a parameter with `num_rows` rows (FSDP2 splits axis 0)."""
    return min(num_rows, mesh.shard_rank * -(-num_rows // mesh.shard_size))


def set_gradient_sync(stage: nn.Module, *, is_last: bool) -> None:
    """Without a pipeline: reduce gradients in the next backward only if it is the step's last."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(is_last)
        stage.set_is_last_backward(is_last)
        stage.set_reshard_after_backward(is_last)


def widen_gradients(stage: nn.Module) -> None:
    """Accumulate gradients of a separate weight pass in the dtype that they are reduced in.

    FSDP accumulates after a module's backward pass, but weight passes of zero-bubble schedules come
    later, several in a row. Without this, bfloat16 gradients of a step's micro-batches would be
    added up in bfloat16. No effect if gradients have the reduce dtype already.
    """
    for module in stage.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
        # torch 2.11 has one parameter group per module, later versions several.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce gradients that are still partial over tp (norm weights without FSDP)."""
    for parameter in parameters:
        grad = parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(grad, DTensor)):
            continue
        if grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def gradient_square(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> Tensor:
    """This rank's share of the squared gradient norm, float64 scalar; sum it over ALL ranks.

    Each element counts once: shards are disjoint over all four axes, and what is replicated (over
    tp, or in HSDP copies) counts on its first rank only. A single sum over the world, unlike
    DTensor's sum per mesh axis, can share an all-reduce with other values.
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
    """Clip gradients of global norm `norm` to `max_norm`; 0 disables clipping."""
    if max_norm and norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(max_norm / (norm + 1e-6))


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
