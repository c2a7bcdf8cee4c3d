"""What the exchange of experts' rows costs, and for how long ranks wait for it.

The waits replay the order of all-to-alls and products in `wlb.parallel.expert_exchange`.
"""

from dataclasses import dataclass

from wlb.cost.all_to_all import link_bandwidths
from wlb.cost.profile import DTYPE_BYTES, KernelProfile
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec


def reordered_values(model: ModelSpec) -> tuple[int, int, int]:
    """Count the values that are read and written to reorder one token's rows for the exchange.

    Rows are sorted by expert before they travel, and sorted back behind it.

    Returns:
        Values in forward, in backward, and in the part of forward that backward recomputes.
    """
    one_way = bool(model.experts.num) * 2 * model.experts.per_token * model.hidden_size
    return 2 * one_way, 2 * one_way, one_way


def routed_wire_ns(model: ModelSpec, parallel: ParallelSpec, profile: KernelProfile) -> float:
    """Return the transfer time of one token's rows to their experts, in one layer.

    This is one all-to-all without latency (`wlb.cost.all_to_all`).

    Args:
        model: A model in which all layers have experts.
        parallel: Degrees of parallelism.
        profile: Prices.
    """
    in_node = min(parallel.ep, profile.ranks_per_node)
    row_bytes = model.hidden_size * DTYPE_BYTES[profile.dtype]
    # Rows that a rank sends to each member of the group for one token of the micro-batch, if
    # experts are chosen evenly.
    rows = model.experts.per_token / (parallel.cp * parallel.tp) / parallel.ep
    inside, between = link_bandwidths(profile)
    seconds = (in_node - 1) / inside + (parallel.ep - in_node) / between
    return rows * row_bytes * seconds * 1e9


_TILE, _SMS = 128, 132
"""A matrix product computes its output in tiles of 128 x 128, one on each of an H100's 132 SMs."""
_KERNELS, _SHORTEST_NS = (16, 20), 2_500.0
"""Kernels of a stage besides its products, (forward, backward), and the shortest kernel time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedWork:
    """What can hide the transfer of experts' rows: times of one token in one layer, in ns."""

    wire: float  # one all-to-all of the token's rows
    forward: float  # experts' kernels between dispatch and combine
    gradients: float  # the same kernels in backward, without weight gradients
    weights: float  # weight gradients of the experts
    recomputed: float = 0.0  # experts' kernels that backward recomputes
    shared_forward: float = 0.0  # shared experts, which run before the routed ones in forward
    shared_backward: float = 0.0  # shared experts, which run behind the routed ones in backward
    shared_recomputed: float = 0.0  # shared experts that backward recomputes
    before: float = 0.0  # products before the router that backward recomputes (full recompute)
    is_recomputed: bool = False  # whether backward sends rows once more to recompute the experts
    defers_weights: bool = False  # whether weight gradients run in a separate pass

    def waits(self, stages: int, alpha: float = 0.0) -> tuple[float, float]:
        """Return for how long ranks wait for rows, (forward, backward).

        Args:
            stages: Stages of the exchange (`ep.stages`).
            alpha: Latency of an all-to-all, divided by the tokens that share it.
        """
        part = self.wire / stages + alpha
        return self._forward(stages, part), self._backward(stages, part)

    def _forward(self, stages: int, part: float) -> float:
        """Replay forward: stage s computes once its rows have arrived, then sends them back."""
        # `at`: when computation so far ends. `link`: when transfers so far end.
        at, link = self.shared_forward, stages * part
        for s in range(stages):
            at = max(at, (s + 1) * part) + self.forward / stages
            link = max(link, at) + part
        return max(at, link) - self.shared_forward - self.forward

    def _backward(self, stages: int, part: float) -> float:
        """Replay backward: gradients travel first, or behind the rows that recomputation needs."""
        # `at`: when computation so far ends. `link`: when transfers so far end.
        at, link, whole = 0.0, 0.0, stages * part
        gradients_first = not self.is_recomputed or self.before > 0
        arrival = [(s + 1) * part for s in range(stages)]
        if gradients_first:
            link = whole
        # Recomputation sends the rows once more and recomputes the experts' first kernels.
        if self.is_recomputed:
            at = self.before + self.shared_recomputed
            link = max(link, self.before)
            for s in range(stages):
                at = max(at, link + (s + 1) * part) + self.recomputed / stages
            link += whole
        # Here gradients use the link after the recomputed rows.
        if not gradients_first:
            arrival = [link + (s + 1) * part for s in range(stages)]
            link += whole
        for s in range(stages):
            at = max(at, arrival[s]) + self.gradients / stages
            link = max(link, at) + part
        # Shared experts and weight gradients run last and hide the remaining transfers.
        later = self.shared_backward + self.weights * (not self.defers_weights)
        computed = self.before + self.shared_recomputed + self.recomputed + self.gradients + later
        return max(at + later, link) - computed


def smaller_products_ns(
    model: ModelSpec, stages: int, *, profile: KernelProfile, tflops: float, is_recomputed: bool
) -> tuple[float, float]:
    """Return the time that a layer's products lose in stages, (forward, backward) of a micro-batch.

    Each stage after the first adds half a wave of tiles to a product, and the shortest kernel time
    to each other kernel. The time is 0 if the profile only has SDPA, because it is then a CPU's.

    Args:
        model: A model with experts.
        stages: Stages of the exchange (`ep.stages`).
        profile: Prices.
        tflops: Throughput of the products.
        is_recomputed: Whether backward recomputes the experts' first products.
    """
    if all(set(table.backends) == {AttentionBackend.SDPA} for table in profile.attention):
        return 0.0, 0.0
    width, hidden = model.hidden_size, model.experts.hidden_size
    # A wave is one tile on every SM. Its time grows with the inner size of the product.
    gate_and_up = 2 * width
    inner = (gate_and_up + hidden, width + 2 * hidden + gate_and_up * is_recomputed)
    wave_ns = [2 * _TILE * _TILE * n * _SMS / tflops * 1e-3 for n in inner]
    forward, backward = (
        (stages - 1) * (wave / 2 + kernels * _SHORTEST_NS)
        for wave, kernels in zip(wave_ns, _KERNELS, strict=True)
    )
    return forward, backward
