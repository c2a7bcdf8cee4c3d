"""Costs of a step that do not depend on its documents: FSDP collectives, gradient norm, AdamW.

Parameters are gathered in the compute dtype and gradients reduced in float32 over dp x cp ranks,
one collective a layer (FSDP2); embedding and head count among the layers of their stage. A layer's
experts have a collective of their own, over the ranks that hold equal ones. With HSDP both are over
the ranks of one copy, and shards of gradients are then all-reduced over copies. The norm reads the
gradients and all-reduces a few bytes. AdamW is bound by memory: it reads weight, two moments and
gradient and writes the first three, priced as the residual addition is.

With `fsdp.reshard_after_forward` every pass gathers its layers again, one ahead of the layer that
computes. `FsdpExecution` says what other trainers do otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb.cost import Collective, CollectiveCost, Elementwise, KernelProfile, ProfiledWorkload
from wlb.cost.profile import DTYPE_BYTES, GRADIENT_BYTES
from wlb.memory.estimate import stage_parameters
from wlb.memory.expert_sizes import experts_of_layer, sharing_ranks, stored_parameters
from wlb.plan import IntArray, check_between
from wlb.simulate.graph import Node, NodeKind
from wlb.simulate.order import PassKind
from wlb.simulate.program import looks_ahead
from wlb.spec import ParallelSpec, RunSpec

Stages = tuple[int, ...]
COLLECTIVE_NODES = frozenset(
    (NodeKind.GATHER, NodeKind.PREFETCH, NodeKind.REDUCE, NodeKind.REDUCE_AHEAD)
)
ADAMW_VALUES, NORM_VALUES = 7, 1
"""float32 values read and written for one parameter."""

FSDP_SLOWDOWN = 0.32
"""Seconds that computing loses for each second of FSDP's collectives beside it, because NCCL
occupies SMs and memory bandwidth. Fitted to published runs
(`experiments/beyond/published_runs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpExecution:
    """How a trainer shards, reduces and updates parameters. The defaults are what wlb does."""

    # Gradients are reduced after every backward pass, as FSDP does unless it is told to wait.
    # False: after the last one of a step.
    reduces_every_pass: bool = False
    # Bytes of a gradient's value while it is reduced.
    gradient_bytes: int = GRADIENT_BYTES
    # Bytes that copies of one parameter move on the GPU for each gather and each reduction: FSDP2
    # copies out of the gathered buffer and into the reduced one, FSDP1 does not. Counted where
    # passes gather for themselves, as the next two are.
    gather_copy_bytes: int = 0
    reduce_copy_bytes: int = 0
    # Whether backward gathers a layer while the one before it computes. False: after it.
    prefetches_backward: bool = True
    # Seconds that computing loses for each second of a collective beside it. Counted where passes
    # gather for themselves.
    slowdown: float = FSDP_SLOWDOWN
    # float32 values that the optimizer reads and writes for one parameter: 7 in a fused kernel.
    update_values: int = ADAMW_VALUES

    def __post_init__(self) -> None:
        check_between("slowdown", self.slowdown, 0, 1, closed=True)


WLB_FSDP = FsdpExecution()
"""What wlb itself does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCosts:
    """Prices of a step's work on sharded parameters; durations in ns.

    With `fsdp.reshard_after_forward` every pass gathers its layers itself: the collectives are then
    part of passes (`pass_ns`), and their own nodes take no time.
    """

    gather_ns: tuple[int, ...]  # by stage
    reduce_ns: tuple[int, ...]  # by stage
    norm_ns: int
    optimizer_ns: tuple[int, ...]  # by pipeline rank
    gather_parts: tuple[int, ...]  # layers of a stage, where all but one hide behind passes; or 1
    reduce_parts: tuple[int, ...]  # likewise
    layers: tuple[int, ...]  # by stage, at least 1
    copy_ns: tuple[tuple[float, float], ...]  # by stage, for a gather and for a reduction
    execution: FsdpExecution
    reshards: bool = False  # whether each pass gathers its layers

    def pass_ns(
        self, computes_ns: IntArray, stage: int, kind: PassKind, *, reduces: bool
    ) -> IntArray:
        """Duration of a pass that gathers, and perhaps reduces, layer by layer.

        Each layer's collectives run beside the computation of one layer, so that what is longer
        than it is waited for, and so are the first gather and the last reduction.

        Args:
            computes_ns: The pass without collectives of parameters.
            stage: Its stage.
            kind: Its kind.
            reduces: Whether it reduces the gradients of its layers.
        """
        layers, execution = self.layers[stage], self.execution
        # The weights' pass of a split backward needs no parameters.
        gathers = kind != PassKind.BACKWARD_WEIGHT
        gather = self.gather_ns[stage] * gathers / layers
        reduce = self.reduce_ns[stage] * reduces / layers
        is_ahead = kind == PassKind.FORWARD or execution.prefetches_backward
        beside = gather * is_ahead + reduce
        late = np.maximum(0.0, beside - computes_ns / layers) * (layers - 1)
        exposed = gather + reduce + late + gather * (not is_ahead) * (layers - 1)
        hidden = (gather + reduce) * layers - exposed
        of_gather, of_reduction = self.copy_ns[stage]
        out = computes_ns + of_gather * gathers + of_reduction * reduces + exposed
        return np.rint(out + execution.slowdown * hidden).astype(np.int64)

    def of(self, node: Node) -> int:
        """Duration of a node that is neither a pass nor a message."""
        if self.reshards and node.kind in COLLECTIVE_NODES:
            return 0
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


def shard_costs(
    spec: RunSpec, cost: ProfiledWorkload, execution: FsdpExecution = WLB_FSDP
) -> ShardCosts:
    """Prices for a layout. execution: what the trainer does."""
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
    whole_layers = _sharing(spec, profile, spec.shard_size, execution.gradient_bytes)
    experts = _sharing(spec, profile, sharing_ranks(spec), execution.gradient_bytes)

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
            + _copied_keys_ns(spec, profile)
            + reduce.time_ns(GRADIENT_BYTES, num_ranks=parallel.world_size)
        ),
        optimizer_ns=tuple(
            round(c * execution.update_values * GRADIENT_BYTES / copy * 1e9) for c in of_rank
        ),
        gather_parts=whole if is_ahead else parts,
        reduce_parts=parts if parallel.pp == 1 else whole,
        layers=parts,
        copy_ns=tuple(
            (
                c * execution.gather_copy_bytes / copy * 1e9,
                c * execution.reduce_copy_bytes / copy * 1e9,
            )
            for c in counts
        ),
        reshards=spec.fsdp.reshard_after_forward and parallel.fsdp_size > 1,
        execution=execution,
    )


def _copied_keys_ns(spec: RunSpec, profile: KernelProfile) -> float:
    """The sum over TP ranks of gradients of K's and V's projections, once a step, where several of
    them hold one KV head (`wlb.parallel.data.finish_gradients`).
    """
    model, copies = spec.model, spec.model.kv_copies(spec.parallel.tp)
    layers = max(
        sum(spec.stage_layers[stage] for stage in spec.stages_of(pp_rank))
        for pp_rank in range(spec.parallel.pp)
    )
    values = layers * 2 * model.head_size * model.hidden_size / spec.shard_size
    cost = profile.collective(Collective.ALL_REDUCE, span_ranks=copies)
    return cost.time_ns(values * GRADIENT_BYTES, num_ranks=copies)


class _Sharing(NamedTuple):
    """Ranks that share a parameter: `shards` of one copy, and `copies` of each shard."""

    shards: int
    copies: int
    gather: CollectiveCost
    scatter: CollectiveCost
    add: CollectiveCost
    dtype_bytes: int
    gradient_bytes: int

    def gather_ns(self, count: float) -> float:
        return self.gather.time_ns(count * self.dtype_bytes, num_ranks=self.shards)

    def reduce_ns(self, count: float) -> float:
        size = count * self.gradient_bytes
        within = self.scatter.time_ns(size, num_ranks=self.shards)
        return within + self.add.time_ns(size / self.shards, num_ranks=self.copies)


def _sharing(spec: RunSpec, profile: KernelProfile, shards: int, gradient_bytes: int) -> _Sharing:
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
        gradient_bytes=gradient_bytes,
    )


def _stored(spec: RunSpec, counts: list[int], pp_rank: int) -> int:
    """Parameters that a rank updates, of stages with `counts` on a TP rank."""
    stages = list(spec.stages_of(pp_rank))
    with_experts = sum(spec.stage_expert_layers[stage] for stage in stages)
    return stored_parameters(spec, sum(counts[stage] for stage in stages), with_experts)


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
