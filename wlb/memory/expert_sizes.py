"""Sizes of mixture-of-experts layers on a rank, and sums over the layers of a stage.

A stage may have layers with experts and layers without. The parameter `load` is the number of rows
on the rank over the mean EP rank's (`cost.expert_load`); telemetry reports it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from wlb.spec import ModelSpec, RunSpec


def experts_of_layer(spec: RunSpec) -> int:
    """Count the parameters of a layer's experts on one EP rank.

    The router and shared experts are not included.
    """
    experts = spec.model.experts
    return experts.num * 3 * spec.model.hidden_size * experts.hidden_size // spec.parallel.ep


def layer_kinds(spec: RunSpec) -> list[tuple[RunSpec, tuple[int, ...]]]:
    """Return each kind of layer (`ModelSpec.layer_kinds`) and how many of it each stage has.

    A kind is given as `spec` with a model that has only such layers, so that functions of one layer
    can take it.
    """
    kinds = [replace(spec, model=kind.model) for kind in spec.model.layer_kinds]
    return list(zip(kinds, spec.stage_kind_layers, strict=True))


def sums_by_stage(spec: RunSpec, of_layer: Callable[[RunSpec], int]) -> list[int]:
    """Return for each stage the sum over its layers of `of_layer`.

    Args:
        spec: The run.
        of_layer: Size of one layer; its argument is a run with one kind of layer (`layer_kinds`).
    """
    sums = [0] * spec.num_stages
    for kind, counts in layer_kinds(spec):
        of_kind = int(of_layer(kind))
        sums = [total + of_kind * count for total, count in zip(sums, counts, strict=True)]
    return sums


def sum_over(spec: RunSpec, stages: Iterable[int], of_layer: Callable[[RunSpec], int]) -> int:
    """Return the sum of `of_layer` over the layers of some stages; see `sums_by_stage`."""
    sums = sums_by_stage(spec, of_layer)
    return sum(sums[stage] for stage in stages)


def kinds_of(spec: RunSpec, stages: Iterable[int]) -> tuple[RunSpec, ...]:
    """Return the `layer_kinds` that some stages have.

    Stages without layers get the kind of the model's last layer.
    """
    chosen, kinds = list(stages), layer_kinds(spec)
    found = tuple(kind for kind, counts in kinds if any(counts[stage] for stage in chosen))
    # Layers with experts come first.
    last = kinds[0] if spec.model.has_experts(spec.model.num_layers - 1) else kinds[-1]
    return found or (last[0],)


def stored_parameters(spec: RunSpec, count: int, layers: int) -> int:
    """Count the parameters that a rank stores under FSDP.

    Experts are sharded over the ranks that have the same experts, other parameters over all ranks
    of a copy.

    Args:
        spec: The run.
        count: Parameters on a TP rank.
        layers: Layers with experts among them.
    """
    experts = layers * experts_of_layer(spec)
    equal = sharing_ranks(spec)
    return -(-(count - experts) // spec.shard_size) + -(-experts // equal)


def sharing_ranks(spec: RunSpec) -> int:
    """Count the ranks in one copy of the parameters that have the same experts and shard them."""
    return spec.shard_size * spec.parallel.tp // spec.parallel.ep


def divides_experts(spec: RunSpec) -> bool:
    """Return whether several ranks have the same experts, which FSDP then shards or sums."""
    return bool(spec.model.experts.num) and spec.parallel.expert_ranks > spec.parallel.ep


def mlp_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Count the values of one token that the MLP saves for backward.

    These are gate, up and their product. Experts save the token's rows instead of the product,
    which they recompute.
    """
    experts = model.experts
    if not experts.num:
        return 3 * model.ffn_hidden_size
    routed = experts.per_token * (model.hidden_size + 2 * experts.hidden_size)
    return round(load * routed) + 3 * experts.shared_hidden_size


def z_loss_values(model: ModelSpec) -> int:
    """Count the float32 values of one token that the router's z-loss saves.

    These are its logits and their logsumexp.
    """
    has_loss = model.experts.num > 0 and model.experts.z_loss > 0
    return has_loss * (model.experts.num + 1)


def order_bytes(model: ModelSpec, *, is_recomputed: bool, load: float = 1.0) -> int:
    """Return the bytes per token of the indices that reorder rows before and behind an exchange.

    Autograd functions save them under any recompute. A recomputed layer also saves the chosen
    experts in 16 bits. The indices on the experts' side, one for each direction, grow with `load`.
    """
    copies = bool(model.experts.num) * model.experts.per_token
    return round(copies * (8 + 2 * is_recomputed + 2 * 8 * load))


def hidden_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Count the hidden values of one token in an MLP, or in the experts that compute it."""
    if not model.experts.num:
        return model.ffn_hidden_size
    shared = model.experts.shared_hidden_size
    return shared + round(load * (model.active_ffn_size - shared))


def exchanged_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Count the values of one token's rows in the backward of an exchange.

    These are rows and gradients before and after the exchange, in two orders. All of them are
    assumed to be on the most loaded rank.
    """
    values = bool(model.experts.num) * 4 * model.experts.per_token * model.hidden_size
    return round(load * values)
