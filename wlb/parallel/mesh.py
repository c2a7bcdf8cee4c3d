"""The 4-D mesh of ranks (Section 2.2): axes pp, dp, cp and tp, and the groups of FSDP.

Ranks are numbered with TP fastest, then CP, PP and DP, so that TP neighbours share a node's fastest
links. The mesh lists its axes as (pp, dp, cp, tp), so dp and cp are adjacent and flatten into
`fsdp`. Gradients are summed over `fsdp`, and parameters are sharded over all of it. With HSDP
parameters are sharded over `shard_size` consecutive ranks instead, and each such group has a copy.

A pipeline's transfers do not use the group of the axis pp. NCCL runs the operations of a
communicator in the order in which a rank posts them, and interleaved schedules post receives long
before their data exist. If all transfers shared one communicator, such a receive would block the
rank's later sends to its other neighbour. Therefore each link between two pipeline ranks has a
communicator (`links`).
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
"""Axes of the mesh, outermost first."""
FSDP = "fsdp"
"""Name of the axis that combines dp and cp."""
HSDP = ("replicate", "shard")
"""The two axes into which HSDP divides `fsdp`: copies of the parameters, and shards of a copy."""
EXPERT_COPIES, EXPERT_SHARD, EP = "expert_replicate", "expert_shard", "ep"
"""The three axes into which the mesh of experts divides the ranks of dp x cp x tp.

Ranks along EP have different experts. Ranks along EXPERT_SHARD have FSDP shards of the same
experts. Ranks along EXPERT_COPIES have copies of the same shards; this axis exists only with HSDP.
As in torchtitan, HSDP copies experts together with the other parameters, so the ranks of an EP
group belong to one copy.
"""
KV_HEAD, KV_COPY = "kv_head", "kv_copy"
"""The two axes into which tp is divided if there are more TP ranks than KV heads.

Ranks along KV_HEAD have different KV heads, and ranks along KV_COPY have copies of the same head.
Neighbouring TP ranks have the same head, because their query heads read the same keys.
"""


class Coordinates(NamedTuple):
    """A rank's index along each axis of the mesh."""

    tp: int
    cp: int
    pp: int
    dp: int


def coordinates(rank: int, parallel: ParallelSpec) -> Coordinates:
    """Return a rank's index along each axis of the mesh; tp varies fastest, then cp, pp and dp."""
    if not 0 <= rank < parallel.world_size:
        raise UserError(
            f"rank = {rank} must be from 0 to {parallel.world_size - 1}, because tp x cp x pp x dp "
            f"= {parallel.world_size}"
        )
    rank, tp = divmod(rank, parallel.tp)
    rank, cp = divmod(rank, parallel.cp)
    dp, pp = divmod(rank, parallel.pp)
    return Coordinates(tp=tp, cp=cp, pp=pp, dp=dp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """The 4-D mesh of all ranks, with the index and groups of the rank on which it was built."""

    parallel: ParallelSpec  # degrees of all axes
    device: torch.device  # device of this rank
    rank: int  # this rank's number among all ranks
    device_mesh: DeviceMesh  # axes (pp, dp, cp, tp)
    fsdp: DeviceMesh  # dp and cp flattened, dp major
    # the mesh over which FSDP2 shards: `fsdp`, or with HSDP the same ranks as (replicate, shard)
    sharding: DeviceMesh
    experts: DeviceMesh | None = None  # axes pp and `expert_axes`; None without experts
    kv_heads: DeviceMesh | None = None  # axes (kv_head, kv_copy); None without copies of KV heads
    # This rank's group for each kind of link (`wlb.parallel.grid.LINKS`). A group has this rank
    # and one neighbour, or this rank alone. Empty without a pipeline.
    links: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def at(self) -> Coordinates:
        """This rank's index along each axis."""
        return coordinates(self.rank, self.parallel)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.parallel.world_size

    @property
    def fsdp_rank(self) -> int:
        """This rank's index along the axis `fsdp`."""
        return self.at.dp * self.parallel.cp + self.at.cp

    @property
    def fsdp_size(self) -> int:
        """Number of ranks along the axis `fsdp`, dp x cp."""
        return self.parallel.dp * self.parallel.cp

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All process groups of this rank: those of the meshes' axes, and those of `links`."""
        meshes = (self.device_mesh, self.fsdp, self.sharding, self.experts, self.kv_heads)
        groups = [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]
        return [*groups, *self.links.values()]

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return self.sharding.size(self.sharding.ndim - 1)

    @property
    def shard_rank(self) -> int:
        """This rank's index among the ranks that share one copy of the parameters."""
        return self.fsdp_rank % self.shard_size

    @property
    def replica(self) -> int:
        """Which copy of the parameters this rank's shard belongs to; 0 without HSDP."""
        return self.fsdp_rank // self.shard_size

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Names of the axes of the mesh `experts`, without pp. Only for a model with experts."""
        assert self.experts is not None
        return (self.experts.mesh_dim_names or ())[1:]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's group along "tp", "cp", "pp", "dp" or "fsdp"."""
        return self.fsdp.get_group() if axis == FSDP else self.device_mesh.get_group(axis)

    @property
    def link_before(self) -> dist.ProcessGroup:
        """The group of this pipeline rank and the one before; the last rank precedes the first."""
        return self._link((self.at.pp - 1) % self.parallel.pp)

    @property
    def link_after(self) -> dist.ProcessGroup:
        """The group of this pipeline rank and the one after; the first rank follows the last."""
        return self._link(self.at.pp)

    def _link(self, link: int) -> dist.ProcessGroup:
        return self.links[kind_of_link(link, self.parallel.pp)]


def used_groups(mesh: Mesh) -> list[tuple[str, dist.ProcessGroup]]:
    """Return the (name, group) of each of this rank's communicators that a training step uses.

    Groups of one rank are left out, and a group with several names is listed once. The order is the
    same on all ranks. torch also makes groups for `pp`, for `dp`, and with HSDP for `fsdp`, which
    nothing uses.
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
    """Build the mesh over all ranks. This is a collective call.

    Args:
        parallel: Degrees of all axes. Their product must be the number of ranks.
        device: Device of this rank.
        shard_size: Ranks that share one copy of the weights, a divisor of dp * cp. 0 means all.
        model: The model, whose experts or copies of KV heads may need more groups. With None these
            groups are not made.

    Raises:
        UserError: The degrees do not multiply to the number of running ranks.
    """
    world_size = dist.get_world_size()
    if parallel.dp < 1 or parallel.world_size != world_size:
        raise UserError(
            f"parallel.tp = {parallel.tp} x parallel.cp = {parallel.cp} x parallel.pp "
            f"= {parallel.pp} x parallel.dp = {parallel.dp} must equal the number of "
            f"ranks that run, {world_size}; set parallel.dp = ranks / (tp x cp x pp), "
            "or start as many ranks as the product"
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
        links={kind: _group_of(parts, kind) for kind, parts in link_members(parallel).items()},
    )


def _group_of(parts: list[list[int]], name: str) -> dist.ProcessGroup:
    """Make one group for each part in `parts`, and return the group that contains this rank.

    This is a collective call. The parts must be disjoint and together contain all ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        # With NCCL, one ncclCommSplit makes the communicators of all parts, as torch does for a
        # mesh.
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
    # Unflatten the axis instead of building a new mesh, for the reason given in `_sharding`.
    return tp._unflatten(0, (tp.size() // copies, copies), (KV_HEAD, KV_COPY))


def _sharding(fsdp: DeviceMesh, shard_size: int) -> DeviceMesh:
    copies, rest = divmod(fsdp.size(), shard_size)
    if rest:
        raise UserError(
            f"fsdp.shard_size = {shard_size} must divide the {fsdp.size()} ranks of "
            f"parallel.dp x parallel.cp; set a divisor of {fsdp.size()}"
        )
    # Unflatten the axis instead of building a new mesh: FSDP combines these axes with tp, for which
    # both must come from the same root mesh.
    return fsdp if copies == 1 else fsdp._unflatten(0, (copies, shard_size), HSDP)


def limit_collectives(timeout_s: float, mesh: Mesh | None = None) -> None:
    """Set the timeout of collectives in all groups of a mesh, or in the two groups of all ranks.

    Without this call a new group has torch's timeout of half an hour, even if the default group has
    another one.

    Args:
        timeout_s: Seconds that a collective may wait for other ranks.
        mesh: The mesh. None means the default group and the Gloo group, which have all ranks.
    """
    for group in [dist.group.WORLD, host_group()] if mesh is None else mesh.groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
