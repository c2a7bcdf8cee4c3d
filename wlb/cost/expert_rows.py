"""The costs of expert parallelism: sending tokens' rows to experts and back, and waiting for rows.

Waiting times are computed by simulating the all-to-alls and matrix products of a layer in the order
in which `wlb.parallel.expert_exchange` runs them.
"""

from dataclasses import dataclass

from wlb.cost.all_to_all import link_bandwidths
from wlb.cost.profile import DTYPE_BYTES, KernelProfile
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec


def reordered_values(model: ModelSpec) -> tuple[int, int, int]:
    """Count the values read and written to sort one token's rows by expert, and to sort them back.

    Rows are sorted by expert before the all-to-all to the experts, and sorted back after the
    all-to-all that returns them.

    Returns:
        Numbers of values in forward, in backward, and in the part of forward that backward
        recomputes.
    """
    one_way = bool(model.experts.num) * 2 * model.experts.per_token * model.hidden_size
    return 2 * one_way, 2 * one_way, one_way


def routed_wire_ns(model: ModelSpec, parallel: ParallelSpec, profile: KernelProfile) -> float:
    """Return the time to send one token's rows to its experts in one layer, without latency.

    Args:
        model: A model in which all layers have experts.
        parallel: Degrees of parallelism.
        profile: Prices.

    Returns:
        The time in ns.
    """
    in_node = min(parallel.ep, profile.ranks_per_node)
    row_bytes = model.hidden_size * DTYPE_BYTES[profile.dtype]
    # Number of rows that a rank sends to each member of the EP group, for one token of the
    # micro-batch, if all experts are chosen equally often.
    rows = model.experts.per_token / (parallel.cp * parallel.tp) / parallel.ep
    inside, between = link_bandwidths(profile)
    seconds = (in_node - 1) / inside + (parallel.ep - in_node) / between
    return rows * row_bytes * seconds * 1e9


_TILE, _SMS = 128, 132
"""A matrix product computes its output in tiles of 128 x 128, one on each of an H100's 132 SMs."""
_KERNELS, _SHORTEST_NS = (16, 20), 2_500.0
"""Number of a stage's kernels besides matrix products, (forward, backward); ns of the shortest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedWork:
    """Times of one layer with experts, in ns for each token of the micro-batch.

    They are the times of all-to-alls and of the computation that can hide all-to-alls.
    """

    wire: float  # time of one all-to-all of the token's rows
    forward: float  # time of the experts' kernels between dispatch and combine, in forward
    gradients: float  # time of the same kernels in backward, without weight gradients
    weights: float  # time of the experts' weight gradients
    recomputed: float = 0.0  # time of the experts' kernels that backward recomputes
    shared_forward: float = 0.0  # time of shared experts, which run before the routed ones
    shared_backward: float = 0.0  # time of shared experts, which run after the routed ones
    shared_recomputed: float = 0.0  # time of shared experts' kernels that backward recomputes
    # Time to recompute, in backward, the products before the router; 0 without full recompute.
    before: float = 0.0
    is_recomputed: bool = False  # whether backward sends rows once more to recompute the experts
    defers_weights: bool = False  # whether weight gradients run in a separate pass

    def waits(self, stages: int, alpha: float = 0.0) -> tuple[float, float]:
        """Return how long ranks wait for all-to-alls, in ns for each token: (forward, backward).

        Args:
            stages: Number of stages in which rows travel to experts and back (`ep.stages`).
            alpha: Latency of an all-to-all in ns, divided by the tokens of the micro-batch.
        """
        part = self.wire / stages + alpha
        return self._forward(stages, part), self._backward(stages, part)

    def _forward(self, stages: int, part: float) -> float:
        """Simulate the forward pass, and return how long computation waits for transfers.

        The experts compute the rows of a stage when these have arrived, and then send the results
        back. The returned time is in ns for each token of the micro-batch, as all times here.

        Args:
            stages: Number of stages in which rows travel to experts and back.
            part: Time of one stage's all-to-all, in ns for each token.
        """
        # `at` is when the computation so far ends, and `link` is when the transfers so far end.
        at, link = self.shared_forward, stages * part
        for s in range(stages):
            at = max(at, (s + 1) * part) + self.forward / stages
            link = max(link, at) + part
        return max(at, link) - self.shared_forward - self.forward

    def _backward(self, stages: int, part: float) -> float:
        """Simulate the backward pass, and return how long computation waits for transfers.

        If only the experts are recomputed, their rows are sent once more, and gradients travel
        after these rows. Otherwise (nothing or the whole layer is recomputed) gradients travel
        first. The returned time is in ns for each token of the micro-batch, as all times here.

        Args:
            stages: Number of stages in which rows travel to experts and back.
            part: Time of one stage's all-to-all, in ns for each token.
        """
        # `at` is when the computation so far ends, and `link` is when the transfers so far end.
        at, link, whole = 0.0, 0.0, stages * part
        gradients_first = not self.is_recomputed or self.before > 0
        arrival = [(s + 1) * part for s in range(stages)]
        if gradients_first:
            link = whole
        # Recomputation sends the rows once more and runs the experts' first kernels again.
        if self.is_recomputed:
            at = self.before + self.shared_recomputed
            link = max(link, self.before)
            for s in range(stages):
                at = max(at, link + (s + 1) * part) + self.recomputed / stages
            link += whole
        # The link first carries the rows for recomputation, and then the gradients.
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
    """Return the ns that one layer's experts lose by computing in stages: (forward, backward).

    The loss is that of one micro-batch. Smaller matrix products fill the GPU less evenly: each
    stage after the first is assumed to lose half the time in which all SMs compute one tile (a
    wave). Each stage after the first also calls every other kernel once more, at the price of the
    shortest possible kernel. With a profile of a CPU (one that has only SDPA) the loss is 0.

    Args:
        model: A model with experts.
        stages: Number of stages in which rows travel to experts and back (`ep.stages`).
        profile: Prices.
        tflops: Throughput of the experts' matrix products.
        is_recomputed: Whether backward recomputes the experts' first products.
    """
    if all(set(table.backends) == {AttentionBackend.SDPA} for table in profile.attention):
        return 0.0, 0.0
    width, hidden = model.hidden_size, model.experts.hidden_size
    # In a wave every SM computes one tile of the output. The time of a wave is proportional to the
    # inner dimension of the matrix product.
    gate_and_up = 2 * width
    inner = (gate_and_up + hidden, width + 2 * hidden + gate_and_up * is_recomputed)
    wave_ns = [2 * _TILE * _TILE * n * _SMS / tflops * 1e-3 for n in inner]
    forward, backward = (
        (stages - 1) * (wave / 2 + kernels * _SHORTEST_NS)
        for wave, kernels in zip(wave_ns, _KERNELS, strict=True)
    )
    return forward, backward
