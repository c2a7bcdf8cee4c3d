"""Sizes of a mixture of experts on a rank.

load: rows of the rank over the mean EP rank's (`cost.expert_load`), as telemetry reports them.
"""

from wlb.cost.profile import DTYPE_BYTES, Collective, KernelProfile
from wlb.spec import ModelSpec, ParallelSpec, RunSpec


def experts_of_layer(spec: RunSpec) -> int:
    """Parameters of a layer's experts on one EP rank, without router and shared experts."""
    experts = spec.model.experts
    return experts.num * 3 * spec.model.hidden_size * experts.hidden_size // spec.parallel.ep


def stored_parameters(spec: RunSpec, count: int, layers: int) -> int:
    """Parameters that a rank stores of `count` on a TP rank, in `layers` layers: FSDP's shard, of
    experts that of the ranks with equal experts."""
    experts = layers * experts_of_layer(spec)
    equal = sharing_ranks(spec)
    return -(-(count - experts) // spec.shard_size) + -(-experts // equal)


def sharing_ranks(spec: RunSpec) -> int:
    """Ranks of one copy of the parameters that hold equal experts, which FSDP shards over them."""
    return spec.shard_size * spec.parallel.tp // spec.parallel.ep


def divides_experts(spec: RunSpec) -> bool:
    """Whether several ranks hold equal experts: FSDP shards them, or adds up their copies."""
    return bool(spec.model.experts.num) and spec.parallel.expert_ranks > spec.parallel.ep


def mlp_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Values of a token that MLPs keep for backward: gate, up and their product. Experts keep its
    copies instead of the product, which they compute again."""
    experts = model.experts
    if not experts.num:
        return 3 * model.ffn_hidden_size
    routed = experts.per_token * (model.hidden_size + 2 * experts.hidden_size)
    return round(load * routed) + 3 * experts.shared_hidden_size


def order_bytes(model: ModelSpec) -> int:
    """Bytes of a token's places among the rows of experts, on both sides of an exchange and back;
    autograd functions hold them whatever is recomputed."""
    return bool(model.experts.num) * 3 * 8 * model.experts.per_token


def exchanged_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Values of a token's copies in backward: rows and gradients before and after an exchange, in
    two orders; all are taken to be on the rank that has `load`."""
    values = bool(model.experts.num) * 4 * model.experts.per_token * model.hidden_size
    return round(load * values)


def routed_wire_ns(model: ModelSpec, parallel: ParallelSpec, profile: KernelProfile) -> float:
    """Bandwidth term of one all-to-all of a token's copies to their experts, in one layer: those
    that stay in the node at an all-gather's bandwidth, the others over the rank's own link."""
    near = min(parallel.ep, profile.ranks_per_node)
    row_bytes = model.hidden_size * DTYPE_BYTES[profile.dtype]
    rows = model.experts.per_token / (parallel.cp * parallel.tp) / parallel.ep
    inside = profile.collective(Collective.ALL_GATHER, span_ranks=1).bytes_per_s
    link = profile.collective(Collective.P2P, span_ranks=profile.ranks_per_node + 1).bytes_per_s
    seconds = (near - 1) / inside + (parallel.ep - near) / link
    return rows * row_bytes * seconds * 1e9
