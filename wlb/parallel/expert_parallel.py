"""Expert parallelism: experts are divided over dp x cp x tp, and all-to-alls bring rows to them.

An EP group has `parallel.ep` ranks, which are neighbours in (dp, cp, tp) order. Each rank has an
equal part of a layer's experts. Ranks of different EP groups that have the same experts shard them
by FSDP, which also adds up their gradients. With HSDP (`fsdp.shard_size`) FSDP adds gradients up
within each copy of the parameters and then over copies.

In each layer the ranks of an EP group first tell each other how many rows they send, and then send
rows and scores (`wlb.parallel.expert_exchange`). All ranks of an EP group run the same schedule, so
they make the same calls in the same order. A rank without rows makes these calls, too.
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

_EXPERTS = ".experts."
"""Part of a parameter's name by which a stack of experts is recognised."""


def is_expert(name: str) -> bool:
    """Return whether the parameter of this name has the weights of all experts of a layer."""
    return _EXPERTS in name


def mixtures_of(stage: nn.Module) -> list[MixtureMlp]:
    """Return a stage's mixtures of experts, in the order of the layers."""
    return [module for module in stage.modules() if isinstance(module, MixtureMlp)]


def experts_of(stage: Llama) -> dict[str, GroupedMlp]:
    """Return the modules with a stage's experts, by layer number.

    FSDP shards these modules over other ranks than the rest of their layer.
    """
    layers = stage.model.layers.items()
    return {i: layer.mlp.experts for i, layer in layers if isinstance(layer.mlp, MixtureMlp)}


def divide_experts(
    stage: Llama, mesh: Mesh, queue: WeightQueue | None, *, num_stages: int = 1
) -> None:
    """Set up expert parallelism in all layers of `stage` that have experts, in place.

    Each layer gets the object that sends rows to other ranks (`ExpertAllToAll`), and keeps only
    this rank's experts. The parameters have no storage yet.

    Args:
        stage: The stage.
        mesh: The ranks.
        queue: Holds the computation of experts' weight gradients until a later pass. With None
            backward computes them.
        num_stages: Number of stages of each all-to-all.
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
    """Return the numbers of the experts that expert parallelism gives to this rank.

    FSDP may shard these experts over other ranks (`own_experts`).

    Args:
        num: Number of experts of a layer.
        mesh: The ranks.
    """
    each = num // mesh.parallel.ep
    assert mesh.experts is not None
    first = each * mesh.experts.get_local_rank(EP)
    return range(first, first + each)


def own_experts(num: int, mesh: Mesh, *, is_sharded: bool) -> range:
    """Return the numbers of the experts whose weights this rank stores between steps.

    FSDP2 splits the axis of experts evenly, rounded up, so the last ranks may have fewer.

    Args:
        num: Number of experts of a layer.
        mesh: The ranks.
        is_sharded: Whether FSDP shards the experts.
    """
    held = held_experts(num, mesh)
    if not is_sharded:
        return held
    assert mesh.experts is not None
    size, rank = mesh.experts[EXPERT_SHARD].size(), mesh.experts.get_local_rank(EXPERT_SHARD)
    each = -(-len(held) // size)
    return held[min(len(held), rank * each) : (rank + 1) * each]


def sharding_of_experts(mesh: Mesh) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards experts; with HSDP it also has an axis of copies."""
    assert mesh.experts is not None
    axes = tuple(axis for axis in mesh.expert_axes if axis != EP)
    return mesh.experts[axes]


def add_up_loads(stages: Iterable[Llama], rows: Iterable[Rows], mesh: Mesh) -> None:
    """Set `MixtureMlp.load` and `slowest` of each layer, from all ranks' row counts of the step.

    All ranks call this once, after a step's last backward pass.

    Args:
        stages: This rank's stages.
        rows: The inputs of each micro-batch, in which the layers have stored how many rows chose
            each expert.
        mesh: The ranks.
    """
    mixtures = [mixture for stage in stages for mixture in mixtures_of(stage)]
    if not mixtures:
        return
    by_batch = [r.experts.counts for r in rows if r.experts is not None]
    of_batches = [torch.stack([counts[mixture] for mixture in mixtures]) for counts in by_batch]
    # Shapes: B micro-batches, L layers, E experts, R ranks of an EP group.
    counts_BLE = torch.stack(of_batches).long()
    counts_LE = counts_BLE.sum(0)
    ranks_BLR = counts_BLE.unflatten(-1, (mesh.parallel.ep, -1)).sum(-1)
    counts_LE, ranks_BLR = _added(mesh, EP, counts_LE, ranks_BLR)
    # In each micro-batch and layer, an EP group waits for its rank with the most rows.
    slowest_L = ranks_BLR.amax(-1).sum(0)
    for axis in mesh.expert_axes:
        if axis != EP:
            counts_LE, slowest_L = _added(mesh, axis, counts_LE, slowest_L)
    for mixture, load_E, slowest in zip(mixtures, counts_LE, slowest_L, strict=True):
        mixture.load, mixture.slowest = load_E, slowest


def _added(mesh: Mesh, axis: str, *numbers: Tensor) -> Sequence[Tensor]:
    """Return each tensor summed over one axis of the mesh of experts, by a single all-reduce."""
    assert mesh.experts is not None
    group = mesh.experts.get_group(axis)
    if group.size() == 1:
        return numbers
    flat = all_reduce(torch.cat([n.flatten() for n in numbers]), group)
    parts = flat.split([n.numel() for n in numbers])
    return [part.view_as(n) for part, n in zip(parts, numbers, strict=True)]


def num_load_values(num_layers: int, ep: int) -> int:
    """Return the length of the tensor of `load_values`: 2 * num_layers + ep."""
    return 2 * num_layers + ep


def load_values(stages: Iterable[Llama], num_layers: int, mesh: Mesh) -> Tensor | None:
    """Return how unevenly experts were loaded in the most recent step, in float64.

    The values are, one after the other:

    - for each layer of the whole model, the rows of the layer's most loaded expert divided by the
      mean rows of its experts;
    - for each layer of the whole model, the rows of each micro-batch's most loaded EP rank, summed
      over micro-batches and EP groups (`MixtureMlp.slowest`), divided by the sum that equal loads
      would give;
    - for each EP rank, the rows that it computes in all layers of `stages`.

    Values of layers that are not in `stages` are 0. So a sum over pipeline ranks has the values of
    all layers.

    Args:
        stages: This rank's stages.
        num_layers: Number of layers of the whole model.
        mesh: The ranks.

    Returns:
        A tensor of `num_load_values`, or None if this rank has no experts.
    """
    loads: dict[int, tuple[Tensor, Tensor]] = {}
    for stage in stages:
        for name, layer in stage.model.layers.items():
            mlp = layer.mlp
            if isinstance(mlp, MixtureMlp) and mlp.load is not None and mlp.slowest is not None:
                loads[int(name)] = (mlp.load, mlp.slowest)
    if not loads:
        return None
    ep = mesh.parallel.ep
    load_LE, slowest_L = (torch.stack(both).double() for both in zip(*loads.values(), strict=True))
    of_ranks_R = load_LE.unflatten(-1, (ep, -1)).sum((0, 2))
    none = load_LE.new_zeros(())
    of_layers = [
        dict(zip(loads, ratio_L.unbind(), strict=True))
        for ratio_L in (
            load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-9),
            slowest_L / (load_LE.sum(-1) / ep).clamp(min=1e-9),
        )
    ]
    values = [found.get(layer, none) for found in of_layers for layer in range(num_layers)]
    return torch.cat([torch.stack(values), of_ranks_R])


def rebalance(stages: Iterable[nn.Module]) -> None:
    """Update `MixtureMlp.balance` of every layer; call this after the optimiser's update.

    The update uses how many rows each expert received in the last step. `balance` has a bias for
    each expert, or its share of the rows, depending on `ExpertBalance`.
    """
    for stage in stages:
        for mixture in mixtures_of(stage):
            mixture.rebalance()
