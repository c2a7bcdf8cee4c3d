"""Sizes of mixture-of-experts layers on a rank, and sums over the layers of a stage.

A stage may have layers with experts and layers without. Several functions have a parameter `load`:
the rows that this rank's experts compute, divided by the mean of all EP ranks (`cost.expert_load`).
Telemetry reports the load of a run.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from wlb.spec import ModelSpec, RunSpec


def experts_of_layer(spec: RunSpec) -> int:
    """Count the parameters of a layer's routed experts on one EP rank.

    The router and shared experts are not included.
    """
    experts = spec.model.experts
    return experts.num * 3 * spec.model.hidden_size * experts.hidden_size // spec.parallel.ep


def layer_kinds(spec: RunSpec) -> list[tuple[RunSpec, tuple[int, ...]]]:
    """Return each kind of layer of the model, and how many layers of this kind each stage has.

    A kind (`ModelSpec.layer_kinds`) is represented by a copy of `spec` whose model has only layers
    of this kind. Functions that return the size of one layer take such a run.
    """
    kinds = [replace(spec, model=kind.model) for kind in spec.model.layer_kinds]
    return list(zip(kinds, spec.stage_kind_layers, strict=True))


def sums_by_stage(spec: RunSpec, of_layer: Callable[[RunSpec], int]) -> list[int]:
    """Add up a size, such as a number of parameters, over the layers of each stage.

    Args:
        spec: The run.
        of_layer: Returns the size of one layer. Its argument is a run whose model has only layers
            of one kind (`layer_kinds`).
    """
    sums = [0] * spec.num_stages
    for kind, counts in layer_kinds(spec):
        of_kind = int(of_layer(kind))
        sums = [total + of_kind * count for total, count in zip(sums, counts, strict=True)]
    return sums


def sum_over(spec: RunSpec, stages: Iterable[int], of_layer: Callable[[RunSpec], int]) -> int:
    """Add up a size, such as a number of parameters, over all layers of the given stages.

    Args:
        spec: The run.
        stages: Indices of the stages.
        of_layer: Returns the size of one layer. Its argument is a run whose model has only layers
            of one kind (`layer_kinds`).
    """
    sums = sums_by_stage(spec, of_layer)
    return sum(sums[stage] for stage in stages)


def kinds_of(spec: RunSpec, stages: Iterable[int]) -> tuple[RunSpec, ...]:
    """Return a copy of `spec` for each kind of layer in the given stages (see `layer_kinds`).

    All layers of a copy are of its kind. If the stages have no layers, the result is a single copy,
    whose layers have experts if the model's last layer has them.
    """
    chosen, kinds = list(stages), layer_kinds(spec)
    found = tuple(kind for kind, counts in kinds if any(counts[stage] for stage in chosen))
    # If the model has experts, `kinds` starts with a kind of layer that has them.
    last = kinds[0] if spec.model.has_experts(spec.model.num_layers - 1) else kinds[-1]
    return found or (last[0],)


def stored_parameters(spec: RunSpec, count: int, layers: int) -> int:
    """Count the parameters in a rank's FSDP shard.

    Routed experts are sharded over the ranks that have the same experts, other parameters over all
    ranks of one copy of the model.

    Args:
        spec: The run.
        count: Unsharded parameters on the rank.
        layers: Number of layers with experts that `count` includes.
    """
    experts = layers * experts_of_layer(spec)
    equal = sharing_ranks(spec)
    return -(-(count - experts) // spec.shard_size) + -(-experts // equal)


def sharing_ranks(spec: RunSpec) -> int:
    """Count the ranks over which FSDP shards one copy of the experts of an EP rank."""
    return spec.shard_size * spec.parallel.tp // spec.parallel.ep


def divides_experts(spec: RunSpec) -> bool:
    """Return whether several ranks have the same experts, so that FSDP shards or reduces them."""
    return bool(spec.model.experts.num) and spec.parallel.expert_ranks > spec.parallel.ep


def mlp_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Count the values of one token that the MLP, or the experts, save for backward.

    An MLP saves the outputs of gate and up and their product. Experts recompute the product, and
    save the token's rows instead.

    Args:
        model: The model.
        load: Factor for the values of routed experts: this rank's rows, divided by the mean of all
            EP ranks.
    """
    experts = model.experts
    if not experts.num:
        return 3 * model.ffn_hidden_size
    routed = experts.per_token * (model.hidden_size + 2 * experts.hidden_size)
    return round(load * routed) + 3 * experts.shared_hidden_size


def z_loss_values(model: ModelSpec) -> int:
    """Count the float32 values of one token that the router's z-loss saves.

    The values are the router's logits and their log-sum-exp.
    """
    has_loss = model.experts.num > 0 and model.experts.z_loss > 0
    return has_loss * (model.experts.num + 1)


def order_bytes(model: ModelSpec, *, is_recomputed: bool, load: float = 1.0) -> int:
    """Return the bytes per token of the indices that sort rows by expert and sort them back.

    The indices are saved with every kind of recompute.

    Args:
        model: The model.
        is_recomputed: Whether layers are recomputed. Recomputed layers also save the chosen
            experts, in 16 bits each.
        load: Factor for the indices of received rows: this rank's rows, divided by the mean of all
            EP ranks.
    """
    copies = bool(model.experts.num) * model.experts.per_token
    return round(copies * (8 + 2 * is_recomputed + 2 * 8 * load))


def hidden_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Count one token's values between the two products of the MLP, or of the token's experts.

    Args:
        model: The model.
        load: Factor for the values of routed experts, but not of shared ones: this rank's rows,
            divided by the mean of all EP ranks.
    """
    if not model.experts.num:
        return model.ffn_hidden_size
    shared = model.experts.shared_hidden_size
    return shared + round(load * (model.active_ffn_size - shared))


def exchanged_values(model: ModelSpec, *, load: float = 1.0) -> int:
    """Count the values per token in the all-to-all buffers of one layer's experts in backward.

    There are four buffers: rows to send, received rows, gradients to send, received gradients.

    Args:
        model: The model.
        load: Factor for all values: this rank's rows, divided by the mean of all EP ranks.
    """
    values = bool(model.experts.num) * 4 * model.experts.per_token * model.hidden_size
    return round(load * values)
