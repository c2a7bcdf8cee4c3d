"""What the exchange of experts' rows costs, and the part of it that ranks wait for.

Waits replay the order of all-to-alls and products in `wlb.parallel.expert_exchange`.
"""

from dataclasses import dataclass

from wlb.cost.all_to_all import link_bandwidths
from wlb.cost.profile import DTYPE_BYTES, KernelProfile
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec


def reordered_values(model: ModelSpec) -> tuple[int, int, int]:
    """Values that a token's copies read and write where rows that travel are put into another
    order, there and back: forward, backward, and what backward runs again.
    """
    one_way = bool(model.experts.num) * 2 * model.experts.per_token * model.hidden_size
    return 2 * one_way, 2 * one_way, one_way


def routed_wire_ns(model: ModelSpec, parallel: ParallelSpec, profile: KernelProfile) -> float:
    """Bandwidth term of one all-to-all (`wlb.cost.all_to_all`) of a token's copies to their
    experts, in one layer. model: all of whose layers have experts.
    """
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
        of an all-to-all, as a token's part of it.
        """
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
    kernels. A profile that has SDPA alone is of a CPU, which has no waves.
    """
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
