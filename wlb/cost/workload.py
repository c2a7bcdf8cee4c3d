"""Eq. 2: the work of a document, W(d) = W_a(d) + W_l(d), by which packing and sharding balance.

W is the predicted time of one pipeline rank's layers, forward and backward, for a piece of d tokens
that is spread over the CP group: int64 ns, additive over pieces, 0 for length 0, monotone in d.

- W_a, quadratic in d: the attention kernels (`ProfiledWorkload.attention_ns`) of the layers that
  have attention. It is the cheaper of
  two shardings (Section 5.3): per-document chunks, or the whole piece on one rank in 1 of cp cases.
- W_l, proportional to d (`LinearCost.ns_per_token`): matrix products, element-wise operators, TP's
  collectives, an all-gather of CP's keys and values, and what ranks wait for experts' rows. With
  `training.recompute`, backward includes what runs again, at forward's price.

Prices are those of a kernel profile (`wlb.cost.profile`): counts (`wlb.cost.flops`) over measured
throughput. `wlb profile` measures them.

Not part of W, because it does not depend on which documents share a micro-batch, and where it is
priced instead: costs a call and collectives' latency (`LinearCost.call_ns`, `attention_call_ns`);
embedding, head and loss (at the end of `LinearCost`); padding and pipeline messages
(`wlb.simulate.pass_times`); FSDP and gradients (`wlb.simulate.shards`). What ranks wait for an
exchange of keys beyond, or short of, a plain all-gather is in `wlb.cost.exposed`, and attention of
real shards in `wlb.cost.protocol`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

import numpy as np

from wlb.cost.all_to_all import all_to_all_latency_ns, all_to_all_ns, link_bandwidths
from wlb.cost.expert_rows import RoutedWork, reordered_values, routed_wire_ns, smaller_products_ns
from wlb.cost.flops import (
    LINEAR_BACKWARD_FACTOR,
    TP_BACKWARD,
    TP_FORWARD,
    RecomputedWork,
    elementwise_calls,
    elementwise_values,
    head_flops,
    layer_matrices,
    recomputed_work,
    recurrence_flops,
)
from wlb.cost.machine import gpu_power_limit_w, machine_name
from wlb.cost.monotone import MonotoneTable
from wlb.cost.profile import (
    DTYPE_BYTES,
    GRADIENT_BYTES,
    AttentionTable,
    Collective,
    CollectiveCost,
    Elementwise,
    KernelProfile,
)
from wlb.cost.profile_file import load_profile, matching_profile
from wlb.cost.protocol import Transfers, segment_sizes, token_counts, whole_ns
from wlb.plan import FloatArray, IntArray, IntLike, UserError, check_between
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec, Recompute, RunSpec
from wlb.spec.model import LayerKind

Passes = tuple[float, float]
"""Forward and backward."""
Work = tuple[float, float, float]
"""Forward, backward without recompute, and the part of forward that backward runs again."""

_MOST_TABLED = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledWorkload:
    """W of one pipeline rank, priced with a kernel profile (a `WorkloadModel`).

    Attention by length is tabled at construction (about 2 ms), so that pricing is a look-up.
    """

    model: ModelSpec  # whose layers are priced
    parallel: ParallelSpec  # the layout, which divides them
    profile: KernelProfile  # the prices
    backend: str | None = None  # attention kernel; without a table of it, the profile's first
    micro_batch_tokens: int = 131072  # tokens at which GEMM throughput is read
    recompute: Recompute = Recompute.NONE  # of [training]
    tp_overlap: float = 0.0  # share of TP collectives hidden behind matrix products
    expert_load: float = 1.0  # as in `LinearCost`
    overlaps: bool = False  # cp.overlap_stages > 0
    stages: int = 1  # max(1, cp.overlap_stages)
    expert_stages: int = 1  # as in `LinearCost`
    defers_weights: bool = False  # as in `LinearCost`
    traffic: Mapping[str, Passes] = field(default_factory=dict[str, Passes])  # as in `LinearCost`
    recomputed: RecomputedWork | None = None  # as in `LinearCost`
    machine: str = ""  # for `mismatches` only; "" if unknown
    power_limit_w: float = 0.0  # of the machine's GPU, for `mismatches` only; 0 if unknown
    dtype: str = ""  # for `mismatches` only; "" if unknown
    longest: int = 0  # most tokens of a piece, for `mismatches` only; 0 if unknown
    table: AttentionTable = field(init=False)  # of the profile, for this kernel and these heads
    linear: "LinearCost" = field(init=False)  # W_l, by operator
    ns_per_token: dict[str, float] = field(init=False)  # by linear term
    hiding_ns: Transfers = field(init=False)  # products that hide an exchange, a token and layer
    forward_ns: MonotoneTable = field(init=False, repr=False)  # attention by length
    backward_ns: MonotoneTable = field(init=False, repr=False)  # of backward

    def __post_init__(self) -> None:
        if self.model.num_heads % self.parallel.tp:
            raise UserError(
                f"model.num_heads = {self.model.num_heads} must be a multiple of tp = "
                f"{self.parallel.tp}"
            )
        known = self.backend if self.backend in self.profile.backends else None
        table = self.profile.table(
            backend=known,
            head_dim=self.model.head_size,
            num_heads=self.heads_per_rank,
            num_kv_heads=self._with_copies.num_kv_heads // self.parallel.tp,
        )
        object.__setattr__(self, "table", table)
        # The arguments of `LinearCost` are fields of this class with the same names.
        linear = LinearCost(**{f.name: getattr(self, f.name) for f in fields(LinearCost)})
        object.__setattr__(self, "linear", linear)
        object.__setattr__(self, "ns_per_token", linear.ns_per_token)
        q, rest = (linear.products_ns(of, with_attention=True) for of in (range(1), range(3, 7)))
        hiding = Transfers(there=q[0], again=rest[1], back=q[1])
        object.__setattr__(self, "hiding_ns", hiding)
        longest = max(128, min(self.micro_batch_tokens, _MOST_TABLED))
        tables = MonotoneTable.of(self._attention_of_pieces, longest=longest)
        for name, tabled in zip(("forward_ns", "backward_ns"), tables, strict=True):
            object.__setattr__(self, name, tabled)

    # W = W_a + W_l

    def workload_ns(self, lengths: IntLike) -> IntArray:
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    # W_a: attention kernels

    def attention_ns(self, lengths: IntLike) -> IntArray:
        d = token_counts("lengths", lengths)
        return self.forward_ns.at(d) + self.backward_ns.at(d)

    def _attention_of_pieces(self, d: FloatArray) -> tuple[FloatArray, FloatArray]:
        """W_a of pieces, forward and backward, before it is tabled."""
        # The whole piece on one rank, which happens in 1 of cp cases.
        forward, backward = self._times(d, d)
        cp = self.parallel.cp
        if cp == 1:
            return forward, backward
        # Per document, a rank has two of 2 cp chunks, of which one is early and one late.
        chunk_forward, chunk_backward = self._times(*self.mean_chunk(d))
        forward = np.minimum(forward / cp, 2 * chunk_forward)
        return forward, np.minimum(backward / cp, 2 * chunk_backward)

    def mean_chunk(self, d: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Rows and keys of the mean chunk of pieces that are sharded per document."""
        cp = self.parallel.cp
        return (d, d) if cp == 1 else (d / (2 * cp), d * (2 * cp + 1) / (4 * cp))

    def _times(self, q: FloatArray, kv: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Kernels of segments (q rows over kv keys) in all layers of a pipeline rank."""
        forward, backward = np.zeros(q.shape), np.zeros(q.shape)
        for layers, window in self._layers_by_window():
            times = self.table.times_ns(
                *(q, kv),
                num_heads=self.heads_per_rank,
                head_dim=self.model.head_size,
                sliding=window,
            )
            forward, backward = forward + times[0] * layers, backward + times[1] * layers
        return forward, backward + forward * self.linear.recomputed_work.attention

    def _layers_by_window(self) -> list[tuple[float, int]]:
        """Numbers of layers with attention and their windows, 0 for those that see all keys."""
        sliding = self.num_layers_per_rank * self.sliding_share
        full = self.num_attention_layers - sliding
        both = ((full, 0), (sliding, self.model.sliding_window))
        return [(layers, window) for layers, window in both if layers]

    # W_l: all else that grows with tokens

    def linear_ns(self, lengths: IntLike) -> IntArray:
        d = token_counts("lengths", lengths)
        return sum(
            (whole_ns(d * ns) for ns in self.ns_per_token.values()), np.zeros(d.size, np.int64)
        )

    # Parts of W

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        d = token_counts("lengths", lengths)
        linear = (ns for name, ns in self.ns_per_token.items() if name.endswith("_forward"))
        return self.forward_ns.at(d) + whole_ns(d * sum(linear))

    def terms(self, lengths: IntLike) -> dict[str, IntArray]:
        """The parts of W as in Figure 7; they add up to `workload_ns`."""
        d = token_counts("lengths", lengths)
        attention = {
            "attention_forward": self.forward_ns.at(d),
            "attention_backward": self.backward_ns.at(d),
        }
        return attention | {name: whole_ns(d * ns) for name, ns in self.ns_per_token.items()}

    def pooled_ns(self, tokens: IntArray) -> IntArray:
        """The part of micro-batches' work that ranks of an EP group share: experts' products."""
        return np.rint(sum(self.linear.routed_ns_per_token) * tokens).astype(np.int64)

    # Attention of segments, as they are sharded

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        forward, backward = self._times(*segment_sizes(q, kv))
        return whole_ns(forward), whole_ns(backward)

    def attention_call_ns(
        self, q: IntLike, kv: IntLike, offsets: IntArray
    ) -> tuple[IntArray, IntArray]:
        rows, keys = segment_sizes(q, kv)
        forward, backward = np.zeros(offsets.size - 1), np.zeros(offsets.size - 1)
        for layers, window in self._layers_by_window():
            calls = self.table.calls_ns(
                *(rows, keys, offsets), num_heads=self.heads_per_rank, sliding=window
            )
            forward, backward = forward + calls[0] * layers, backward + calls[1] * layers
        recomputed = whole_ns(forward) * self.linear.recomputed_work.attention
        return whole_ns(forward), whole_ns(backward) + recomputed

    # The exchange of keys and values, of which W_l has an all-gather's bandwidth term

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """(forward, backward) collectives of a micro-batch's keys and values: an all-gather; a
        reduce-scatter of gradients and, unless gathered K and V are kept, the gather again.
        Transfers that matrix products hide are included.
        """
        there, again, back = self.transfers_ns(None, num_tokens, cp=cp)
        return round(there), round(again + back)

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """(forward, backward) all-to-alls of the rows that ranks need, as `kv_exchange_ns`
        (`ExchangePrices`): of the busiest rank.

        moved: rows that rank i receives of rank j's, [cp, cp] with i first. Gradients go the other
        way.
        """
        there, again, back = self.transfers_ns(moved, 0, cp=len(moved))
        return round(there), round(again + back)

    def transfers_ns(
        self, moved: IntArray | FloatArray | None, num_tokens: int, *, cp: int
    ) -> Transfers:
        """Collectives of keys in the layers of a pipeline rank (`HiddenExchange`).

        moved: as in `needed_exchange_ns`; None: an all-gather of `num_tokens`.
        """
        if moved is None:
            tp = self.parallel.tp
            values = num_tokens * 2 * self._with_copies.kv_dim / tp
            of_gather, of_scatter = self.linear.gather_and_scatter(tp * cp, cp)
            there = of_gather.time_ns(values * DTYPE_BYTES[self.profile.dtype], num_ranks=cp)
            back = of_scatter.time_ns(values * GRADIENT_BYTES, num_ranks=cp)
        else:
            there = self._all_to_all_ns(moved, DTYPE_BYTES[self.profile.dtype])
            back = self._all_to_all_ns(moved.T, GRADIENT_BYTES)
        layers = self.num_attention_layers
        return Transfers(there=there * layers, again=there * layers, back=back * layers)

    def _all_to_all_ns(self, moved: IntArray | FloatArray, value_bytes: int) -> float:
        """One layer's all-to-all of K and V, or of their gradients."""
        cp, tp = len(moved), self.parallel.tp
        if cp == 1:
            return 0.0
        node = np.arange(cp) * tp // self.profile.ranks_per_node
        row_bytes = 2 * self._with_copies.kv_dim / tp * value_bytes
        return all_to_all_ns(
            self.profile, moved, node[:, None] == node, row_bytes=row_bytes, span_ranks=tp * cp
        )

    def products_ns(self, num_tokens: int) -> Transfers:
        """Matrix products of a micro-batch that run while its keys travel (`HiddenExchange`): Q's
        projection in forward; the MLP's and the output projection's backward; Q's backward.
        """
        tokens = num_tokens * self.num_attention_layers
        return Transfers(*(ns * tokens for ns in self.hiding_ns))

    # Summaries of linear layers, which W_l does not have

    @property
    def summary_ns(self) -> float:
        """Time to move one summary of all linear layers of a pipeline rank (`SummaryPrices`), as if
        all of them went over the slowest link of the CP group.
        """
        cp, tp = self.parallel.cp, self.parallel.tp
        linear_layers = self.num_layers_per_rank - self.num_attention_layers
        if not linear_layers or cp == 1:
            return 0.0
        links = link_bandwidths(self.profile)
        is_inside = tp * cp <= self.profile.ranks_per_node
        bandwidth = links.inside if is_inside else links.between
        size = GRADIENT_BYTES * self.model.linear.summary_values / tp
        return size / bandwidth * 1e9 * linear_layers

    # The layers and ranks that are priced

    @property
    def _with_copies(self) -> ModelSpec:
        """What TP ranks compute together, with copies of KV heads."""
        return self.model.with_kv_copies(self.parallel.tp)

    @property
    def heads_per_rank(self) -> int:
        """Query heads of a TP rank."""
        return self.model.num_heads // self.parallel.tp

    @property
    def num_layers_per_rank(self) -> int:
        """Layers of a pipeline rank."""
        return self.linear.num_layers

    @property
    def num_attention_layers(self) -> float:
        """Layers with attention of a pipeline rank that has the model's share of them."""
        return self.num_layers_per_rank * self.model.attention_share

    @property
    def cp_ranks_per_node(self) -> int:
        """CP ranks that follow each other in a node (`HiddenExchange`)."""
        return max(1, self.profile.ranks_per_node // self.parallel.tp)

    @property
    def sliding_window(self) -> int:
        """Keys that a query sees in a sliding layer (`SlidingLayers`)."""
        return self.model.sliding_window

    @property
    def sliding_share(self) -> float:
        """Sliding layers over all; these prices are of stages that have the model's share."""
        return self.model.num_sliding_layers / self.model.num_layers

    @property
    def of_other_layers(self) -> "ProfiledWorkload":
        """Prices of as many layers that do not see all keys: sliding or linear ones."""
        return _of_other_layers(self)


@lru_cache(maxsize=8)  # its tables take 2 ms, and telemetry asks for them in every step
def _of_other_layers(cost: ProfiledWorkload) -> ProfiledWorkload:
    return replace(cost, model=replace(cost.model, full_every=0, full_first=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """W_l of a pipeline rank for one token, and what such a rank does besides attention and W.

    The fields are those of `ProfiledWorkload`.
    """

    model: ModelSpec  # whose layers are priced
    parallel: ParallelSpec  # the layout, which divides them
    profile: KernelProfile  # the prices
    micro_batch_tokens: int  # tokens at which GEMM throughput is read
    recompute: Recompute  # of [training]
    tp_overlap: float = 0.0  # share of TP's bandwidth terms hidden behind matrix products
    expert_stages: int = 1  # ep.stages
    defers_weights: bool = False  # whether weights' gradients are computed in passes of their own
    expert_load: float = 1.0  # rows of the EP rank that a layer waits for over the mean rank's
    # Bytes that element-wise operators move in each pass over those of the profile's fused kernels,
    # by operator, for trainers without such kernels (`PLAIN_TORCH`).
    traffic: Mapping[str, Passes] = field(default_factory=dict[str, Passes])
    recomputed: RecomputedWork | None = None  # of another trainer; None: what `recompute` does

    def __post_init__(self) -> None:
        check_between("tp_overlap", self.tp_overlap, 0, 1, closed=True)

    # W_l of one token

    @property
    def ns_per_token(self) -> dict[str, float]:
        """W_l's terms for one token of a piece, by term and pass, of a rank's layers."""
        parallel, exposed = self.parallel, 1 - self.tp_overlap
        # Each term: forward, backward, and what backward runs again, of one layer.
        terms = {
            "gemm": self._products_with_load_ns(),
            "elementwise": self._in_layer(self._mean(self._elementwise_of)),
            # Bandwidth alone; the latency of collectives is a constant of a micro-batch.
            "tp_comm": tuple(
                self.tp_wire_ns(*calls) * exposed
                for calls in (TP_FORWARD, TP_BACKWARD, self.recomputed_work.tp)
            ),
            "cp_comm": self._kv_wire_ns(
                2
                * self.model.with_kv_copies(parallel.tp).kv_dim
                / parallel.tp
                * self.model.attention_share
            ),
        }
        # Experts' rows are put into another order, and ranks wait where nothing hides that.
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
    def num_layers(self) -> int:
        """Layers that are priced: the mean pipeline rank's, rounded up."""
        return -(-self.model.num_layers // self.parallel.pp)

    @property
    def recomputed_work(self) -> RecomputedWork:
        """What backward computes again of a layer."""
        return self.recomputed or recomputed_work(self.model, self.recompute)

    # W_l: matrix products

    def _products_with_load_ns(self) -> Work:
        """Matrix products of one token in the mean layer, experts' on the rank with most rows."""
        own, routed = self.products_ns(), self._routed_ns()
        forward, backward, recomputed = (
            a + (self.expert_load - 1) * b for a, b in zip(own, routed, strict=True)
        )
        return forward, backward, recomputed

    def products_ns(self, matrices: range = range(7), *, with_attention: bool = False) -> Work:
        """Matrix products of one token in the mean layer, of some of `layer_matrices`, with equal
        rows on all EP ranks. with_attention: in the mean of the layers that have it.
        """
        kinds = self.model.layer_kinds
        if with_attention:
            kinds = [kind for kind in kinds if not kind.is_linear] or kinds
        return self._in_layer(self._mean(lambda model: self._gemm_of(model, matrices), kinds))

    def _gemm_of(self, model: ModelSpec, matrices: range) -> Work:
        """GEMMs of one token in a layer of `model`: FLOPs over throughput."""
        tp, cp, gemm = self.parallel.tp, self.parallel.cp, self.profile.gemm
        tokens = np.array([max(1.0, self.micro_batch_tokens / cp)])
        forward = backward = recomputed = 0.0
        for i, (rows, columns) in enumerate(layer_matrices(model.with_kv_copies(tp))):
            if i not in matrices:
                continue
            # TP divides the matrix, CP the tokens. FLOPs / (TFLOP/s) is 1e-12 s, hence 1e-3 for ns.
            weights = np.array([rows * columns / tp])
            work = 2 * rows * columns / (tp * cp) * 1e-3
            once = work / float(gemm.forward.at(tokens, weights)[0])
            forward += once
            backward += work * LINEAR_BACKWARD_FACTOR / float(gemm.backward.at(tokens, weights)[0])
            recomputed += once * (i in self.recomputed_work.matrices)
        if model.is_all_linear and 3 in matrices:
            # The recurrence comes before the output's projection. Nobody has measured it: it is
            # priced as products of a head's keys and values, whose throughput is low.
            size = model.linear.key_head_dim * model.linear.value_head_dim
            work = recurrence_flops(model) / (tp * cp) * 1e-3
            once = work / float(gemm.forward.at(tokens, np.array([size]))[0])
            back = work / float(gemm.backward.at(tokens, np.array([size]))[0])
            forward, backward = forward + once, backward + LINEAR_BACKWARD_FACTOR * back
            recomputed += once * (3 in self.recomputed_work.matrices)
        return forward, backward, recomputed

    def _mean(
        self, work_of: Callable[[ModelSpec], Work], kinds: Sequence[LayerKind] | None = None
    ) -> Work:
        """Work of the mean layer, or of the mean of some kinds of layers."""
        kinds = self.model.layer_kinds if kinds is None else kinds
        works = [(kind.layers, work_of(kind.model)) for kind in kinds]
        layers = sum(count for count, _ in works)
        forward, backward, recomputed = (sum(n * w[i] for n, w in works) / layers for i in range(3))
        return forward, backward, recomputed

    def _in_layer(self, work: Work) -> Work:
        """Times of single operators scaled to their times inside a layer."""
        (forward, backward, recomputed), layer = work, self.profile.layer
        in_forward = layer.forward_factor
        return forward * in_forward, backward * layer.backward_factor, recomputed * in_forward

    # W_l: element-wise operators

    def _elementwise_of(self, model: ModelSpec) -> Work:
        """Element-wise operators of one token in a layer of `model`: bytes over throughput."""
        size = DTYPE_BYTES[self.profile.dtype] / (self.parallel.tp * self.parallel.cp)
        calls = elementwise_calls(model)
        work = self.recomputed or recomputed_work(model, self.recompute)
        forward = backward = recomputed = 0.0
        of_all_ranks = elementwise_values(model.with_kv_copies(self.parallel.tp))
        for op, values in of_all_ranks.items():
            if op != Elementwise.EMBEDDING:
                cost = self.profile.elementwise_of(Elementwise(op))
                more = self.traffic.get(op, (1.0, 1.0))
                once = values[0] * more[0] * size / cost.forward_bytes_per_s * 1e9
                forward += once
                backward += values[1] * more[1] * size / cost.backward_bytes_per_s * 1e9
                recomputed += once * work.calls.get(op, 0) / calls[op]
        return forward, backward, recomputed

    # W_l: collectives of TP, and of CP's keys and values

    def tp_wire_ns(self, gathers: int, scatters: int) -> float:
        """Exposed bandwidth terms of collectives of [tokens, hidden], for one token."""
        row_bytes = self.model.hidden_size * DTYPE_BYTES[self.profile.dtype] / self.parallel.cp
        tp = self.parallel.tp
        return self._wire_ns(row_bytes, tp, tp, gathers, scatters)

    def _kv_wire_ns(self, values: float) -> Work:
        """Bandwidth terms of a token's keys and values and of their gradients."""
        cp, span = self.parallel.cp, self.parallel.tp * self.parallel.cp
        gather = self._wire_ns(values * DTYPE_BYTES[self.profile.dtype], cp, span, 1, 0)
        scatter = self._wire_ns(values * GRADIENT_BYTES, cp, span, 0, 1)
        # Gathered keys are not kept: backward gathers again, in full recompute as part of it.
        if self.recomputed_work.attention:
            return gather, scatter, gather
        return gather, scatter + gather, 0.0

    def _wire_ns(
        self, size_bytes: float, num_ranks: int, span_ranks: int, gathers: int, scatters: int
    ) -> float:
        """Bandwidth terms of all-gathers and reduce-scatters."""
        costs = self.gather_and_scatter(span_ranks, num_ranks)
        gather, scatter = (cost.wire_ns(size_bytes, num_ranks=num_ranks) for cost in costs)
        return gathers * gather + scatters * scatter

    def gather_and_scatter(self, span_ranks: int, num_ranks: int) -> list[CollectiveCost]:
        """Costs of an all-gather and of a reduce-scatter of `num_ranks` among `span_ranks`."""
        return [
            self.profile.collective(op, span_ranks=span_ranks, num_ranks=num_ranks)
            for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        ]

    # W_l: experts of a token

    def _routed_ns(self) -> Work:
        """What experts compute of one token in the mean layer, if all ranks have equal rows."""
        experts, model = self.model.experts, self.model.layer_kinds[0].model
        routed = self._routed_share * experts.per_token / (experts.per_token + experts.shared)
        forward, backward, recomputed = self._in_layer(self._gemm_of(model, range(4, 7)))
        return forward * routed, backward * routed, recomputed * routed

    def _routed_work(self) -> RoutedWork:
        """What hides experts' rows while they travel, of one token in one layer with experts, on
        the rank with most rows.
        """
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

    def _reordered_ns(self) -> Work:
        """Time to reorder a token's rows before and after they travel (`reordered_values`), in one
        layer with experts, on the rank with most rows.
        """
        cost = self.profile.elementwise_of(Elementwise.RESIDUAL)
        size = DTYPE_BYTES[self.profile.dtype] / (self.parallel.tp * self.parallel.cp)
        size *= self.expert_load
        forward, backward, recomputed = (
            n * size / cost.forward_bytes_per_s * 1e9 for n in reordered_values(self.model)
        )
        work = self._in_layer((forward, backward, recomputed))
        return (*work[:2], work[2] * (self.recompute != Recompute.NONE))

    @property
    def _routed_share(self) -> float:
        """Layers with experts over all layers."""
        return self.model.num_expert_layers / self.model.num_layers

    # Not part of W: constants of a micro-batch

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
        elementwise = self._mean(self._elementwise_calls_of)
        forward, backward = forward + elementwise[0], backward + sum(elementwise[1:])
        tp_backward = [now + more for now, more in zip(TP_BACKWARD, work.tp, strict=True)]
        for op, tp_calls, cp_calls in (
            # Backward gathers K and V once: recomputed attention keeps what it gathers.
            (Collective.ALL_GATHER, (TP_FORWARD[0], tp_backward[0]), (1, 1)),
            (Collective.REDUCE_SCATTER, (TP_FORWARD[1], tp_backward[1]), (0, 1)),
        ):
            tp_alpha = profile.collective(op, span_ranks=tp).alpha_ns * (tp > 1)
            cp_alpha = profile.collective(op, span_ranks=tp * cp).alpha_ns * (cp > 1)
            cp_alpha *= self.model.attention_share
            forward += tp_calls[0] * tp_alpha + cp_calls[0] * cp_alpha
            backward += tp_calls[1] * tp_alpha + cp_calls[1] * cp_alpha
        # Two all-to-alls a linear layer: latest rows, and summaries.
        exchanges = 2 * (1 - self.model.attention_share) * (cp > 1)
        latency = exchanges * all_to_all_latency_ns(profile, span_ranks=tp * cp)
        forward += latency
        backward += latency * (1 + work.attention)
        if self.parallel.ep > 1:
            more = [ns * self._routed_share for ns in self._stage_call_ns()]
            forward, backward = forward + more[0], backward + more[1]
        return forward * self.num_layers, backward * self.num_layers

    def _elementwise_calls_of(self, model: ModelSpec) -> Work:
        """Constant costs a micro-batch of the element-wise operators in a layer of `model`."""
        work = self.recomputed or recomputed_work(model, self.recompute)
        forward = backward = recomputed = 0.0
        for op, calls in elementwise_calls(model).items():
            cost = self.profile.elementwise_of(Elementwise(op))
            forward += calls * cost.forward_call_ns
            backward += calls * cost.backward_call_ns
            recomputed += work.calls.get(op, 0) * cost.forward_call_ns
        return forward, backward, recomputed

    def _stage_call_ns(self) -> Passes:
        """Constant cost a micro-batch of the exchange in a layer with experts: latency of
        all-to-alls that nothing hides, and what smaller products take longer in stages.
        """
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
    def _routed_alpha_ns(self) -> float:
        """Latency of an all-to-all of experts' rows."""
        span = min(self.parallel.ep, self.profile.ranks_per_node + 1)
        return all_to_all_latency_ns(self.profile, span_ranks=span)

    # Not part of W: the ends of the model

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

    # Parts of W_l

    @property
    def weight_products_ns_per_token(self) -> float:
        """Time for one token of the matrix products that give weights' gradients."""
        return self._products_with_load_ns()[1] / LINEAR_BACKWARD_FACTOR * self.num_layers

    @property
    def routed_ns_per_token(self) -> Work:
        """The part of `ns_per_token` that experts compute of one token: not on its own rank, but
        on the one of its EP group that has most rows.
        """
        factor = self.num_layers * self.expert_load
        forward, backward, recomputed = self._routed_ns()
        return forward * factor, backward * factor, recomputed * factor

    def routed_rows_ns(self, num_tokens: int, num_micro_batches: int) -> tuple[float, float]:
        """What all-to-alls of experts' rows take in a rank's layers, and the part of it that the
        rank waits for.
        """
        work, each = self._routed_work(), num_tokens / num_micro_batches
        alpha = self._routed_alpha_ns / each
        whole = (4 + work.is_recomputed) * (work.wire + self.expert_stages * alpha)
        copies = num_tokens * self.num_layers * self._routed_share
        return whole * copies, sum(work.waits(self.expert_stages, alpha)) * copies


def workload_for(spec: RunSpec, device: str) -> ProfiledWorkload:
    """The workload of a run on "cpu" or "cuda"; `.profile` says which profile it took.

    cost.profile = auto takes the profile that matches device and kernel. A kernel that the profile
    lacks, or "auto", is priced as its first, so that a run need not wait for a measurement;
    `wlb.cost.mismatch` tells what does not match.
    """
    name, backend = spec.cost.profile, str(spec.kernels.attention)
    machine = machine_name(device)
    is_auto = name == "auto"
    power_w = gpu_power_limit_w() if device == "cuda" else 0.0
    if is_auto:
        profile = matching_profile(device, machine, backend, power_limit_w=power_w)
    else:
        profile = load_profile(name)
    return workload_of(spec, profile, machine=machine, power_limit_w=power_w)


def workload_of(
    spec: RunSpec, profile: KernelProfile, *, machine: str = "", power_limit_w: float = 0.0
) -> ProfiledWorkload:
    """The workload of a run priced with `profile`.

    Args:
        spec: The run.
        profile: Prices of the device.
        machine: Name of the device, for `mismatches`; "" if there is none.
        power_limit_w: Power limit of the device in W, for `mismatches`; 0 if it is unknown.
    """
    backend = str(spec.kernels.attention)
    return ProfiledWorkload(
        model=spec.model,
        parallel=spec.parallel,
        profile=profile,
        backend=None if backend == AttentionBackend.AUTO else backend,
        micro_batch_tokens=spec.data.context_window,
        tp_overlap=spec.cluster.tp_overlap,
        expert_load=spec.cost.expert_load,
        overlaps=spec.cp.overlap,
        stages=spec.cp.stages,
        expert_stages=spec.ep.stages,
        defers_weights=spec.splits_backward,
        recompute=spec.training.recompute,
        machine=machine,
        power_limit_w=power_limit_w,
        dtype=str(spec.training.dtype),
        longest=min(spec.data.context_window, round(spec.packing.s_max * spec.data.context_window)),
    )


def without_collectives(cost: ProfiledWorkload) -> ProfiledWorkload:
    """`cost` with free collectives, to compare with thread CPU time, which excludes waiting."""
    free = tuple(replace(c, alpha_ns=0, bytes_per_s=float("inf")) for c in cost.profile.collectives)
    return replace(cost, profile=replace(cost.profile, collectives=free))
