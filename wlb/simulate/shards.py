"""Costs of a step that do not depend on its documents: FSDP collectives, gradient norm and AdamW.

FSDP all-gathers parameters in the compute dtype and reduce-scatters gradients in float32, with one
collective per layer (FSDP2), over dp x cp ranks. The parameters of embedding and head are added to
the layers of their stage. The experts of a layer have a separate collective, over the ranks that
have the same experts. With HSDP these collectives run among the ranks of one copy of the model, and
the shards of gradients are then all-reduced over all copies.

The gradient norm reads the gradients and all-reduces a few bytes. AdamW reads the weight, two
moments and the gradient, and writes the weight and the moments. The norm and AdamW are both
memory-bound, and are priced with the memory throughput that was measured for residual additions.

With `fsdp.reshard_after_forward` every pass gathers its layers, one layer ahead of the computation.
`FsdpExecution` describes how other trainers differ.
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
"""One value for each stage."""
COLLECTIVE_NODES = frozenset(
    (NodeKind.GATHER, NodeKind.PREFETCH, NodeKind.REDUCE, NodeKind.REDUCE_AHEAD)
)
"""Kinds of graph nodes that gather parameters or reduce gradients."""
ADAMW_VALUES, NORM_VALUES = 7, 1
"""Number of float32 values that AdamW and the gradient norm read and write for each parameter."""

FSDP_SLOWDOWN = 0.32
"""Seconds that computation loses for each second of FSDP collectives that run at the same time.

NCCL occupies SMs and memory bandwidth, so computation is slower at that time. The value was fitted
to published runs (`experiments/beyond/published_runs`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpExecution:
    """How a trainer gathers, reduces and updates parameters. The defaults are what wlb does."""

    # Whether gradients are reduced after every backward pass, which is FSDP's default, or only
    # after the last backward pass of a step.
    reduces_every_pass: bool = False
    gradient_bytes: int = GRADIENT_BYTES  # bytes of one gradient value while it is reduced
    # Bytes for each parameter that a gather copies on the GPU. FSDP2 copies parameters out of the
    # gathered buffer, FSDP1 does not. This field and the next three are used only with
    # `fsdp.reshard_after_forward`.
    gather_copy_bytes: int = 0
    reduce_copy_bytes: int = 0  # bytes for each parameter that a reduction copies on the GPU
    # Whether backward gathers a layer while it computes another layer. Otherwise computation waits
    # for each gather.
    prefetches_backward: bool = True
    # Seconds that computation loses for each second of a collective that runs at the same time.
    slowdown: float = FSDP_SLOWDOWN
    # Number of float32 values that the optimizer reads and writes for each parameter. A fused
    # AdamW kernel has 7.
    update_values: int = ADAMW_VALUES

    def __post_init__(self) -> None:
        check_between("slowdown", self.slowdown, 0, 1, closed=True)


WLB_FSDP = FsdpExecution()
"""How wlb itself gathers, reduces and updates parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCosts:
    """Times that FSDP's collectives, the gradient norm and AdamW take in a step.

    With `fsdp.reshard_after_forward` every pass gathers its layers. The collectives are then part
    of the passes (`pass_ns`), and their nodes in the graph take no time.
    """

    gather_ns: tuple[int, ...]  # time to gather all parameters of each stage
    reduce_ns: tuple[int, ...]  # time to reduce all gradients of each stage
    norm_ns: int  # time of the gradient norm
    optimizer_ns: tuple[int, ...]  # time of AdamW on each pipeline rank
    # Number of equal parts in which each stage's parameters are gathered: its number of layers if
    # passes wait only for the first part, because the others are gathered during a pass; otherwise
    # 1.
    gather_parts: tuple[int, ...]
    # Number of equal parts in which each stage's gradients are reduced: its number of layers if the
    # step waits only for the last part, because the others are reduced during backward; otherwise
    # 1.
    reduce_parts: tuple[int, ...]
    layers: tuple[int, ...]  # number of layers of each stage, at least 1
    # For each stage, the ns in which the GPU copies (gathered parameters, gradients to be reduced)
    # between buffers.
    copy_ns: tuple[tuple[float, float], ...]
    execution: FsdpExecution  # how the trainer gathers, reduces and updates parameters
    reshards: bool = False  # whether each pass gathers its layers

    def pass_ns(
        self, computes_ns: IntArray, stage: int, kind: PassKind, *, reduces: bool
    ) -> IntArray:
        """Return the duration of a pass that gathers parameters, and perhaps reduces gradients.

        The pass gathers and reduces one layer at a time, during the computation of another layer.
        The pass waits if a layer's collectives take longer than that computation. It also waits for
        the first gather and the last reduction.

        Args:
            computes_ns: Duration of the pass without these collectives.
            stage: Stage of the pass.
            kind: Kind of the pass.
            reduces: Whether the pass reduces the gradients of its layers.
        """
        layers, execution = self.layers[stage], self.execution
        # The weight-gradient pass of a split backward needs no parameters.
        gathers = kind != PassKind.BACKWARD_WEIGHT
        gather = self.gather_ns[stage] * gathers / layers
        reduce = self.reduce_ns[stage] * reduces / layers
        is_ahead = kind == PassKind.FORWARD or execution.prefetches_backward
        # Time of the collectives that run during the computation of one layer. The part of it that
        # exceeds the layer's time makes the pass longer.
        beside = gather * is_ahead + reduce
        late = np.maximum(0.0, beside - computes_ns / layers) * (layers - 1)
        # No computation hides the first gather and the last reduction. Without prefetching, no
        # computation hides the other gathers either.
        exposed = gather + reduce + late + gather * (not is_ahead) * (layers - 1)
        hidden = (gather + reduce) * layers - exposed
        of_gather, of_reduction = self.copy_ns[stage]
        out = computes_ns + of_gather * gathers + of_reduction * reduces + exposed
        return np.rint(out + execution.slowdown * hidden).astype(np.int64)

    def of(self, node: Node) -> int:
        """Return the ns of a node of the graph: an FSDP collective, the gradient norm or AdamW."""
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
    """Return the times of FSDP's collectives, the gradient norm and AdamW for a run.

    Args:
        spec: The run.
        cost: Prices.
        execution: How the trainer gathers, reduces and updates parameters.
    """
    parallel, profile = spec.parallel, cost.profile
    # A stage without layers still has the parameters of the embedding or the head.
    parts = tuple(max(1, layers) for layers in spec.stage_layers)
    whole = (1,) * spec.num_stages
    is_ahead = looks_ahead(spec.pp.schedule, pp=parallel.pp)
    counts = [stage_parameters(spec, stage=s) for s in range(spec.num_stages)]
    of_rank = [_stored(spec, counts, pp_rank) for pp_rank in range(parallel.pp)]
    # Assume that copies, the norm and AdamW have the memory throughput of the residual addition,
    # because no profile measures them.
    copy = profile.elementwise_of(Elementwise.RESIDUAL).forward_bytes_per_s
    reduce = profile.collective(Collective.ALL_REDUCE, span_ranks=parallel.world_size)
    of_experts = experts_of_layer(spec)
    with_experts = spec.stage_expert_layers
    dense = [c - n * of_experts for c, n in zip(counts, with_experts, strict=True)]
    whole_layers = _sharing(spec, profile, spec.shard_size, execution.gradient_bytes)
    experts = _sharing(spec, profile, sharing_ranks(spec), execution.gradient_bytes)

    def of_stages(of_dense: Callable[[float], float], of_held: Callable[[float], float]) -> Stages:
        """Return, for each stage, the ns to gather (or to reduce) all of its layers.

        A layer with experts has a second collective, for the parameters of its routed experts.

        Args:
            of_dense: Returns the ns for a given number of parameters other than routed experts.
            of_held: Returns the ns for a given number of parameters of routed experts.
        """
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
    """Return the ns to all-reduce the gradients of copied KV heads over TP ranks, once in a step.

    If several TP ranks have copies of one KV head, they add up the gradients of the K and V
    projections of this head (`wlb.parallel.data.finish_gradients`). Without copies the time is 0.
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
    """The ranks over which FSDP shards a parameter, and the costs of their collectives."""

    shards: int  # number of ranks that shard one copy of the parameter
    copies: int  # number of copies; above 1 with HSDP
    gather: CollectiveCost  # cost of an all-gather within a copy
    scatter: CollectiveCost  # cost of a reduce-scatter within a copy
    add: CollectiveCost  # cost of an all-reduce over copies
    dtype_bytes: int  # bytes of one gathered value
    gradient_bytes: int  # bytes of one reduced value

    def gather_ns(self, count: float) -> float:
        """Return the ns to gather `count` parameters."""
        return self.gather.time_ns(count * self.dtype_bytes, num_ranks=self.shards)

    def reduce_ns(self, count: float) -> float:
        """Return the ns to reduce the gradients of `count` parameters."""
        size = count * self.gradient_bytes
        within = self.scatter.time_ns(size, num_ranks=self.shards)
        return within + self.add.time_ns(size / self.shards, num_ranks=self.copies)


def _sharing(spec: RunSpec, profile: KernelProfile, shards: int, gradient_bytes: int) -> _Sharing:
    """Return how many ranks shard some parameters, and what FSDP's collectives of them cost.

    Args:
        spec: The run.
        profile: Measured costs of collectives.
        shards: Number of ranks that shard one copy of the parameters.
        gradient_bytes: Bytes of one gradient value while it is reduced.
    """
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
    """Count the parameters in the FSDP shard of a pipeline rank, which the optimizer updates.

    Args:
        spec: The run.
        counts: Unsharded parameters of each stage on one TP rank.
        pp_rank: The pipeline rank.
    """
    stages = list(spec.stages_of(pp_rank))
    with_experts = sum(spec.stage_expert_layers[stage] for stage in stages)
    return stored_parameters(spec, sum(counts[stage] for stage in stages), with_experts)


def fsdp_span(parallel: ParallelSpec, ranks_per_node: int, size: int | None = None) -> int:
    """Return the number of consecutive ranks to assume for an FSDP group when it is priced.

    The price of a collective assumes that the group's members are spread evenly over consecutive
    ranks. An FSDP group is not: its neighbours in CP are `tp` ranks apart, and its neighbours in DP
    are a whole pipeline apart. With the returned number of ranks, the assumption puts as many
    members into each node as the node really has.

    Args:
        parallel: Degrees of parallelism.
        ranks_per_node: Number of ranks of a node.
        size: Number of members of the group. With HSDP these are the ranks that share one copy of
            the parameters. None means all dp x cp ranks.
    """
    stage = parallel.tp * parallel.cp
    if size is not None and size < parallel.cp:
        return parallel.tp * size
    pipelines = max(1, parallel.dp) if size is None else -(-size // parallel.cp)
    return min(parallel.model_ranks, max(stage, ranks_per_node)) * pipelines
