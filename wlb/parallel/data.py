"""Data parallelism: FSDP2 over dp x cp, with gradients summed instead of averaged.

The loss is already divided by the valid tokens of the step on all ranks, so gradients only add up.
They are reduced once a step, after the last micro-batch; until then parameters stay gathered (see
`gathered_once` in `pipeline`) unless `fsdp.reshard_after_forward` trades traffic for memory. With
HSDP (`fsdp.shard_size`) gradients are reduce-scattered within a group and then summed with the
other groups' shards.
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
    reshards: dict[str, Any] = {"reshard_after_forward": fsdp.reshard_after_forward}
    experts = {
        i: fully_shard(held, **reshards, mesh=sharding_of_experts(mesh), mp_policy=policy)
        for i, held in experts_of(stage).items()
    }
    # A layer's experts are gathered as a unit of their own, in both passes after their layer.
    units = [
        [fully_shard(layer, **reshards, **options), *([experts[i]] if i in experts else [])]
        for i, layer in stage.model.layers.items()
    ]
    layers = [module for unit in units for module in unit]
    # Keep embedding and head gathered: backward needs the head right after forward.
    whole = fully_shard(stage, reshard_after_forward=False, **options)
    for module in [*layers, whole]:
        # With the factor alone FSDP2 reduces by PREMUL_SUM, which Gloo does not have
        # (https://github.com/pytorch/pytorch/pull/155915).
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _gather_ahead(whole, units)
    if fsdp.reshard_after_forward:
        _drop_after_each_pass(whole, layers)


def share_streams(stages: Iterable[nn.Module]) -> None:
    """Have FSDP communicate on the same streams for all stages of a rank; before their first pass.

    A stage is a root of FSDP's with four streams of its own, and torch's caching allocator gives no
    stream memory that another one freed. torch's `share_comm_ctx` would also share the order of
    forward passes, which one stage's last backward pass clears while others still prefetch by it,
    and makes new streams whenever another root begins.
    """
    streams: dict[str, Any] = {}
    for stage in stages:
        if isinstance(stage, FSDPModule):
            state: Any = stage._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
            state._comm_ctx = _SharedStreams(streams)


class _SharedStreams(FSDPCommContext):
    """A root's communication state, with the streams of the root that began first."""

    def __init__(self, streams: dict[str, Any]) -> None:
        super().__init__()
        self._streams = streams

    def lazy_init(self, device: torch.device) -> None:
        super().lazy_init(device)
        for name, stream in list(vars(self).items()):
            if name.endswith("_stream"):
                setattr(self, name, self._streams.setdefault(name, stream))


def needs_fsdp(mesh: Mesh, dtype: torch.dtype) -> bool:
    divided = mesh.fsdp_size > 1
    if mesh.experts is not None:
        divided |= mesh.experts[EXPERT_SHARD].size() > 1
    return divided or dtype != torch.float32


def _gather_ahead(stage: FSDPModule, units: list[list[FSDPModule]]) -> None:
    """Make each module prefetch the next one: forward in order, backward in reverse.

    units: what each layer gathers. The stage begins both passes. By default torch posts a gather
    when its module begins, which is too late if the host lags, as at a step's first micro-batch. In
    backward torch prefetches the module that ran before in forward, which is not always the next
    layer if several micro-batches are in flight.
    """
    forward, backward = (
        [stage, *(module for unit in order for module in unit)] for order in (units, units[::-1])
    )
    for i, module in enumerate(forward):
        module.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + LAYERS_AHEAD])
    for i, module in enumerate(backward):
        module.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + LAYERS_AHEAD])


def _drop_after_each_pass(stage: FSDPModule, layers: list[FSDPModule]) -> None:
    """Keep layers gathered only while they compute: exclude them from torch's pipeline runtime,
    which gathers whole stages before their passes and drops parameters after a step's last one.
    """
    of_stage = partial(stage.set_reshard_after_backward, recurse=False)
    setattr(stage, "set_reshard_after_backward", of_stage)  # noqa: B010
    # A handle like that of FSDP's unshard, with nothing to wait for.
    nothing = SimpleNamespace(wait=lambda: None)
    for layer in layers:
        setattr(layer, "unshard", lambda **_: nothing)  # noqa: B010


def shard_start(num_rows: int, mesh: Mesh) -> int:
    """First row of this rank's shard of a parameter with `num_rows` rows (FSDP2 splits axis 0)."""
    return min(num_rows, mesh.shard_rank * -(-num_rows // mesh.shard_size))


def widen_gradients(stage: nn.Module) -> None:
    """Accumulate gradients of a separate weight pass in the dtype that they are reduced in.

    FSDP does so after a module's backward pass, but weight passes of zero-bubble schedules come
    later, several in a row, and would add up bfloat16 gradients in bfloat16.
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


def finish_gradients(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
    """Add up gradients of parameters that several TP ranks hold, with tp > 1; once after a step's
    last backward pass. parameters: of this rank, by name.

    A rank's norms see its own rows only, and a copy of a KV head its own query heads. FSDP takes
    their gradients for equal on all copies (`TensorParallelOps.norm`), or it would make an
    all-reduce of its own for each. One all-reduce adds up those of all norms, and another one those
    of all KV heads.
    """
    copied: dict[dist.ProcessGroup, list[Tensor]] = {}
    for name, parameter in parameters.items():
        copies = placement(name, mesh).copies
        if parameter.grad is not None and copies is not None:
            copied.setdefault(copies, []).append(local_tensor(parameter.grad))
    # The other TP ranks of this stage have the same gradients, so none waits in an all-reduce.
    for group, grads in copied.items():
        flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def gradient_square(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> Tensor:
    """This rank's share of the squared gradient norm, float64 scalar; sum it over ALL ranks.

    Each element counts once: parameters that several ranks hold (over tp, or in HSDP copies) count
    on the first of these ranks only. A single sum over the world can share an all-reduce with other
    values.
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
    """Clip gradients of global norm `norm` to `max_norm`; 0 disables clipping."""
    if max_norm and norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(max_norm / (norm + 1e-6))
