"""Expert parallelism: experts over dp x cp x tp, rows brought to them by all-to-alls.

Groups of `parallel.ep` ranks, neighbours in (dp, cp, tp) order, hold equal parts of a layer's
experts; FSDP shards these over what is left, and adds up their gradients there; with HSDP
(`fsdp.shard_size`) it does so in each copy of the parameters, and then over copies. A layer
exchanges numbers of rows, then rows and scores (`wlb.parallel.expert_exchange`). Ranks of a group
run the same schedule, so that they make the same calls in the same order; a rank without rows too.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from wlb.model import Llama, Rows
from wlb.model.expert_layer import GroupedMlp, MixtureMlp
from wlb.parallel.collectives import all_reduce
from wlb.parallel.deferred import WeightQueue
from wlb.parallel.expert_exchange import ExpertAllToAll
from wlb.parallel.mesh import EP, EXPERT_SHARD, Mesh
from wlb.parallel.tensor import local_tensor

_HOLDER = ".experts."


def is_expert(name: str) -> bool:
    """Whether the parameter of this name is a stack of experts."""
    return _HOLDER in name


def mixtures_of(stage: nn.Module) -> list[MixtureMlp]:
    """The layers with experts of a stage, in order."""
    return [module for module in stage.modules() if isinstance(module, MixtureMlp)]


def experts_of(stage: Llama) -> dict[str, GroupedMlp]:
    """The modules of a stage that FSDP shards over `EXPERT_SHARD`, by layer."""
    layers = stage.model.layers.items()
    return {i: layer.mlp.experts for i, layer in layers if isinstance(layer.mlp, MixtureMlp)}


def divide_experts(
    stage: Llama, mesh: Mesh, queue: WeightQueue | None, *, num_stages: int = 1
) -> None:
    """Give each layer its exchange, in `num_stages` stages, and each stack this rank's experts,
    without storage yet.
    """
    side = torch.cuda.Stream() if mesh.device.type == "cuda" and mesh.parallel.ep > 1 else None
    for mixture in mixtures_of(stage):
        if queue is not None:
            mixture.experts.defer = partial(_defer, queue)
        if mesh.parallel.ep == 1:
            continue
        assert mesh.experts is not None
        mixture.exchange = ExpertAllToAll(mesh.experts.get_group(EP), stages=num_stages, side=side)
        mixture.experts.local = local_tensor
        for stack in (
            mixture.experts.gate_proj,
            mixture.experts.up_proj,
            mixture.experts.down_proj,
        ):
            held = held_experts(stack.weight.shape[0], mesh)
            local = stack.weight.detach()[held.start : held.stop].contiguous()
            value = DTensor.from_local(local, mesh.experts[EP], [Shard(0)], run_check=False)
            stack.weight = nn.Parameter(value)


def _defer(queue: WeightQueue, parameters: Sequence[Tensor], compute: Any) -> None:
    queue.push(parameters, lambda _: compute())


def held_experts(num: int, mesh: Mesh) -> range:
    """The experts of `num` that this rank's group member holds, before FSDP shards them."""
    each = num // mesh.parallel.ep
    assert mesh.experts is not None
    first = each * mesh.experts.get_local_rank(EP)
    return range(first, first + each)


def own_experts(num: int, mesh: Mesh, *, is_sharded: bool) -> range:
    """The experts whose weights this rank stores; FSDP2 splits axis 0, the last ones get less."""
    held = held_experts(num, mesh)
    if not is_sharded:
        return held
    assert mesh.experts is not None
    size, rank = mesh.experts[EXPERT_SHARD].size(), mesh.experts.get_local_rank(EXPERT_SHARD)
    each = -(-len(held) // size)
    return held[min(len(held), rank * each) : (rank + 1) * each]


def sharding_of_experts(mesh: Mesh) -> DeviceMesh:
    """The mesh that FSDP2 shards experts over, with the axis of their copies if there are any."""
    assert mesh.experts is not None
    axes = tuple(axis for axis in mesh.expert_axes if axis != EP)
    return mesh.experts[axes]


def add_up_loads(stages: Iterable[Llama], rows: Iterable[Rows], mesh: Mesh) -> None:
    """Give each layer the rows of its experts in a step, of all ranks that share its experts, and
    of the EP ranks that others waited for; once after a step's last backward pass, on all ranks.
    """
    mixtures = [mixture for stage in stages for mixture in mixtures_of(stage)]
    if not mixtures:
        return
    told = [r.experts.counts for r in rows if r.experts is not None]
    of_batches = [torch.stack([counts[mixture] for mixture in mixtures]) for counts in told]
    counts_BLE = torch.stack(of_batches).long()
    counts_LE = counts_BLE.sum(0)
    ranks_BLR = counts_BLE.unflatten(-1, (mesh.parallel.ep, -1)).sum(-1)
    counts_LE, ranks_BLR = _added(mesh, EP, counts_LE, ranks_BLR)
    # A micro-batch's layer waits for the rank with most rows in its own group.
    slowest_L = ranks_BLR.amax(-1).sum(0)
    for axis in mesh.expert_axes:
        if axis != EP:
            counts_LE, slowest_L = _added(mesh, axis, counts_LE, slowest_L)
    for mixture, load_E, slowest in zip(mixtures, counts_LE, slowest_L, strict=True):
        mixture.load, mixture.slowest = load_E, slowest


def _added(mesh: Mesh, axis: str, *numbers: Tensor) -> Sequence[Tensor]:
    """The sums of tensors over an axis of the mesh of experts, in one all-reduce."""
    assert mesh.experts is not None
    group = mesh.experts.get_group(axis)
    if group.size() == 1:
        return numbers
    flat = all_reduce(torch.cat([n.flatten() for n in numbers]), group)
    parts = flat.split([n.numel() for n in numbers])
    return [part.view_as(n) for part, n in zip(parts, numbers, strict=True)]


def num_load_values(num_layers: int, ep: int) -> int:
    """Values of `load_values`."""
    return 2 * num_layers + ep


def load_values(stages: Iterable[Llama], num_layers: int, mesh: Mesh) -> Tensor | None:
    """Of the last step, float64: by layer of the whole model, the most loaded expert's rows over
    the mean one's; by layer, the rows that its EP ranks waited for over the mean rank's; the rows
    of each EP rank, of all layers. 0 for layers of other stages; None without experts here.
    """
    held: dict[int, tuple[Tensor, Tensor]] = {}
    for stage in stages:
        for name, layer in stage.model.layers.items():
            mlp = layer.mlp
            if isinstance(mlp, MixtureMlp) and mlp.load is not None and mlp.slowest is not None:
                held[int(name)] = (mlp.load, mlp.slowest)
    if not held:
        return None
    ep = mesh.parallel.ep
    load_LE, slowest_L = (torch.stack(both).double() for both in zip(*held.values(), strict=True))
    of_ranks_R = load_LE.unflatten(-1, (ep, -1)).sum((0, 2))
    none = load_LE.new_zeros(())
    of_layers = [
        dict(zip(held, ratio_L.unbind(), strict=True))
        for ratio_L in (
            load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-9),
            slowest_L / (load_LE.sum(-1) / ep).clamp(min=1e-9),
        )
    ]
    values = [found.get(layer, none) for found in of_layers for layer in range(num_layers)]
    return torch.cat([torch.stack(values), of_ranks_R])


def rebalance(stages: Iterable[nn.Module]) -> None:
    """Move the biases or shares of all layers by the last step's load; after its update."""
    for stage in stages:
        for mixture in mixtures_of(stage):
            mixture.rebalance()
