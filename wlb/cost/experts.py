"""Sizes of a mixture of experts on a rank, with equally loaded experts.

Rows of a rank that holds popular experts exceed these in the ratio that telemetry reports.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from wlb.cost.profile import DTYPE_BYTES, Collective, KernelProfile
from wlb.spec import ModelSpec, ParallelSpec, RunSpec


def experts_of_layer(spec: RunSpec) -> int:
    """Parameters of a layer's experts on one EP rank, without router and shared experts."""
    experts = spec.model.experts
    return experts.num * 3 * spec.model.hidden_size * experts.hidden_size // spec.parallel.ep


def sums_by_stage(spec: RunSpec, of_layer: Callable[[RunSpec], int]) -> list[int]:
    """Of each stage, the sum over its layers of `of_layer`, which is given `spec` with experts in
    all layers, or in none (`kinds_of`)."""
    counts = list(zip(spec.stage_layers, spec.stage_expert_layers, strict=True))
    dense, routed = _both_kinds(spec)
    of_dense = int(of_layer(dense)) if any(n > r for n, r in counts) else 0
    of_routed = int(of_layer(routed)) if any(r for _, r in counts) else 0
    return [(n - r) * of_dense + r * of_routed for n, r in counts]


def sum_over(spec: RunSpec, stages: Iterable[int], of_layer: Callable[[RunSpec], int]) -> int:
    """The sum over the layers of some stages of `of_layer`, as in `sums_by_stage`."""
    dense, routed = _count(spec, stages)
    kinds = zip((dense, routed), _both_kinds(spec), strict=True)
    return sum(count * int(of_layer(kind)) for count, kind in kinds if count)


def _count(spec: RunSpec, stages: Iterable[int]) -> tuple[int, int]:
    """Layers of some stages with an MLP, and with experts."""
    chosen = list(stages)
    layers, of_experts = spec.stage_layers, spec.stage_expert_layers
    routed = sum(of_experts[stage] for stage in chosen)
    return sum(layers[stage] for stage in chosen) - routed, routed


def kinds_of(spec: RunSpec, stages: Iterable[int]) -> tuple[RunSpec, ...]:
    """`spec` for sizes of each kind of layer that some stages have: of layers with an MLP, and of
    those with experts. Stages without layers count as having the model's last one."""
    counts = zip(_both_kinds(spec), _count(spec, stages), strict=True)
    found = tuple(kind for kind, count in counts if count)
    return found or (_both_kinds(spec)[spec.model.has_experts(spec.model.num_layers - 1)],)


def _both_kinds(spec: RunSpec) -> tuple[RunSpec, RunSpec]:
    """(layers with an MLP, layers with experts); equal without experts."""
    return (replace(spec, model=spec.model.dense) if spec.model.experts.num else spec), spec


def stored_parameters(spec: RunSpec, count: int, layers: int) -> int:
    """Parameters that a rank stores of `count` on a TP rank, with experts in `layers` layers:
    FSDP's shard, of experts that of the ranks with equal experts."""
    experts = layers * experts_of_layer(spec)
    equal = spec.parallel.expert_ranks // spec.parallel.ep
    return -(-(count - experts) // spec.shard_size) + -(-experts // equal)


def divides_experts(spec: RunSpec) -> bool:
    """Whether several ranks hold equal experts, so that FSDP shards them."""
    return bool(spec.model.experts.num) and spec.parallel.expert_ranks > spec.parallel.ep


def mlp_values(model: ModelSpec) -> int:
    """Values of a token that MLPs keep for backward: gate, up and their product. Experts keep its
    copies instead of the product, which they compute again."""
    experts = model.experts
    if not experts.num:
        return 3 * model.ffn_hidden_size
    routed = experts.per_token * (model.hidden_size + 2 * experts.hidden_size)
    return routed + 3 * experts.shared_hidden_size


def order_bytes(model: ModelSpec) -> int:
    """Bytes of a token's places among the rows of experts, on both sides of an exchange and back;
    autograd functions hold them whatever is recomputed."""
    return bool(model.experts.num) * 3 * 8 * model.experts.per_token


def exchanged_values(model: ModelSpec) -> int:
    """Values of a token's copies in backward: rows and gradients before and after an exchange, in
    two orders."""
    return bool(model.experts.num) * 4 * model.experts.per_token * model.hidden_size


def routed_wire_ns(model: ModelSpec, parallel: ParallelSpec, profile: KernelProfile) -> float:
    """Bandwidth term of one all-to-all of a token's copies to their experts, in one layer: those
    that stay in the node at an all-gather's bandwidth, the others over the rank's own link. model:
    all of whose layers have experts."""
    near = min(parallel.ep, profile.ranks_per_node)
    row_bytes = model.hidden_size * DTYPE_BYTES[profile.dtype]
    rows = model.experts.per_token / (parallel.cp * parallel.tp) / parallel.ep
    inside = profile.collective(Collective.ALL_GATHER, span_ranks=1).bytes_per_s
    link = profile.collective(Collective.P2P, span_ranks=profile.ranks_per_node + 1).bytes_per_s
    seconds = (near - 1) / inside + (parallel.ep - near) / link
    return rows * row_bytes * seconds * 1e9
