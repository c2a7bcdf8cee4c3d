"""Data parallelism: FSDP2 over dp x cp, with gradients summed instead of averaged.

The loss is already divided by the number of targets of the step on all ranks, so gradients only
need to be added up. Gradients are reduced once per step, after the last micro-batch. Until then
parameters stay gathered (see `gathered_once` in `pipeline`). With `fsdp.reshard_after_forward`
parameters are instead dropped after each pass and gathered for the next one, which saves memory and
costs traffic. With HSDP (`fsdp.shard_size`) gradients are reduce-scattered within each copy of the
parameters and then summed over copies.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from wlb.model import Llama
from wlb.parallel.collectives import all_reduce
from wlb.parallel.expert_parallel import experts_of, sharding_of_experts
from wlb.parallel.mesh import EXPERT_SHARD, Mesh
from wlb.parallel.tensor import local_tensor, placement
from wlb.spec import FsdpSection
from wlb.spec.machine import LAYERS_AHEAD


def shard_stage(stage: Llama, mesh: Mesh, dtype: torch.dtype, fsdp: FsdpSection) -> None:
    """Apply FSDP2 to each layer and then to the stage, in place, if FSDP is needed (`needs_fsdp`).

    Args:
        stage: The stage, whose parameters are on the meta device (no storage).
        mesh: The ranks.
        dtype: Dtype of computation. Parameters are stored in float32 and gathered in this dtype.
        fsdp: The `[fsdp]` section of the configuration.
    """
    if not needs_fsdp(mesh, dtype):
        return
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Do not let FSDP cast inputs, because they already have the right dtypes. A cast would
        # traverse the `Rows` record at every layer and round its rotary tables, which must be
        # float32 because their angles are thousands of radians.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    options: dict[str, Any] = {"mesh": mesh.sharding, "mp_policy": policy}
    reshards: dict[str, Any] = {"reshard_after_forward": fsdp.reshard_after_forward}
    experts = {
        i: fully_shard(held, **reshards, mesh=sharding_of_experts(mesh), mp_policy=policy)
        for i, held in experts_of(stage).items()
    }
    # Experts are sharded over other ranks than the rest of their layer, so FSDP gathers them
    # separately. In forward and backward, the gather of the experts follows the gather of the
    # layer.
    units = [
        [fully_shard(layer, **reshards, **options), *([experts[i]] if i in experts else [])]
        for i, layer in stage.model.layers.items()
    ]
    layers = [module for unit in units for module in unit]
    # Keep embedding and head gathered after forward, because backward follows at once and begins
    # with the head.
    whole = fully_shard(stage, reshard_after_forward=False, **options)
    for module in [*layers, whole]:
        # Make FSDP2 sum gradients without dividing them. If only the divide factor were set, FSDP2
        # would use the reduction PREMUL_SUM, which Gloo does not have
        # (https://github.com/pytorch/pytorch/pull/155915).
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _gather_ahead(whole, units)
    if fsdp.reshard_after_forward:
        _drop_after_each_pass(whole, layers)


def share_streams(stages: Iterable[nn.Module]) -> None:
    """Make FSDP use the same streams for all stages of a rank. Call it before their first pass.

    FSDP treats each stage as a root module with four CUDA streams of its own. torch's caching
    allocator does not reuse memory across streams, so separate streams would need more memory.
    torch's `share_comm_ctx` cannot be used, as it makes new streams if another root begins, and
    it also shares the recorded order of forward passes. One stage's last backward pass clears that
    order while other stages still need it to prefetch.
    """
    streams: dict[str, Any] = {}
    for stage in stages:
        if isinstance(stage, FSDPModule):
            state: Any = stage._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
            state._comm_ctx = _SharedStreams(streams)


class _SharedStreams(FSDPCommContext):
    """FSDP's communication state of one root module, with streams that all roots share."""

    def __init__(self, streams: dict[str, Any]) -> None:
        super().__init__()
        self._streams = streams

    def lazy_init(self, device: torch.device) -> None:
        """Make the streams, or use the streams that another root module has made."""
        super().lazy_init(device)
        for name, stream in list(vars(self).items()):
            if name.endswith("_stream"):
                setattr(self, name, self._streams.setdefault(name, stream))


def needs_fsdp(mesh: Mesh, dtype: torch.dtype) -> bool:
    """Return whether stages must be wrapped in FSDP2.

    This is so if several ranks share parameters, or if `dtype`, the dtype of computation, is not
    float32 and parameters must be cast.
    """
    divided = mesh.fsdp_size > 1
    if mesh.experts is not None:
        divided |= mesh.experts[EXPERT_SHARD].size() > 1
    return divided or dtype != torch.float32


def _gather_ahead(stage: FSDPModule, units: list[list[FSDPModule]]) -> None:
    """Make each module prefetch the next one: in order in forward, in reverse in backward.

    By default FSDP starts to gather a module's parameters when the module begins. That is too late
    if the host lags behind the GPU, as in a step's first micro-batch. In backward, FSDP's own
    prefetches follow the most recent forward pass, which may have been another micro-batch's.

    Args:
        stage: The whole stage, which is gathered first in both passes.
        units: For each layer the FSDP modules to gather: the layer, and its experts if any.
    """
    forward, backward = (
        [stage, *(module for unit in order for module in unit)] for order in (units, units[::-1])
    )
    for i, module in enumerate(forward):
        module.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + LAYERS_AHEAD])
    for i, module in enumerate(backward):
        module.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + LAYERS_AHEAD])


def _drop_after_each_pass(stage: FSDPModule, layers: list[FSDPModule]) -> None:
    """Make FSDP gather a layer's parameters for each pass, and drop them after the pass.

    torch's pipeline runtime gathers a whole stage before its first pass in a step and drops the
    parameters after the last one. This function makes these two calls skip the layers.

    Args:
        stage: The whole stage.
        layers: The FSDP modules of the layers.
    """
    of_stage = partial(stage.set_reshard_after_backward, recurse=False)
    setattr(stage, "set_reshard_after_backward", of_stage)  # noqa: B010
    # FSDP's `unshard` returns a handle with a method `wait`. Replace it by one that does nothing.
    nothing = SimpleNamespace(wait=lambda: None)
    for layer in layers:
        setattr(layer, "unshard", lambda **_: nothing)  # noqa: B010


def shard_start(num_rows: int, mesh: Mesh) -> int:
    """Return the first row (on axis 0) of this rank's FSDP2 shard of a parameter.

    Args:
        num_rows: Size of the parameter's axis 0.
        mesh: The ranks.
    """
    return min(num_rows, mesh.shard_rank * -(-num_rows // mesh.shard_size))


def widen_gradients(stage: nn.Module) -> None:
    """Accumulate the gradients of a weight-gradient pass in float32, FSDP's dtype of reductions.

    FSDP does this itself after a module's backward pass. The weight-gradient passes of zero-bubble
    schedules run later. Without this call, the gradients of several such passes would be added up
    in bfloat16.
    """
    for module in stage.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
        # torch 2.11 has one parameter group per module; later versions have several.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def finish_gradients(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
    """Add up the gradients of parameters that several TP ranks hold (tp > 1).

    Call it once, after a step's last backward pass. A rank's norms see only 1/tp of the rows, and a
    copy of a KV head sees only some of its query heads, so each rank has only one term of the
    gradient, which is a sum over ranks. Norms and copied KV heads are declared as replicated
    (`TensorParallelOps.norm`), so that FSDP does not make one all-reduce per parameter. Instead one
    all-reduce here adds up the gradients of all norms, and another one those of all copied KV
    heads.

    Args:
        parameters: This rank's parameters by name. Their gradients are changed in place.
        mesh: The ranks.
    """
    copied: dict[dist.ProcessGroup, list[Tensor]] = {}
    for name, parameter in parameters.items():
        copies = placement(name, mesh).copies
        if parameter.grad is not None and copies is not None:
            copied.setdefault(copies, []).append(local_tensor(parameter.grad))
    # All TP ranks of a stage have gradients of the same parameters, so they make the same calls.
    for group, grads in copied.items():
        flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def gradient_square(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> Tensor:
    """Return this rank's share of the squared gradient norm, a float64 scalar.

    The sum of the shares over all ranks of the run is the squared norm. Each element counts once:
    parameters that several ranks hold (over tp, or in HSDP copies) count on the first of these
    ranks only. Because one sum over all ranks suffices, the caller can sum the shares together with
    other values in one all-reduce.
    """
    counted = [
        local_tensor(p.grad)
        for name, p in ({} if mesh.replica else parameters).items()
        if p.grad is not None and (mesh.parallel.tp == 1 or not placement(name, mesh).is_copy)
    ]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    return torch.stack([grad.norm() for grad in counted]).double().square().sum()


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Scale gradients so that their global norm is at most `max_norm`, in place.

    Args:
        parameters: Parameters whose gradients are scaled.
        norm: Global norm of the gradients, over all ranks.
        max_norm: Largest norm allowed. 0 means no clipping.
    """
    if max_norm and norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(max_norm / (norm + 1e-6))
