"""Costs of a step that do not depend on its documents: FSDP collectives, gradient norm and AdamW.

FSDP gathers parameters in the compute dtype and reduces gradients in float32, with one collective
per layer (FSDP2), over dp x cp ranks. Embedding and head count as layers of their stage. A layer's
experts have a separate collective over the ranks that have the same experts. With HSDP the
collectives are over the ranks of one copy, and shards of gradients are then all-reduced over
copies.

The gradient norm reads the gradients and all-reduces a few bytes. AdamW is memory-bound: it reads
weight, two moments and gradient and writes the first three, at the throughput of the residual
addition.

With `fsdp.reshard_after_forward` every pass gathers its layers, one layer ahead of the computation.
`FsdpExecution` describes what other trainers do differently.
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
"""A value for each stage."""
COLLECTIVE_NODES = frozenset(
    (NodeKind.GATHER, NodeKind.PREFETCH, NodeKind.REDUCE, NodeKind.REDUCE_AHEAD)
)
"""Kinds of nodes that gather parameters or reduce gradients."""
ADAMW_VALUES, NORM_VALUES = 7, 1
"""Float32 values that AdamW and the gradient norm read and write for one parameter."""

FSDP_SLOWDOWN = 0.32
"""Seconds that computation loses for each second of FSDP collectives that run beside it.

NCCL occupies SMs and memory bandwidth. The value is fitted to published runs
(`experiments/beyond/published_runs`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpExecution:
    """How a trainer shards, reduces and updates parameters. The defaults are what wlb does."""

    # True: gradients are reduced after every backward pass, FSDP's default. False: after a step's
    # last one.
    reduces_every_pass: bool = False
    gradient_bytes: int = GRADIENT_BYTES  # Bytes of one gradient value while it is reduced.
    # Bytes per parameter that a gather copies on the GPU: FSDP2 copies out of the gathered buffer,
    # FSDP1 does not. This and the next three fields only count with `fsdp.reshard_after_forward`.
    gather_copy_bytes: int = 0
    reduce_copy_bytes: int = 0  # Bytes per parameter that a reduction copies on the GPU.
    # True: backward gathers a layer while the one before it computes. False: after it.
    prefetches_backward: bool = True
    # Seconds that computation loses for each second of a collective beside it.
    slowdown: float = FSDP_SLOWDOWN
    # Float32 values that the optimizer reads and writes per parameter; 7 in a fused kernel.
    update_values: int = ADAMW_VALUES

    def __post_init__(self) -> None:
        check_between("slowdown", self.slowdown, 0, 1, closed=True)


WLB_FSDP = FsdpExecution()
"""How wlb itself does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCosts:
    """Prices of a step's work on sharded parameters.

    With `fsdp.reshard_after_forward` every pass gathers its layers. The collectives are then part
    of the passes (`pass_ns`), and their nodes in the graph take no time.
    """

    gather_ns: tuple[int, ...]  # gathering all parameters of a stage, by stage
    reduce_ns: tuple[int, ...]  # reducing all gradients of a stage, by stage
    norm_ns: int  # gradient norm
    optimizer_ns: tuple[int, ...]  # AdamW, by pipeline rank
    # Number of equal gathers of a stage, by stage: its layers if all gathers but the first hide
    # behind a pass, else 1.
    gather_parts: tuple[int, ...]
    reduce_parts: tuple[int, ...]  # The same for reductions.
    layers: tuple[int, ...]  # layers by stage, at least 1
    # copies of a stage's (gather, reduction) on the GPU, by stage
    copy_ns: tuple[tuple[float, float], ...]
    execution: FsdpExecution  # what the trainer does
    reshards: bool = False  # whether each pass gathers its layers

    def pass_ns(
        self, computes_ns: IntArray, stage: int, kind: PassKind, *, reduces: bool
    ) -> IntArray:
        """Return the duration of a pass that gathers, and perhaps reduces, layer by layer.

        Each layer's collectives run beside the computation of one layer. The pass waits for the
        part that takes longer than a layer, and for the first gather and the last reduction.

        Args:
            computes_ns: The pass without collectives of parameters.
            stage: Its stage.
            kind: Its kind.
            reduces: Whether it reduces the gradients of its layers.
        """
        layers, execution = self.layers[stage], self.execution
        # The weight-gradient pass of a split backward needs no parameters.
        gathers = kind != PassKind.BACKWARD_WEIGHT
        gather = self.gather_ns[stage] * gathers / layers
        reduce = self.reduce_ns[stage] * reduces / layers
        is_ahead = kind == PassKind.FORWARD or execution.prefetches_backward
        # Collectives that run beside the computation of one layer; what takes longer is exposed.
        beside = gather * is_ahead + reduce
        late = np.maximum(0.0, beside - computes_ns / layers) * (layers - 1)
        # Nothing hides the first gather and the last reduction, nor gathers without prefetch.
        exposed = gather + reduce + late + gather * (not is_ahead) * (layers - 1)
        hidden = (gather + reduce) * layers - exposed
        of_gather, of_reduction = self.copy_ns[stage]
        out = computes_ns + of_gather * gathers + of_reduction * reduces + exposed
        return np.rint(out + execution.slowdown * hidden).astype(np.int64)

    def of(self, node: Node) -> int:
        """Return the duration of a node that is neither a pass nor a message."""
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
    """Return the prices for a layout; `execution` describes the trainer."""
    parallel, profile = spec.parallel, cost.profile
    # A stage without layers still has the embedding or the head.
    parts = tuple(max(1, layers) for layers in spec.stage_layers)
    whole = (1,) * spec.num_stages
    is_ahead = looks_ahead(spec.pp.schedule, pp=parallel.pp)
    counts = [stage_parameters(spec, stage=s) for s in range(spec.num_stages)]
    of_rank = [_stored(spec, counts, pp_rank) for pp_rank in range(parallel.pp)]
    # Memory-bound work runs at the throughput of the residual addition.
    copy = profile.elementwise_of(Elementwise.RESIDUAL).forward_bytes_per_s
    reduce = profile.collective(Collective.ALL_REDUCE, span_ranks=parallel.world_size)
    of_experts = experts_of_layer(spec)
    with_experts = spec.stage_expert_layers
    dense = [c - n * of_experts for c, n in zip(counts, with_experts, strict=True)]
    whole_layers = _sharing(spec, profile, spec.shard_size, execution.gradient_bytes)
    experts = _sharing(spec, profile, sharing_ranks(spec), execution.gradient_bytes)

    def of_stages(of_dense: Callable[[float], float], of_held: Callable[[float], float]) -> Stages:
        """Return a stage's collectives: one for each layer, and one for each layer's experts."""
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
    """Return the time to sum the gradients of K's and V's projections over TP ranks, once a step.

    This is needed where several TP ranks have copies of one KV head
    (`wlb.parallel.data.finish_gradients`).
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
    """The ranks that share a parameter, and the prices of their collectives."""

    shards: int  # ranks of one copy, each of which has one shard
    copies: int  # copies of each shard (HSDP)
    gather: CollectiveCost  # all-gather within a copy
    scatter: CollectiveCost  # reduce-scatter within a copy
    add: CollectiveCost  # all-reduce over copies
    dtype_bytes: int  # bytes of one gathered value
    gradient_bytes: int  # bytes of one reduced value

    def gather_ns(self, count: float) -> float:
        """Return the time to gather `count` parameters."""
        return self.gather.time_ns(count * self.dtype_bytes, num_ranks=self.shards)

    def reduce_ns(self, count: float) -> float:
        """Return the time to reduce the gradients of `count` parameters."""
        size = count * self.gradient_bytes
        within = self.scatter.time_ns(size, num_ranks=self.shards)
        return within + self.add.time_ns(size / self.shards, num_ranks=self.copies)


def _sharing(spec: RunSpec, profile: KernelProfile, shards: int, gradient_bytes: int) -> _Sharing:
    """Return how parameters are shared if each copy of them has `shards` ranks."""
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
    """Count the parameters that a rank updates; `counts` are those of each stage on a TP rank."""
    stages = list(spec.stages_of(pp_rank))
    with_experts = sum(spec.stage_expert_layers[stage] for stage in stages)
    return stored_parameters(spec, sum(counts[stage] for stage in stages), with_experts)


def fsdp_span(parallel: ParallelSpec, ranks_per_node: int, size: int | None = None) -> int:
    """Return the number of consecutive ranks over which an FSDP group is spread evenly.

    The members are as dense over that span as inside a node. Consecutive CP ranks are one TP group
    apart and consecutive dp ranks one pipeline apart. If a node has several stages, or part of one,
    only the ranks of one stage are members.

    Args:
        parallel: Degrees of parallelism.
        ranks_per_node: Ranks of a node.
        size: Ranks of one copy (HSDP); None: all ranks.
    """
    stage = parallel.tp * parallel.cp
    if size is not None and size < parallel.cp:
        return parallel.tp * size
    pipelines = max(1, parallel.dp) if size is None else -(-size // parallel.cp)
    return min(parallel.model_ranks, max(stage, ranks_per_node)) * pipelines
