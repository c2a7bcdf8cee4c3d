"""Sizes of a mixture of experts on a rank, and sums over the layers of a stage that has both kinds.

load: rows of the rank over the mean EP rank's (`cost.expert_load`), as telemetry reports them.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from wlb.spec import ModelSpec, RunSpec


def experts_of_layer(spec: RunSpec) -> int:
    """Parameters of a layer's experts on one EP rank, without router and shared experts."""
    experts = spec.model.experts
    return experts.num * 3 * spec.model.hidden_size * experts.hidden_size // spec.parallel.ep


def layer_kinds(spec: RunSpec) -> list[tuple[RunSpec, tuple[int, ...]]]:
    """Of each kind of layer (`ModelSpec.layer_kinds`), `spec` with such layers alone, by which a
    layer's sizes are computed, and how many of them each stage has.
    """
    kinds = [replace(spec, model=kind.model) for kind in spec.model.layer_kinds]
    return list(zip(kinds, spec.stage_kind_layers, strict=True))


def sums_by_stage(spec: RunSpec, of_layer: Callable[[RunSpec], int]) -> list[int]:
    """Of each stage, the sum over its layers of `of_layer`, which is given one of `layer_kinds`."""
    sums = [0] * spec.num_stages
    for kind, counts in layer_kinds(spec):
        of_kind = int(of_layer(kind))
        sums = [total + of_kind * count for total, count in zip(sums, counts, strict=True)]
    return sums


def sum_over(spec: RunSpec, stages: Iterable[int], of_layer: Callable[[RunSpec], int]) -> int:
    """The sum over the layers of some stages of `of_layer`, as in `sums_by_stage`."""
    sums = sums_by_stage(spec, of_layer)
    return sum(sums[stage] for stage in stages)


def kinds_of(spec: RunSpec, stages: Iterable[int]) -> tuple[RunSpec, ...]:
    """The `layer_kinds` that some stages have. Stages without layers count as having the model's
    last one.
    """
    chosen, kinds = list(stages), layer_kinds(spec)
    found = tuple(kind for kind, counts in kinds if any(counts[stage] for stage in chosen))
    # Layers with experts come first.
    last = kinds[0] if spec.model.has_experts(spec.model.num_layers - 1) else kinds[-1]
    return found or (last[0],)


def stored_parameters(spec: RunSpec, count: int, layers: int) -> int:
    """Parameters that a rank stores of `count` on a TP rank, with experts in `layers` layers:
    FSDP's shard, of experts that of the ranks with equal experts.
    """
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
    copies instead of the product, which they compute again.
    """
    experts = model.experts
    if not experts.num:
        return 3 * model.ffn_hidden_size
    routed = experts.per_token * (model.hidden_size + 2 * experts.hidden_size)
    return round(load * routed) + 3 * experts.shared_hidden_size


def z_loss_values(model: ModelSpec) -> int:
    """Float32 values of a token that the router's z-loss keeps for backward: its logits and their
    logsumexp.
    """
    has_loss = model.experts.num > 0 and model.experts.z_loss > 0
    return has_loss * (model.experts.num + 1)


def order_bytes(model: ModelSpec, *, is_recomputed: bool, load: float = 1.0) -> int:
    """Bytes a token of the indices that order rows, on both sides of an exchange, which autograd
    functions keep under any recompute. A recomputed layer also keeps the chosen experts, in 16
    bits. Indices on the experts' side, one for each direction, grow with `load`.
    """
    copies = bool(model.experts.num) * model.experts.per_token
    return round(copies * (8 + 2 * is_recomputed + 2 * 8 * load))


def hidden_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Hidden values of a token in an MLP, or in the experts that compute it."""
    if not model.experts.num:
        return model.ffn_hidden_size
    shared = model.experts.shared_hidden_size
    return shared + round(load * (model.active_ffn_size - shared))


def exchanged_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Values of a token's copies in backward: rows and gradients before and after an exchange, in
    two orders; all are taken to be on the rank that has `load`.
    """
    values = bool(model.experts.num) * 4 * model.experts.per_token * model.hidden_size
    return round(load * values)
