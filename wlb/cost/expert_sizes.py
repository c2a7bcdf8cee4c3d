"""Sizes and waits of a mixture of experts on a rank.

load: rows of the rank over the mean EP rank's (`cost.expert_load`), as telemetry reports them.
Waits replay the order of all-to-alls and products in `wlb.parallel.expert_exchange`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from wlb.cost.all_to_all import link_bandwidths
from wlb.cost.profile import DTYPE_BYTES, KernelProfile
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec, RunSpec


def experts_of_layer(spec: RunSpec) -> int:
    """Parameters of a layer's experts on one EP rank, without router and shared experts."""
    experts = spec.model.experts
    return experts.num * 3 * spec.model.hidden_size * experts.hidden_size // spec.parallel.ep


def layer_kinds(spec: RunSpec) -> list[tuple[RunSpec, tuple[int, ...]]]:
    """Of each kind of layer (`ModelSpec.layer_kinds`), `spec` with such layers alone, by which a
    layer's sizes are computed, and how many of them each stage has."""
    routed = spec.stage_expert_layers
    dense = tuple(n - r for n, r in zip(spec.stage_layers, routed, strict=True))
    return [
        (replace(spec, model=kind.model), routed if kind.has_experts else dense)
        for kind in spec.model.layer_kinds
    ]


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
    last one."""
    chosen, kinds = list(stages), layer_kinds(spec)
    found = tuple(kind for kind, counts in kinds if any(counts[stage] for stage in chosen))
    # Layers with experts come first.
    last = kinds[0] if spec.model.has_experts(spec.model.num_layers - 1) else kinds[-1]
    return found or (last[0],)


def stored_parameters(spec: RunSpec, count: int, layers: int) -> int:
    """Parameters that a rank stores of `count` on a TP rank, with experts in `layers` layers:
    FSDP's shard, of experts that of the ranks with equal experts."""
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


def z_loss_values(model: ModelSpec) -> int:
    """Float32 values of a token that the router's z-loss keeps for backward: its logits and their
    logsumexp."""
    has_loss = model.experts.num > 0 and model.experts.z_loss > 0
    return has_loss * (model.experts.num + 1)


def order_bytes(model: ModelSpec, *, is_recomputed: bool, load: float = 1.0) -> int:
    """Bytes a token of the indices that order rows, on both sides of an exchange, which autograd
    functions keep under any recompute. A recomputed layer also keeps the chosen experts, in 16
    bits. Indices on the experts' side, one for each direction, grow with `load`."""
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
    two orders; all are taken to be on the rank that has `load`."""
    values = bool(model.experts.num) * 4 * model.experts.per_token * model.hidden_size
    return round(load * values)


def reordered_values(model: ModelSpec) -> tuple[int, int, int]:
    """Values that a token's copies read and write where rows that travel are put into another
    order, there and back: forward, backward, and what backward runs again."""
    one_way = bool(model.experts.num) * 2 * model.experts.per_token * model.hidden_size
    return 2 * one_way, 2 * one_way, one_way


def routed_wire_ns(model: ModelSpec, parallel: ParallelSpec, profile: KernelProfile) -> float:
    """Bandwidth term of one all-to-all (`wlb.cost.all_to_all`) of a token's copies to their
    experts, in one layer. model: all of whose layers have experts."""
    near = min(parallel.ep, profile.ranks_per_node)
    row_bytes = model.hidden_size * DTYPE_BYTES[profile.dtype]
    rows = model.experts.per_token / (parallel.cp * parallel.tp) / parallel.ep
    inside, between = link_bandwidths(profile)
    seconds = (near - 1) / inside + (parallel.ep - near) / between
    return rows * row_bytes * seconds * 1e9


_TILE, _UNITS = 128, 132
"""A product's output is computed in tiles of 128 x 128, one on each of an H100's 132 units."""
_KERNELS, _SHORTEST_NS = (16, 20), 2_500.0
"""Kernels that a stage has besides its products, forward and backward, and the shortest's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedWork:
    """Times of one token in one layer, ns. wire: of an all-to-all of its copies. forward: experts'
    kernels between dispatch and combine; gradients: the same in backward, without weights'
    gradients, which are apart; recomputed: the experts' kernels that backward runs again.
    shared_*: shared experts, before experts in forward, behind them in backward. before: products
    that backward runs again before the router (full recompute).
    """

    wire: float
    forward: float
    gradients: float
    weights: float
    recomputed: float = 0.0
    shared_forward: float = 0.0
    shared_backward: float = 0.0
    shared_recomputed: float = 0.0
    before: float = 0.0
    is_recomputed: bool = False
    defers_weights: bool = False

    def waits(self, stages: int, alpha: float = 0.0) -> tuple[float, float]:
        """What ranks wait for rows in forward and in backward, with so many stages. alpha: latency
        of an all-to-all, as a token's part of it."""
        part = self.wire / stages + alpha
        return self._forward(stages, part), self._backward(stages, part)

    def _forward(self, stages: int, part: float) -> float:
        at, link = self.shared_forward, stages * part
        for s in range(stages):
            at = max(at, (s + 1) * part) + self.forward / stages
            link = max(link, at) + part
        return max(at, link) - self.shared_forward - self.forward

    def _backward(self, stages: int, part: float) -> float:
        """Gradients travel first, or behind the rows that recomputed products need."""
        at, link, whole = 0.0, 0.0, stages * part
        gradients_first = not self.is_recomputed or self.before > 0
        arrival = [(s + 1) * part for s in range(stages)]
        if gradients_first:
            link = whole
        if self.is_recomputed:
            at = self.before + self.shared_recomputed
            link = max(link, self.before)
            for s in range(stages):
                at = max(at, link + (s + 1) * part) + self.recomputed / stages
            link += whole
        if not gradients_first:
            arrival = [link + (s + 1) * part for s in range(stages)]
            link += whole
        for s in range(stages):
            at = max(at, arrival[s]) + self.gradients / stages
            link = max(link, at) + part
        later = self.shared_backward + self.weights * (not self.defers_weights)
        computed = self.before + self.shared_recomputed + self.recomputed + self.gradients + later
        return max(at + later, link) - computed


def smaller_products_ns(
    model: ModelSpec, stages: int, *, profile: KernelProfile, tflops: float, is_recomputed: bool
) -> tuple[float, float]:
    """Extra time a micro-batch of a layer's products in stages, forward and backward: for each
    stage after the first, half a wave of tiles a product and the shortest time of its other
    kernels. A profile that has SDPA alone is of a CPU, which has no waves."""
    if all(set(table.backends) == {AttentionBackend.SDPA} for table in profile.attention):
        return 0.0, 0.0
    width, hidden = model.hidden_size, model.experts.hidden_size
    gate_and_up = 2 * width
    inner = (gate_and_up + hidden, width + 2 * hidden + gate_and_up * is_recomputed)
    wave_ns = [2 * _TILE * _TILE * n * _UNITS / tflops * 1e-3 for n in inner]
    forward, backward = (
        (stages - 1) * (wave / 2 + kernels * _SHORTEST_NS)
        for wave, kernels in zip(wave_ns, _KERNELS, strict=True)
    )
    return forward, backward
