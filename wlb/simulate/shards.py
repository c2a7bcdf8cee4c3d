"""Costs of a step that do not depend on its documents: FSDP collectives, gradient norm, AdamW.

Parameters are gathered in the compute dtype and gradients reduced in float32 over dp x cp ranks,
one collective a layer (FSDP2); embedding and head count among the layers of their stage. A layer's
experts have a collective of their own, over the ranks that hold equal ones. With HSDP both are over
the ranks of one copy, and shards of gradients are then all-reduced over copies. The norm reads the
gradients and all-reduces a few bytes. AdamW is bound by memory: it reads weight, two moments and
gradient and writes the first three, priced as the residual addition is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from wlb.cost import Collective, CollectiveCost, Elementwise, KernelProfile, ProfiledWorkload
from wlb.cost.experts import experts_of_layer, sharing_ranks, stored_parameters
from wlb.cost.linear import GRADIENT_BYTES
from wlb.cost.memory import stage_parameters
from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import UserError
from wlb.simulate.graph import Node, NodeKind
from wlb.simulate.program import looks_ahead
from wlb.spec import ParallelSpec, RunSpec

Stages = tuple[int, ...]
ADAMW_VALUES, NORM_VALUES = 7, 1
"""float32 values read and written for one parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCosts:
    """Durations in ns. gather_ns, reduce_ns: by stage. optimizer_ns: by pipeline rank.
    gather_parts, reduce_parts: layers of a stage where all but one hide behind passes, else 1.
    """

    gather_ns: tuple[int, ...]
    reduce_ns: tuple[int, ...]
    norm_ns: int
    optimizer_ns: tuple[int, ...]
    gather_parts: tuple[int, ...]
    reduce_parts: tuple[int, ...]

    def of(self, node: Node) -> int:
        """Duration of a node that is neither a pass nor a message."""
        match node.kind:
            case NodeKind.GATHER | NodeKind.PREFETCH:
                whole, parts = self.gather_ns[node.stage], self.gather_parts[node.stage]
                return whole // parts if node.kind == NodeKind.GATHER else whole - whole // parts
            case NodeKind.REDUCE | NodeKind.REDUCE_AHEAD:
                whole, parts = self.reduce_ns[node.stage], self.reduce_parts[node.stage]
                return whole // parts if node.kind == NodeKind.REDUCE else whole - whole // parts
            case NodeKind.NORM:
                return self.norm_ns
            case _:
                return self.optimizer_ns[node.rank]


def shard_costs(spec: RunSpec, cost: ProfiledWorkload) -> ShardCosts:
    """Prices for a layout; UserError for options of [fsdp] that have no price."""
    _refuse_unpriced(spec)
    parallel, profile = spec.parallel, cost.profile
    parts = tuple(max(1, layers) for layers in spec.stage_layers)
    whole = (1,) * spec.num_stages
    is_ahead = looks_ahead(spec.pp.schedule, pp=parallel.pp)
    counts = [stage_parameters(spec, stage=s) for s in range(spec.num_stages)]
    of_rank = [_stored(spec, counts, pp_rank) for pp_rank in range(parallel.pp)]
    copy = profile.elementwise_of(Elementwise.RESIDUAL).forward_bytes_per_s
    reduce = profile.collective(Collective.ALL_REDUCE, span_ranks=parallel.world_size)
    of_experts = experts_of_layer(spec)
    with_experts = spec.stage_expert_layers
    dense = [c - n * of_experts for c, n in zip(counts, with_experts, strict=True)]
    whole_layers = _sharing(spec, profile, spec.shard_size)
    experts = _sharing(spec, profile, sharing_ranks(spec))

    def of_stages(of_dense: Callable[[float], float], of_held: Callable[[float], float]) -> Stages:
        """A stage's collectives, one a layer and one for its experts."""
        held_ns = of_held(of_experts) if of_experts else 0.0
        return tuple(
            round(layers * of_dense(count / layers) + num * held_ns)
            for count, layers, num in zip(dense, parts, with_experts, strict=True)
        )

    return ShardCosts(
        gather_ns=of_stages(whole_layers.gather_ns, experts.gather_ns),
        reduce_ns=of_stages(whole_layers.reduce_ns, experts.reduce_ns),
        norm_ns=round(
            max(of_rank) * NORM_VALUES * GRADIENT_BYTES / copy * 1e9
            + reduce.time_ns(GRADIENT_BYTES, num_ranks=parallel.world_size)
        ),
        optimizer_ns=tuple(round(c * ADAMW_VALUES * GRADIENT_BYTES / copy * 1e9) for c in of_rank),
        gather_parts=whole if is_ahead else parts,
        reduce_parts=parts if parallel.pp == 1 else whole,
    )


class _Sharing(NamedTuple):
    """Ranks that share a parameter: `shards` of one copy, and `copies` of each shard."""

    shards: int
    copies: int
    gather: CollectiveCost
    scatter: CollectiveCost
    add: CollectiveCost
    dtype_bytes: int

    def gather_ns(self, count: float) -> float:
        return self.gather.time_ns(count * self.dtype_bytes, num_ranks=self.shards)

    def reduce_ns(self, count: float) -> float:
        size = count * GRADIENT_BYTES
        within = self.scatter.time_ns(size, num_ranks=self.shards)
        return within + self.add.time_ns(size / self.shards, num_ranks=self.copies)


def _sharing(spec: RunSpec, profile: KernelProfile, shards: int) -> _Sharing:
    """How `shards` ranks of each copy share parameters."""
    parallel, copies = spec.parallel, spec.parallel.fsdp_size // spec.shard_size
    node = profile.ranks_per_node
    of_copy = fsdp_span(parallel, node, spec.shard_size)
    gather, scatter = (
        profile.collective(op, span_ranks=of_copy, num_ranks=shards)
        for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    whole = fsdp_span(parallel, node)
    return _Sharing(
        shards=shards,
        copies=copies,
        gather=gather,
        scatter=scatter,
        add=profile.collective(Collective.ALL_REDUCE, span_ranks=whole, num_ranks=copies),
        dtype_bytes=DTYPE_BYTES[profile.dtype],
    )


def _stored(spec: RunSpec, counts: list[int], pp_rank: int) -> int:
    """Parameters that a rank updates, of stages with `counts` on a TP rank."""
    stages = list(spec.stages_of(pp_rank))
    with_experts = sum(spec.stage_expert_layers[stage] for stage in stages)
    return stored_parameters(spec, sum(counts[stage] for stage in stages), with_experts)


def _refuse_unpriced(spec: RunSpec) -> None:
    if spec.fsdp.reshard_after_forward:
        raise UserError(
            "fsdp.reshard_after_forward = true is not simulated: parameters are priced as gathered "
            "once a step; set fsdp.reshard_after_forward = false here"
        )


def fsdp_span(parallel: ParallelSpec, ranks_per_node: int, size: int | None = None) -> int:
    """Number of consecutive ranks over which the FSDP group is as dense as inside a node. size: of
    the group's ranks, those of one copy (HSDP); None: all.

    Its cp ranks are a tp group apart, its dp parts a pipeline: where a node holds several stages,
    or part of one, only the ranks of one stage are members.
    """
    stage = parallel.tp * parallel.cp
    if size is not None and size < parallel.cp:
        return parallel.tp * size
    pipelines = max(1, parallel.dp) if size is None else -(-size // parallel.cp)
    return min(parallel.model_ranks, max(stage, ranks_per_node)) * pipelines
