"""Costs of a step that do not depend on its documents: FSDP collectives, gradient norm, AdamW.

Parameters are gathered in the compute dtype and gradients reduced in float32 over dp x cp ranks,
one collective a layer (FSDP2); embedding and head count among the layers of their stage. The norm
reads the gradients and all-reduces a few bytes. AdamW is bound by memory: it reads weight, two
moments and gradient and writes the first three, priced as the residual addition is.
"""

from dataclasses import dataclass

from wlb.cost import Collective, CollectiveCost, Elementwise, ProfiledWorkload
from wlb.cost.experts import experts_of_layer, stored_parameters
from wlb.cost.linear import GRADIENT_BYTES
from wlb.cost.memory import stage_parameters
from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import UserError
from wlb.simulate.graph import Node, NodeKind
from wlb.simulate.program import looks_ahead
from wlb.spec import ParallelSpec, RunSpec

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
    ranks = parallel.fsdp_size
    spread = fsdp_span(parallel, profile.ranks_per_node)
    gather, scatter = (
        profile.collective(op, span_ranks=spread, num_ranks=ranks)
        for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    parts = tuple(max(1, layers) for layers in spec.stage_layers)
    whole = (1,) * spec.num_stages
    is_ahead = looks_ahead(spec.pp.schedule, pp=parallel.pp)
    counts = [stage_parameters(spec, stage=s) for s in range(spec.num_stages)]
    # Experts that no other rank holds are neither gathered nor reduced.
    alone = experts_of_layer(spec) * (parallel.expert_ranks == parallel.ep)
    shared = [c - n * alone for c, n in zip(counts, spec.stage_expert_layers, strict=True)]
    of_rank = [_stored(spec, counts, pp_rank) for pp_rank in range(parallel.pp)]
    copy = profile.elementwise_of(Elementwise.RESIDUAL).forward_bytes_per_s
    reduce = profile.collective(Collective.ALL_REDUCE, span_ranks=parallel.world_size)
    dtype = DTYPE_BYTES[profile.dtype]

    def of_stages(collective: CollectiveCost, value_bytes: int) -> tuple[int, ...]:
        """A stage's collectives, one a layer."""
        return tuple(
            round(layers * collective.time_ns(count * value_bytes / layers, num_ranks=ranks))
            for count, layers in zip(shared, parts, strict=True)
        )

    return ShardCosts(
        gather_ns=of_stages(gather, dtype),
        reduce_ns=of_stages(scatter, GRADIENT_BYTES),
        norm_ns=round(
            max(of_rank) * NORM_VALUES * GRADIENT_BYTES / copy * 1e9
            + reduce.time_ns(GRADIENT_BYTES, num_ranks=parallel.world_size)
        ),
        optimizer_ns=tuple(round(c * ADAMW_VALUES * GRADIENT_BYTES / copy * 1e9) for c in of_rank),
        gather_parts=whole if is_ahead else parts,
        reduce_parts=parts if parallel.pp == 1 else whole,
    )


def _stored(spec: RunSpec, counts: list[int], pp_rank: int) -> int:
    """Parameters that a rank updates, of stages with `counts` on a TP rank."""
    stages = list(spec.stages_of(pp_rank))
    with_experts = sum(spec.stage_expert_layers[stage] for stage in stages)
    return stored_parameters(spec, sum(counts[stage] for stage in stages), with_experts)


def _refuse_unpriced(spec: RunSpec) -> None:
    for name, value, plain in (
        ("shard_size", spec.shard_size, spec.parallel.fsdp_size),
        ("reshard_after_forward", spec.fsdp.reshard_after_forward, False),
    ):
        if value != plain:
            raise UserError(
                f"fsdp.{name} = {str(value).lower()} is not simulated: parameters are priced as "
                f"gathered once a step over all of dp x cp; set fsdp.{name} = "
                f"{0 if name == 'shard_size' else 'false'} here"
            )


def fsdp_span(parallel: ParallelSpec, ranks_per_node: int) -> int:
    """Number of consecutive ranks over which the FSDP group is as dense as inside a node.

    Its cp ranks are a tp group apart, its dp parts a pipeline: where a node holds several stages,
    or part of one, only the ranks of one stage are members.
    """
    stage = parallel.tp * parallel.cp
    return min(parallel.model_ranks, max(stage, ranks_per_node)) * max(1, parallel.dp)
