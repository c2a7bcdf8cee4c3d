"""Expert parallelism: experts over dp x cp x tp, rows brought to them by all-to-alls.

Groups of `parallel.ep` ranks, neighbours in (dp, cp, tp) order, hold equal parts of a layer's
experts; FSDP shards these over what is left, and adds up their gradients there. A layer exchanges
numbers of rows, then rows and scores (`wlb.parallel.expert_exchange`). Ranks of a group run the
same schedule, so that they make the same calls in the same order; a rank without rows calls too.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from wlb.model import Llama, Rows
from wlb.model.experts import GroupedMlp, MixtureMlp
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
    without storage yet."""
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
    """The mesh that FSDP2 shards experts over."""
    assert mesh.experts is not None
    return mesh.experts[EXPERT_SHARD]


def add_up_loads(stages: Iterable[Llama], rows: Iterable[Rows], mesh: Mesh) -> None:
    """Give each layer the rows of its experts in a step, of all ranks that share its experts;
    once after a step's last backward pass, on all of these ranks."""
    mixtures = [mixture for stage in stages for mixture in mixtures_of(stage)]
    if not mixtures:
        return
    told = [r.experts.counts for r in rows if r.experts is not None]
    own = torch.stack([_sum(told, mixture) for mixture in mixtures]).long()
    assert mesh.experts is not None
    for axis in (EXPERT_SHARD, EP):
        group = mesh.experts.get_group(axis)
        own = all_reduce(own, group) if group.size() > 1 else own
    for mixture, load in zip(mixtures, own, strict=True):
        mixture.load = load


def _sum(told: Sequence[Mapping[nn.Module, Tensor]], mixture: MixtureMlp) -> Tensor:
    return torch.stack([counts[mixture] for counts in told]).sum(0)


def load_sums(stages: Iterable[nn.Module]) -> Tensor | None:
    """Of the last step: the sum over this rank's layers of the most loaded expert's rows over the
    mean expert's, and the number of layers, float64 [2]; None without experts."""
    loads = [m.load for stage in stages for m in mixtures_of(stage) if m.load is not None]
    if not loads:
        return None
    load_LE = torch.stack(loads).double()
    ratios = load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-9)
    return torch.stack([ratios.sum(), torch.full_like(ratios[0], len(loads))])


def rebalance(stages: Iterable[nn.Module]) -> None:
    """Move the biases or shares of all layers by the last step's load; after its update."""
    for stage in stages:
        for mixture in mixtures_of(stage):
            mixture.rebalance()
