"""The 4-D mesh of ranks (Section 2.2): axes pp, dp, cp, tp, and the groups FSDP shards over.

Ranks are numbered TP, CP, PP, DP from the inside out, so that TP neighbours share a node's fastest
links. The mesh lists its axes as (pp, dp, cp, tp): dp and cp are adjacent and flatten into `fsdp`,
over which gradients are summed and parameters sharded, either over all of it or (HSDP) within
groups of `shard_size` consecutive ranks that hold one copy each, cp ranks of a pipeline first.

A pipeline's transfers do not use the group of the axis pp. NCCL runs the operations of a
communicator in the order in which a rank posts them, and interleaved schedules post receives long
before their data exist; in one communicator such a receive would hold up the rank's later sends to
its other neighbour. Each link between two pipeline ranks therefore has a communicator (`links`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from wlb.parallel.grid import kind_of_link, link_members
from wlb.parallel.grid import rank_grid as rank_grid
from wlb.parallel.host import host_group
from wlb.plan import UserError
from wlb.spec import ModelSpec
from wlb.spec.run import ParallelSpec

AXES = ("pp", "dp", "cp", "tp")
FSDP = "fsdp"
HSDP = ("replicate", "shard")
EXPERT_COPIES, EXPERT_SHARD, EP = "expert_replicate", "expert_shard", "ep"
"""Axes of the mesh of experts: dp x cp x tp as (copies of experts, FSDP of experts, different
experts). As torchtitan has it, copies are those of other parameters (HSDP), so that an EP group
lies within the ranks of one copy; without HSDP the first axis is missing."""
KV_HEAD, KV_COPY = "kv_head", "kv_copy"
"""The axis tp as (different KV heads, copies of one), of a model with fewer KV heads than TP ranks:
neighbours hold copies, because their query heads read the same keys."""


class Coordinates(NamedTuple):
    """A rank's index along each axis."""

    tp: int
    cp: int
    pp: int
    dp: int


def coordinates(rank: int, parallel: ParallelSpec) -> Coordinates:
    """A rank's place in the mesh; tp varies fastest, then cp, pp, dp."""
    if not 0 <= rank < parallel.world_size:
        raise UserError(f"rank {rank} is outside the {parallel.world_size} ranks of {parallel}")
    rank, tp = divmod(rank, parallel.tp)
    rank, cp = divmod(rank, parallel.cp)
    dp, pp = divmod(rank, parallel.pp)
    return Coordinates(tp=tp, cp=cp, pp=pp, dp=dp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """The 4-D mesh seen from one rank."""

    parallel: ParallelSpec
    device: torch.device
    rank: int
    device_mesh: DeviceMesh  # axes (pp, dp, cp, tp)
    fsdp: DeviceMesh  # dp and cp flattened, dp major
    sharding: DeviceMesh  # what FSDP2 shards over: `fsdp`, or its ranks as (replicate, shard)
    experts: DeviceMesh | None = None  # axes pp and `expert_axes`, for a model with experts
    kv_heads: DeviceMesh | None = None  # axes (kv_head, kv_copy), where TP ranks hold copies
    # This rank's group for each kind of link (`wlb.parallel.grid.LINKS`): with one neighbour, or
    # alone. Empty without a pipeline.
    links: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def at(self) -> Coordinates:
        """This rank's place."""
        return coordinates(self.rank, self.parallel)

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @property
    def fsdp_rank(self) -> int:
        return self.at.dp * self.parallel.cp + self.at.cp

    @property
    def fsdp_size(self) -> int:
        return self.parallel.dp * self.parallel.cp

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of every axis, of `fsdp`, `sharding`, experts, copies of KV heads and
        `links`.
        """
        meshes = (self.device_mesh, self.fsdp, self.sharding, self.experts, self.kv_heads)
        groups = [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]
        return [*groups, *self.links.values()]

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.sharding.size(self.sharding.ndim - 1)

    @property
    def shard_rank(self) -> int:
        return self.fsdp_rank % self.shard_size

    @property
    def replica(self) -> int:
        """Index of the copy of the parameters that this rank holds a shard of."""
        return self.fsdp_rank // self.shard_size

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes of `experts` besides pp, of a model with experts."""
        assert self.experts is not None
        return (self.experts.mesh_dim_names or ())[1:]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of this rank's neighbours along "tp", "cp", "pp", "dp" or "fsdp"."""
        return self.fsdp.get_group() if axis == FSDP else self.device_mesh.get_group(axis)

    @property
    def link_before(self) -> dist.ProcessGroup:
        """The group of this rank and the pipeline rank before it; the last one is before rank 0."""
        return self._link((self.at.pp - 1) % self.parallel.pp)

    @property
    def link_after(self) -> dist.ProcessGroup:
        """The group of this rank and the pipeline rank after it; rank 0 is after the last one."""
        return self._link(self.at.pp)

    def _link(self, link: int) -> dist.ProcessGroup:
        return self.links[kind_of_link(link, self.parallel.pp)]


def used_groups(mesh: Mesh) -> list[tuple[str, dist.ProcessGroup]]:
    """Name and group of each communicator of more than one rank that steps use, once each, in one
    order on all ranks. torch also makes one of `pp`, of `dp`, and of `fsdp` beside HSDP's two,
    which nothing uses.
    """
    groups: list[tuple[str, dist.ProcessGroup | None]] = [("world", dist.group.WORLD)]
    groups += [*mesh.links.items(), *((axis, mesh.group(axis)) for axis in ("tp", "cp"))]
    if mesh.kv_heads is not None:
        groups.append((KV_COPY, mesh.kv_heads.get_group(KV_COPY)))
    groups += zip(mesh.sharding.mesh_dim_names or (), mesh.sharding.get_all_groups(), strict=True)
    if mesh.experts is not None:
        groups += [(axis, mesh.experts.get_group(axis)) for axis in mesh.expert_axes]
    named: dict[str, tuple[str, dist.ProcessGroup]] = {}
    for name, group in groups:
        if group is not None and group.size() > 1:
            named.setdefault(group.group_name, (name, group))
    return list(named.values())


def build_mesh(
    parallel: ParallelSpec,
    device: torch.device,
    *,
    shard_size: int = 0,
    model: ModelSpec | None = None,
) -> Mesh:
    """The mesh over all ranks; a collective call.

    Args:
        parallel: degrees of all axes; their product is the number of ranks.
        device: this rank's.
        shard_size: ranks that share one copy of the weights, a divisor of dp * cp; 0 = all.
        model: whose experts, and copies of KV heads over TP ranks, need groups of their own; None
            for a model without either.

    Raises:
        UserError: if the degrees are not those of the running ranks.
    """
    world_size = dist.get_world_size()
    if parallel.dp < 1 or parallel.world_size != world_size:
        raise UserError(
            f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {parallel.dp} is not the "
            f"{world_size} ranks that run; set parallel.dp = ranks / (tp * cp * pp)"
        )
    has_experts = model is not None and model.experts.num > 0
    copies = 1 if model is None else model.kv_copies(parallel.tp)
    ranks = torch.from_numpy(rank_grid(parallel))
    device_mesh = DeviceMesh(device.type, ranks, mesh_dim_names=AXES)
    fsdp = device_mesh["dp", "cp"]._flatten(FSDP)
    return Mesh(
        parallel=parallel,
        device=device,
        rank=dist.get_rank(),
        device_mesh=device_mesh,
        fsdp=fsdp,
        sharding=_sharding(fsdp, shard_size or fsdp.size()),
        experts=_experts(ranks, parallel, device, shard_size) if has_experts else None,
        kv_heads=None if copies == 1 else _kv_heads(device_mesh["tp"], copies),
        links={kind: _own_of(parts, kind) for kind, parts in link_members(parallel).items()},
    )


def _own_of(parts: list[list[int]], name: str) -> dist.ProcessGroup:
    """This rank's group of `parts`, which divide all ranks; a collective call."""
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        # One ncclCommSplit makes the communicators of all parts, as torch makes those of a mesh.
        made = dist.split_group(split_ranks=parts, group_desc=name)
    else:
        own = next(part for part in parts if dist.get_rank() in part)
        made = dist.new_group(own, use_local_synchronization=True, group_desc=name)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _experts(
    ranks: torch.Tensor, parallel: ParallelSpec, device: torch.device, shard_size: int
) -> DeviceMesh:
    copies = parallel.fsdp_size // (shard_size or parallel.fsdp_size)
    of_copy = parallel.expert_ranks // copies
    assert of_copy % parallel.ep == 0, "wlb.spec.checks refuses EP groups over several copies"
    sizes = {EXPERT_COPIES: copies, EXPERT_SHARD: of_copy // parallel.ep, EP: parallel.ep}
    if copies == 1:
        del sizes[EXPERT_COPIES]
    grid = ranks.reshape(parallel.pp, *sizes.values())
    return DeviceMesh(device.type, grid, mesh_dim_names=("pp", *sizes))


def _kv_heads(tp: DeviceMesh, copies: int) -> DeviceMesh:
    # Unflatten rather than build a new mesh, as in `_sharding`.
    return tp._unflatten(0, (tp.size() // copies, copies), (KV_HEAD, KV_COPY))


def _sharding(fsdp: DeviceMesh, shard_size: int) -> DeviceMesh:
    copies, rest = divmod(fsdp.size(), shard_size)
    if rest:
        raise UserError(
            f"fsdp.shard_size = {shard_size} does not divide the {fsdp.size()} ranks of dp x cp"
        )
    # Unflatten rather than build a new mesh: FSDP must find the root mesh to join it with tp.
    return fsdp if copies == 1 else fsdp._unflatten(0, (copies, shard_size), HSDP)


def limit_collectives(timeout_s: float, mesh: Mesh | None = None) -> None:
    """Set the timeout of collectives of all ranks, or of all groups of a mesh: torch gives a new
    group half an hour, whatever the default group has.
    """
    for group in [dist.group.WORLD, host_group()] if mesh is None else mesh.groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
