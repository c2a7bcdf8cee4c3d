"""W_l of Eq. 2: all work of a rank but attention's kernels.

Proportional to tokens: GEMMs and element-wise operators (times the layer's factor), bandwidth terms
of TP and CP collectives. Constant a micro-batch: calls and latency of collectives. Embedding and
head belong to single stages and are apart, as are forward and backward. With `training.recompute`,
backward includes the recomputed part (`RECOMPUTED_WORK`) at forward's price.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wlb.cost.all_to_all import all_to_all_latency_ns, all_to_all_ns
from wlb.cost.expert_rows import RoutedWork, reordered_values, routed_wire_ns, smaller_products_ns
from wlb.cost.flops import (
    LINEAR_BACKWARD_FACTOR,
    elementwise_calls,
    elementwise_values,
    head_flops,
    layer_matrices,
)
from wlb.cost.profile import DTYPE_BYTES, Collective, CollectiveCost, Elementwise, KernelProfile
from wlb.plan import FloatArray, IntArray, check_between
from wlb.spec import ModelSpec, ParallelSpec, Recompute

TP_FORWARD, TP_BACKWARD = (2, 2), (4, 2)
"""All-gathers and reduce-scatters of [tokens, hidden] a layer. Backward gathers both saved inputs
again and the gradients of both outputs."""
GRADIENT_BYTES = 4
"""The head's gradient is float32, and so are dK and dV on their way between CP ranks."""

Passes = tuple[float, float]
"""Forward and backward."""
Work = tuple[float, float, float]
"""Forward, backward without recompute, and the part of forward that backward runs again."""

PLAIN_TORCH: dict[str, Passes] = {
    "norm": (18 / 2, 34 / 3),
    "head_norm": (18 / 2, 34 / 3),
    "rotary": (10 / 2, 10 / 2),
    "swiglu": (5 / 3, 9 / 5),
}
"""Traffic of element-wise operators that torch runs one kernel at a time, over that of fused ones
(`elementwise_values`). Norms are cast to float32, squared, averaged, multiplied, cast back and
multiplied by their weight: 18 two-byte values of each one, and 34 in backward; rotations run in
float32 complex numbers: 10; SiLU and the gate's product are two kernels: 5 and 9. Additions are one
kernel in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedWork:
    """The part of a layer that backward recomputes: matrices (of `layer_matrices`), calls of
    element-wise operators, TP's (all-gathers, reduce-scatters), attention with CP's gather."""

    matrices: Sequence[int]
    calls: dict[str, int]
    tp: tuple[int, int]
    attention: bool


RECOMPUTED_WORK = {
    Recompute.NONE: RecomputedWork(matrices=range(0), calls={}, tp=(0, 0), attention=False),
    Recompute.SELECTIVE: RecomputedWork(
        matrices=range(4, 6), calls={"norm": 1, "swiglu": 1}, tp=(1, 0), attention=False
    ),
    Recompute.FULL: RecomputedWork(
        matrices=range(6),
        calls={},  # all but the last addition of a model's: `LinearCost.recomputed_work`
        tp=(2, 1),
        attention=True,
    ),
}
"""The executor stops before a layer's last product: down projection, its reduce-scatter and the
residual addition do not run again (`tests/parity/test_recompute.py` counts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """A pipeline rank's work outside attention; arguments as in `ProfiledWorkload`."""

    model: ModelSpec
    parallel: ParallelSpec
    profile: KernelProfile
    micro_batch_tokens: int
    recompute: Recompute
    tp_overlap: float = 0.0
    """Share of TP collectives' bandwidth terms that hides behind matrix products."""
    expert_stages: int = 1
    """As ep.stages."""
    defers_weights: bool = False
    """Whether the schedule computes weights' gradients in passes of their own."""
    expert_load: float = 1.0
    """Rows of the EP rank that a layer waits for over the mean rank's."""
    traffic: Mapping[str, Passes] = field(default_factory=dict[str, Passes])
    """Bytes that element-wise operators move in each pass over those of the profile's fused
    kernels, by operator, for trainers without such kernels (`PLAIN_TORCH`)."""
    recomputed: RecomputedWork | None = None
    """What backward computes again in another trainer; None: what `recompute` does in wlb's.
    `recomputed_work` has the one that is priced."""

    def __post_init__(self) -> None:
        check_between("tp_overlap", self.tp_overlap, 0, 1, closed=True)

    @property
    def num_layers(self) -> int:
        """Layers that are priced: the mean pipeline rank's, rounded up."""
        return -(-self.model.num_layers // self.parallel.pp)

    @property
    def recomputed_work(self) -> RecomputedWork:
        """What backward computes again of a layer: `recomputed`, or else what wlb's `recompute`
        does."""
        work = self.recomputed or RECOMPUTED_WORK[self.recompute]
        if self.recomputed or self.recompute != Recompute.FULL:
            return work
        calls = elementwise_calls(self.model)
        calls |= {"residual": calls["residual"] - 1}
        if not self.model.branch_norms:
            return replace(work, calls=calls)
        # The last norm needs the last product, which is therefore made again.
        calls |= {"norm": calls["norm"] - 1}
        return replace(work, calls=calls, matrices=range(7), tp=TP_FORWARD)

    @property
    def ns_per_token(self) -> dict[str, float]:
        """W_l's terms for one token of a piece, by term and pass, of a rank's layers."""
        parallel, exposed = self.parallel, 1 - self.tp_overlap
        terms = {
            "gemm": self._products_ns(),
            "elementwise": self._in_layer(self._elementwise_ns()),
            "tp_comm": tuple(
                self.tp_wire_ns(*calls) * exposed
                for calls in (TP_FORWARD, TP_BACKWARD, self.recomputed_work.tp)
            ),
            "cp_comm": self._kv_wire_ns(2 * self.model.kv_dim / parallel.tp),
        }
        if self.parallel.ep > 1:
            share, waits = self._routed_share, self._routed_work().waits(self.expert_stages)
            both = zip(terms["elementwise"], self._reordered_ns(), strict=True)
            terms["elementwise"] = tuple(a + b * share for a, b in both)
            terms["ep_comm"] = (*(wait * share for wait in waits), 0.0)
        out: dict[str, float] = {}
        for name, (forward, backward, recomputed) in terms.items():
            out[f"{name}_forward"] = forward * self.num_layers
            out[f"{name}_backward"] = (backward + recomputed) * self.num_layers
        return out

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes, for a log, about matrix products outside the profile's measured range."""
        surface = self.profile.gemm.forward
        tokens = max(1.0, self.micro_batch_tokens / self.parallel.cp)
        models = [kind.model for kind in self.model.layer_kinds]
        weights = [a * b / self.parallel.tp for m in models for a, b in layer_matrices(m)]
        return tuple(
            f"matrix products of {' and '.join(f'{v:,.0f}' for v in outside)} {what} are "
            f"extrapolated: measured were {axis[0]:,.0f}..{axis[-1]:,.0f}"
            for what, values, axis in (
                ("tokens", [tokens], surface.axis0),
                ("weights", sorted({min(weights), max(weights)}), surface.axis1),
            )
            if (outside := [v for v in values if not axis[0] <= v <= axis[-1]])
        )

    @property
    def call_ns(self) -> Passes:
        """Once a micro-batch: calls and collectives' latency of a rank's layers.

        An upper bound on a GPU, where launches hide behind running kernels.
        """
        tp, cp, profile = self.parallel.tp, self.parallel.cp, self.profile
        work = self.recomputed_work
        forward: float = profile.layer.forward_call_ns
        backward: float = profile.layer.backward_call_ns
        # Only whole layers are measured, so the constant of a partly recomputed layer is divided in
        # proportion to its matrix products.
        backward += forward * len(work.matrices) / len(layer_matrices(self.model))
        for op, calls in elementwise_calls(self.model).items():
            cost = profile.elementwise_of(Elementwise(op))
            forward += calls * cost.forward_call_ns
            backward += calls * cost.backward_call_ns
            backward += work.calls.get(op, 0) * cost.forward_call_ns
        tp_backward = [now + more for now, more in zip(TP_BACKWARD, work.tp, strict=True)]
        for op, tp_calls, cp_calls in (
            # Backward gathers K and V once: recomputed attention keeps what it gathers.
            (Collective.ALL_GATHER, (TP_FORWARD[0], tp_backward[0]), (1, 1)),
            (Collective.REDUCE_SCATTER, (TP_FORWARD[1], tp_backward[1]), (0, 1)),
        ):
            tp_alpha = profile.collective(op, span_ranks=tp).alpha_ns * (tp > 1)
            cp_alpha = profile.collective(op, span_ranks=tp * cp).alpha_ns * (cp > 1)
            forward += tp_calls[0] * tp_alpha + cp_calls[0] * cp_alpha
            backward += tp_calls[1] * tp_alpha + cp_calls[1] * cp_alpha
        if self.parallel.ep > 1:
            more = [ns * self._routed_share for ns in self._stage_call_ns()]
            forward, backward = forward + more[0], backward + more[1]
        return forward * self.num_layers, backward * self.num_layers

    @property
    def weight_products_ns_per_token(self) -> float:
        """Time for one token of the matrix products that give weights' gradients."""
        return self._products_ns()[1] / LINEAR_BACKWARD_FACTOR * self.num_layers

    @property
    def routed_ns_per_token(self) -> Work:
        """The part of `ns_per_token` that experts compute of one token: not on its own rank, but
        on the one of its EP group that has most rows."""
        factor = self.num_layers * self.expert_load
        forward, backward, recomputed = self._routed_ns()
        return forward * factor, backward * factor, recomputed * factor

    def _routed_work(self) -> RoutedWork:
        """What hides experts' rows while they travel, of one token in one layer with experts, on
        the rank with most rows."""
        model, is_full = self.model.layer_kinds[0].model, self.recompute == Recompute.FULL
        products, moved = self._in_layer(self._gemm_of(model, range(4, 7))), self._reordered_ns()
        shared = model.experts.shared / (model.experts.per_token + model.experts.shared)
        forward, backward, recomputed = (ns * (1 - shared) * self.expert_load for ns in products)
        if not self.model.branch_norms:
            # The experts' last product does not run again, whatever dense layers recompute.
            recomputed = min(recomputed, forward * 2 / 3)
        weights = backward / LINEAR_BACKWARD_FACTOR
        return RoutedWork(
            wire=routed_wire_ns(self.model, self.parallel, self.profile) * self.expert_load,
            forward=forward + moved[0],
            gradients=backward - weights + moved[1],
            weights=weights,
            recomputed=recomputed + moved[2],
            shared_forward=products[0] * shared,
            shared_backward=products[1] * shared,
            shared_recomputed=products[2] * shared,
            before=self._in_layer(self._gemm_of(model, range(4)))[2] if is_full else 0.0,
            is_recomputed=self.recompute != Recompute.NONE,
            defers_weights=self.defers_weights,
        )

    def routed_rows_ns(self, num_tokens: int, num_micro_batches: int) -> tuple[float, float]:
        """What all-to-alls of experts' rows take in a rank's layers, and the part of it that the
        rank waits for."""
        work, each = self._routed_work(), num_tokens / num_micro_batches
        alpha = self._routed_alpha_ns / each
        whole = (4 + work.is_recomputed) * (work.wire + self.expert_stages * alpha)
        copies = num_tokens * self.num_layers * self._routed_share
        return whole * copies, sum(work.waits(self.expert_stages, alpha)) * copies

    @property
    def _routed_share(self) -> float:
        """Layers with experts over all layers."""
        return self.model.num_expert_layers / self.model.num_layers

    @property
    def _routed_alpha_ns(self) -> float:
        """Latency of an all-to-all of experts' rows."""
        span = min(self.parallel.ep, self.profile.ranks_per_node + 1)
        return all_to_all_latency_ns(self.profile, span_ranks=span)

    def _reordered_ns(self) -> Work:
        """Time to reorder a token's rows before and after they travel (`reordered_values`), in one
        layer with experts, on the rank with most rows."""
        cost = self.profile.elementwise_of(Elementwise.RESIDUAL)
        size = DTYPE_BYTES[self.profile.dtype] / (self.parallel.tp * self.parallel.cp)
        size *= self.expert_load
        forward, backward, recomputed = (
            n * size / cost.forward_bytes_per_s * 1e9 for n in reordered_values(self.model)
        )
        work = self._in_layer((forward, backward, recomputed))
        return (*work[:2], work[2] * (self.recompute != Recompute.NONE))

    def _stage_call_ns(self) -> Passes:
        """Constant cost a micro-batch of the exchange in a layer with experts: latency of
        all-to-alls that nothing hides, and what smaller products take longer in stages."""
        work, stages, tokens = self._routed_work(), self.expert_stages, self.micro_batch_tokens
        late, early = work.waits(stages, self._routed_alpha_ns / tokens), work.waits(stages)
        rows, columns = layer_matrices(self.model.layer_kinds[0].model)[4]
        at = np.array([max(1.0, tokens / self.parallel.cp)]), np.array([rows * columns])
        smaller = smaller_products_ns(
            self.model,
            stages,
            profile=self.profile,
            tflops=float(self.profile.gemm.forward.at(*at)[0]),
            is_recomputed=self.recompute != Recompute.NONE,
        )
        forward, backward = (
            (a - b) * tokens + more for a, b, more in zip(late, early, smaller, strict=True)
        )
        return forward, backward

    @property
    def embedding_ns_per_token(self) -> Passes:
        """The first stage's embedding of one token of a micro-batch."""
        cost = self.profile.elementwise_of(Elementwise.EMBEDDING)
        # The time is not divided by tp: every TP rank looks up all tokens in its part of the
        # vocabulary.
        size = DTYPE_BYTES[self.profile.dtype] / self.parallel.cp
        forward, backward = elementwise_values(self.model)[Elementwise.EMBEDDING]
        return (
            forward * size / cost.forward_bytes_per_s * 1e9,
            backward * size / cost.backward_bytes_per_s * 1e9,
        )

    @property
    def head_ns_per_token(self) -> float:
        """Head and loss of one token on the last stage, both passes: all run in forward."""
        flops = (1 + LINEAR_BACKWARD_FACTOR) * head_flops(self.model)
        ranks = self.parallel.tp * self.parallel.cp
        return flops / ranks / self.profile.head.tflops * 1e-3

    @property
    def head_backward_ns(self) -> float:
        """Backward of the head, once a micro-batch: it scales the weight's gradient."""
        values = 3 * self.model.hidden_size * self.model.vocab_size / self.parallel.tp
        return values * GRADIENT_BYTES / self.profile.head.backward_bytes_per_s * 1e9

    def tp_wire_ns(self, gathers: int, scatters: int) -> float:
        """Exposed bandwidth terms of collectives of [tokens, hidden], for one token."""
        row_bytes = self.model.hidden_size * DTYPE_BYTES[self.profile.dtype] / self.parallel.cp
        tp = self.parallel.tp
        return self._wire_ns(row_bytes, tp, tp, gathers, scatters)

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """(forward, backward) collectives of a micro-batch's keys and values: an all-gather; a
        reduce-scatter of gradients and, unless gathered K and V are kept, the gather again.
        Transfers that matrix products hide are included."""
        there, again, back = self.transfers_ns(None, num_tokens, cp=cp)
        return round(there), round(again + back)

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """(forward, backward) all-to-alls of the rows that ranks need, as `kv_exchange_ns`.

        moved: rows that rank i receives of rank j's, [cp, cp] with i first. Gradients go the other
        way.
        """
        there, again, back = self.transfers_ns(moved, 0, cp=len(moved))
        return round(there), round(again + back)

    def transfers_ns(
        self, moved: IntArray | FloatArray | None, num_tokens: int, *, cp: int
    ) -> Work:
        """K and V in forward and again in backward, and their gradients' way back, of the layers of
        a pipeline rank. moved: as in `needed_exchange_ns`; None: an all-gather of `num_tokens`."""
        if moved is None:
            tp = self.parallel.tp
            values = num_tokens * 2 * self.model.kv_dim / tp
            of_gather, of_scatter = self._gather_and_scatter(tp * cp, cp)
            there = of_gather.time_ns(values * DTYPE_BYTES[self.profile.dtype], num_ranks=cp)
            back = of_scatter.time_ns(values * GRADIENT_BYTES, num_ranks=cp)
        else:
            there = self._all_to_all_ns(moved, DTYPE_BYTES[self.profile.dtype])
            back = self._all_to_all_ns(moved.T, GRADIENT_BYTES)
        layers = self.num_layers
        return there * layers, there * layers, back * layers

    def products_ns(self, num_tokens: int) -> Work:
        """Matrix products of a micro-batch that run while its keys travel: Q's projection in
        forward; the MLP's and the output projection's backward; Q's backward."""
        q = self._in_layer(self._gemm_ns(range(1)))
        rest = self._in_layer(self._gemm_ns(range(3, 7)))
        tokens = num_tokens * self.num_layers
        return q[0] * tokens, rest[1] * tokens, q[1] * tokens

    def _all_to_all_ns(self, moved: IntArray | FloatArray, value_bytes: int) -> float:
        """One layer's all-to-all of K and V, or of their gradients."""
        cp, tp = len(moved), self.parallel.tp
        if cp == 1:
            return 0.0
        node = np.arange(cp) * tp // self.profile.ranks_per_node
        row_bytes = 2 * self.model.kv_dim / tp * value_bytes
        return all_to_all_ns(
            self.profile, moved, node[:, None] == node, row_bytes=row_bytes, span_ranks=tp * cp
        )

    def _gemm_ns(self, matrices: range = range(7)) -> Work:
        """GEMMs of one token in the mean layer, of some of `layer_matrices`."""
        return self._mean(lambda model: self._gemm_of(model, matrices))

    def _mean(self, work_of: Callable[[ModelSpec], Work]) -> Work:
        """Work of the mean layer, from that of layers with experts and of those with an MLP."""
        works = [(kind.share, work_of(kind.model)) for kind in self.model.layer_kinds]
        forward, backward, recomputed = (sum(s * w[i] for s, w in works) for i in range(3))
        return forward, backward, recomputed

    def _gemm_of(self, model: ModelSpec, matrices: range) -> Work:
        """GEMMs of one token in a layer of `model`: FLOPs over throughput."""
        tp, cp, gemm = self.parallel.tp, self.parallel.cp, self.profile.gemm
        tokens = np.array([max(1.0, self.micro_batch_tokens / cp)])
        forward = backward = recomputed = 0.0
        for i, (rows, columns) in enumerate(layer_matrices(model)):
            if i not in matrices:
                continue
            weights = np.array([rows * columns / tp])
            work = 2 * rows * columns / (tp * cp) * 1e-3
            once = work / float(gemm.forward.at(tokens, weights)[0])
            forward += once
            backward += work * LINEAR_BACKWARD_FACTOR / float(gemm.backward.at(tokens, weights)[0])
            recomputed += once * (i in self.recomputed_work.matrices)
        return forward, backward, recomputed

    def _routed_ns(self) -> Work:
        """What experts compute of one token in the mean layer, if all ranks have equal rows."""
        experts, model = self.model.experts, self.model.layer_kinds[0].model
        routed = self._routed_share * experts.per_token / (experts.per_token + experts.shared)
        forward, backward, recomputed = self._in_layer(self._gemm_of(model, range(4, 7)))
        return forward * routed, backward * routed, recomputed * routed

    def _products_ns(self) -> Work:
        """Matrix products of one token in the mean layer, experts' on the rank with most rows."""
        own, routed = self._in_layer(self._gemm_ns()), self._routed_ns()
        forward, backward, recomputed = (
            a + (self.expert_load - 1) * b for a, b in zip(own, routed, strict=True)
        )
        return forward, backward, recomputed

    def _elementwise_ns(self) -> Work:
        """Element-wise operators of one token in the mean layer."""
        return self._mean(self._elementwise_of)

    def _elementwise_of(self, model: ModelSpec) -> Work:
        size = DTYPE_BYTES[self.profile.dtype] / (self.parallel.tp * self.parallel.cp)
        calls = elementwise_calls(self.model)
        forward = backward = recomputed = 0.0
        for op, values in elementwise_values(model).items():
            if op != Elementwise.EMBEDDING:
                cost = self.profile.elementwise_of(Elementwise(op))
                more = self.traffic.get(op, (1.0, 1.0))
                once = values[0] * more[0] * size / cost.forward_bytes_per_s * 1e9
                forward += once
                backward += values[1] * more[1] * size / cost.backward_bytes_per_s * 1e9
                recomputed += once * self.recomputed_work.calls.get(op, 0) / calls[op]
        return forward, backward, recomputed

    def _kv_wire_ns(self, values: float) -> Work:
        """Bandwidth terms of a token's keys and values and of their gradients."""
        cp, span = self.parallel.cp, self.parallel.tp * self.parallel.cp
        gather = self._wire_ns(values * DTYPE_BYTES[self.profile.dtype], cp, span, 1, 0)
        scatter = self._wire_ns(values * GRADIENT_BYTES, cp, span, 0, 1)
        if self.recomputed_work.attention:
            return gather, scatter, gather
        return gather, scatter + gather, 0.0

    def _in_layer(self, work: Work) -> Work:
        """Times of single operators scaled to their times inside a layer."""
        (forward, backward, recomputed), layer = work, self.profile.layer
        in_forward = layer.forward_factor
        return forward * in_forward, backward * layer.backward_factor, recomputed * in_forward

    def _wire_ns(
        self, size_bytes: float, num_ranks: int, span_ranks: int, gathers: int, scatters: int
    ) -> float:
        """Bandwidth terms of all-gathers and reduce-scatters."""
        costs = self._gather_and_scatter(span_ranks, num_ranks)
        gather, scatter = (cost.wire_ns(size_bytes, num_ranks=num_ranks) for cost in costs)
        return gathers * gather + scatters * scatter

    def _gather_and_scatter(self, span_ranks: int, num_ranks: int) -> list[CollectiveCost]:
        return [
            self.profile.collective(op, span_ranks=span_ranks, num_ranks=num_ranks)
            for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        ]


WEIGHT_GATHERS, SAVED_GATHERS = 4, 2
"""Under TP the weights' pass gathers all four [tokens, hidden] tensors of a layer again
(`wlb.parallel.deferred`), and the inputs' pass keeps the gathers of gradients: two more in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """Weights' gradients computed apart from inputs' gradients (zero-bubble): times of a pipeline
    rank's layers. weight_*: of the weights' pass, which has one of the two products of each
    linear layer's backward. saved_*: time by which the inputs' pass is shorter than a whole
    backward. product_ns_per_token: of those products, part of both. *_call_ns: a micro-batch."""

    product_ns_per_token: float
    weight_ns_per_token: float
    weight_call_ns: float
    saved_ns_per_token: float
    saved_call_ns: float


def split_backward(linear: LinearCost) -> SplitBackward:
    """Divides the linear part of backward: inputs' pass = backward - saved, and weights' pass."""
    tp, layers = linear.parallel.tp, linear.num_layers
    alpha = linear.profile.collective(Collective.ALL_GATHER, span_ranks=tp).alpha_ns * (tp > 1)
    product = linear.weight_products_ns_per_token
    exposed = 1 - linear.tp_overlap
    return SplitBackward(
        product_ns_per_token=product,
        weight_ns_per_token=product + linear.tp_wire_ns(WEIGHT_GATHERS, 0) * layers * exposed,
        weight_call_ns=WEIGHT_GATHERS * alpha * layers,
        saved_ns_per_token=product + linear.tp_wire_ns(SAVED_GATHERS, 0) * layers * exposed,
        saved_call_ns=SAVED_GATHERS * alpha * layers,
    )
