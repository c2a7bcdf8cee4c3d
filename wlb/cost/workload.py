"""The work of a document by Eq. 2, W(d) = W_a(d) + W_l(d), priced with a kernel profile.

Packing and sharding balance W. W is the predicted time of one pipeline rank's layers, forward and
backward, for a piece of d tokens that is spread over the CP group. It is a number of ns (int64).
The W of several pieces add up. W is 0 for length 0, and never falls as d grows.

- W_a is attention, which is quadratic in d (`ProfiledWorkload.attention_ns`). W_a is the price with
  the cheaper of two shardings (Section 5.3). Sharding per document cuts the piece into chunks for
  all CP ranks. Sharding per sequence is priced as if one rank computed the whole piece. Each rank
  then gets only 1 / cp of the pieces, so a piece costs 1 / cp of its time.
- W_l is proportional to d (`LinearCost.ns_per_token`): matrix products, element-wise operators,
  collectives of TP, an all-gather of keys and values over CP, and the time for which ranks wait for
  rows that travel to or from experts. With `training.recompute`, backward also includes the price
  of the part of forward that it recomputes.

A price is a count (`wlb.cost.flops`) over a measured throughput (`wlb.cost.profile`). `wlb profile`
measures throughputs.

W leaves out these parts of a step, which are priced elsewhere:

- kernel launches and the latency of collectives: `LinearCost.call_ns`, `attention_call_ns`
- embedding, head and loss: the last properties of `LinearCost`
- padding and messages between stages: `wlb.simulate.pass_times`
- collectives of FSDP and gradients: `wlb.simulate.shards`
- the difference between the wait for an exchange of keys and for a plain all-gather:
  `wlb.cost.exposed`
- attention of a micro-batch's actual spans, which are not known before sharding:
  `wlb.cost.protocol`
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
"""One quantity of each pass: (forward, backward)."""
Work = tuple[float, float, float]
"""Times in ns: (forward, backward without recomputation, what backward recomputes of forward)."""

_MOST_TABLED = 1 << 18
"""Most tokens up to which the table of attention prices has closely spaced lengths.

Longer pieces are interpolated between few lengths (`wlb.cost.monotone`), which bounds the time to
build the table.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledWorkload:
    """A `WorkloadModel` of one pipeline rank's layers, which takes prices from a kernel profile.

    The attention time of every length is tabulated at construction (about 2 ms), so that pricing is
    a look-up.
    """

    model: ModelSpec  # model whose layers are priced
    parallel: ParallelSpec  # degrees of parallelism, which divide the work of layers
    profile: KernelProfile  # measured prices
    # Name of the attention kernel. If it is None, or the profile has not measured it, the profile's
    # first kernel prices attention.
    backend: str | None = None
    # Tokens of a typical micro-batch on a whole CP group; the throughput of matrix products is read
    # at this size.
    micro_batch_tokens: int = 131072
    recompute: Recompute = Recompute.NONE  # `training.recompute`
    tp_overlap: float = 0.0  # fraction of TP's transfer time hidden behind matrix products
    # Rows of the EP rank with the most rows, divided by the mean of all EP ranks.
    expert_load: float = 1.0
    overlaps: bool = False  # whether `cp.overlap_stages` is above 0
    stages: int = 1  # stages of an exchange of keys: max(1, cp.overlap_stages)
    expert_stages: int = 1  # `ep.stages`: stages in which rows travel to experts and back
    defers_weights: bool = False  # whether weight gradients are computed in separate passes
    # Memory traffic of element-wise operators in another trainer (`LinearCost.traffic`).
    traffic: Mapping[str, Passes] = field(default_factory=dict[str, Passes])
    # What another trainer recomputes; None: what wlb recomputes with `recompute`.
    recomputed: RecomputedWork | None = None
    # Name of the device, "" if unknown. This field and the three after it are used only by
    # `wlb.cost.mismatch`.
    machine: str = ""
    power_limit_w: float = 0.0  # power limit of the machine's GPU in W; 0 if unknown
    dtype: str = ""  # data type of the run; "" if unknown
    longest: int = 0  # tokens of the longest piece; 0 if unknown
    table: AttentionTable = field(init=False)  # attention prices of the run's kernel and heads
    linear: "LinearCost" = field(init=False)  # prices of everything except attention
    ns_per_token: dict[str, float] = field(init=False)  # terms of W_l by name, e.g. "gemm_forward"
    # For each of the three transfers of an exchange of keys: the time of the matrix products that
    # run meanwhile and hide it, for one token and one layer.
    hiding_ns: Transfers = field(init=False)
    forward_ns: MonotoneTable = field(init=False, repr=False)  # forward attention time by length
    backward_ns: MonotoneTable = field(init=False, repr=False)  # backward attention time by length

    def __post_init__(self) -> None:
        if self.model.num_heads % self.parallel.tp:
            raise UserError(
                f"model.num_heads = {self.model.num_heads} must be a multiple of parallel.tp = "
                f"{self.parallel.tp}; lower parallel.tp"
            )
        known = self.backend if self.backend in self.profile.backends else None
        table = self.profile.table(
            backend=known,
            head_dim=self.model.head_size,
            num_heads=self.heads_per_rank,
            num_kv_heads=self._with_copies.num_kv_heads // self.parallel.tp,
        )
        object.__setattr__(self, "table", table)
        # Each field of `LinearCost` has the same name and meaning here.
        linear = LinearCost(**{f.name: getattr(self, f.name) for f in fields(LinearCost)})
        object.__setattr__(self, "linear", linear)
        object.__setattr__(self, "ns_per_token", linear.ns_per_token)
        # Keys and values travel during Q's projection, and their gradients return during its
        # backward. Backward sends keys and values a second time during the backward of the output
        # projection and the MLP.
        q, rest = (linear.products_ns(of, with_attention=True) for of in (range(1), range(3, 7)))
        hiding = Transfers(forward=q[0], repeated=rest[1], gradients=q[1])
        object.__setattr__(self, "hiding_ns", hiding)
        longest = max(128, min(self.micro_batch_tokens, _MOST_TABLED))
        tables = MonotoneTable.of(self._attention_of_pieces, longest=longest)
        for name, tabled in zip(("forward_ns", "backward_ns"), tables, strict=True):
            object.__setattr__(self, name, tabled)

    # W = W_a + W_l

    def workload_ns(self, lengths: IntLike) -> IntArray:
        """Return W_a + W_l (Eq. 2) of pieces with these lengths, in ns, shape [n]."""
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    # W_a: attention kernels

    def attention_ns(self, lengths: IntLike) -> IntArray:
        """Return W_a, the attention time of pieces with these lengths, in ns, shape [n]."""
        d = token_counts("lengths", lengths)
        return self.forward_ns.at(d) + self.backward_ns.at(d)

    def _attention_of_pieces(self, d: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Compute the forward and backward parts of W_a for pieces of d tokens, in ns."""
        # Per-sequence sharding: priced as if one of the cp ranks computed the whole piece. The mean
        # over ranks is then the time of the piece divided by cp.
        forward, backward = self._times(d, d)
        cp = self.parallel.cp
        if cp == 1:
            return forward, backward
        # Per-document sharding: each rank gets two of the piece's 2 * cp chunks, one early and one
        # late. Together they are priced as two chunks of mean cost.
        chunk_forward, chunk_backward = self._times(*self.mean_chunk(d))
        forward = np.minimum(forward / cp, 2 * chunk_forward)
        return forward, np.minimum(backward / cp, 2 * chunk_backward)

    def mean_chunk(self, d: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the mean query rows and keys of a piece's chunks in per-document sharding.

        Args:
            d: Tokens of each piece, shape [n].

        Returns:
            Query rows and keys, averaged over the 2 * cp chunks of each piece, shape [n] each. With
            cp = 1 the only chunk is the whole piece.
        """
        cp = self.parallel.cp
        return (d, d) if cp == 1 else (d / (2 * cp), d * (2 * cp + 1) / (4 * cp))

    def _times(self, q: FloatArray, kv: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return forward and backward ns of segments in all attention layers of a pipeline rank.

        Segment i has q[i] query rows and kv[i] keys. Backward includes recomputed attention.
        """
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
        """Return (number of attention layers, sliding window) pairs; 0 means no window.

        The numbers of layers are means over pipeline ranks, and may be fractions.
        """
        sliding = self.num_layers_per_rank * self.sliding_share
        full = self.num_attention_layers - sliding
        both = ((full, 0), (sliding, self.model.sliding_window))
        return [(layers, window) for layers, window in both if layers]

    # W_l: everything besides attention that grows with tokens

    def linear_ns(self, lengths: IntLike) -> IntArray:
        """Return W_l, everything but attention, of pieces with these lengths, in ns, shape [n]."""
        d = token_counts("lengths", lengths)
        return sum(
            (whole_ns(d * ns) for ns in self.ns_per_token.values()), np.zeros(d.size, np.int64)
        )

    # Parts of the work W_a + W_l, and sums of parts, for reports and metrics

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        """Return the forward part of W of pieces with these lengths, in ns, shape [n]."""
        d = token_counts("lengths", lengths)
        linear = (ns for name, ns in self.ns_per_token.items() if name.endswith("_forward"))
        return self.forward_ns.at(d) + whole_ns(d * sum(linear))

    def terms(self, lengths: IntLike) -> dict[str, IntArray]:
        """Return the parts of W of each piece, as in Figure 7 of the paper; they add up to W.

        Args:
            lengths: Tokens of each piece, shape [n].

        Returns:
            ns of each piece, shape [n], by "<term>_<pass>", for example "attention_forward",
            "gemm_backward" or "tp_comm_forward".
        """
        d = token_counts("lengths", lengths)
        attention = {
            "attention_forward": self.forward_ns.at(d),
            "attention_backward": self.backward_ns.at(d),
        }
        return attention | {name: whole_ns(d * ns) for name, ns in self.ns_per_token.items()}

    def pooled_ns(self, tokens: IntArray) -> IntArray:
        """Return the time of the routed experts' matrix products for each micro-batch.

        The ranks of an EP group pool this work: together they process the tokens of all their
        micro-batches. The result is what the tokens of each micro-batch contribute to the time.

        Args:
            tokens: Tokens of each micro-batch, shape [n].

        Returns:
            ns of each micro-batch, forward and backward together, shape [n].
        """
        return np.rint(sum(self.linear.routed_ns_per_token) * tokens).astype(np.int64)

    # Attention time of the segments that a sharding makes

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        """Return forward and backward kernel ns of segments with q query rows and kv keys each."""
        forward, backward = self._times(*segment_sizes(q, kv))
        return whole_ns(forward), whole_ns(backward)

    def attention_call_ns(
        self, q: IntLike, kv: IntLike, offsets: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return how many ns each attention call takes in addition to its segments' times.

        An example of such a time is the launch of the kernel.

        Args:
            q: Query rows of each segment, shape [n].
            kv: Keys of each segment, shape [n].
            offsets: Call i computes segments [offsets[i], offsets[i + 1]); shape [num_calls + 1].

        Returns:
            Forward and backward ns, shape [num_calls] each.
        """
        rows, keys = segment_sizes(q, kv)
        forward, backward = np.zeros(offsets.size - 1), np.zeros(offsets.size - 1)
        for layers, window in self._layers_by_window():
            calls = self.table.calls_ns(
                *(rows, keys, offsets), num_heads=self.heads_per_rank, sliding=window
            )
            forward, backward = forward + calls[0] * layers, backward + calls[1] * layers
        recomputed = whole_ns(forward) * self.linear.recomputed_work.attention
        return whole_ns(forward), whole_ns(backward) + recomputed

    # The exchange of keys and values. W_l already includes the transfer time of an all-gather

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """Return the time of all-gathering a micro-batch's keys and values: (forward, backward).

        Backward reduce-scatters the gradients and gathers keys and values a second time. The times
        are in ns, for all layers of a pipeline rank. They are the whole times of the collectives,
        although a part runs at the same time as matrix products.
        """
        sent, resent, returned = self.transfers_ns(None, num_tokens, cp=cp)
        return round(sent), round(resent + returned)

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """Return the ns of the exchange "needed" on the busiest CP rank: (forward, backward).

        Args:
            moved: Number of rows of K and V that rank i receives from rank j, shape [cp, cp].
                Gradients travel in the opposite direction.
        """
        sent, resent, returned = self.transfers_ns(moved, 0, cp=len(moved))
        return round(sent), round(resent + returned)

    def transfers_ns(
        self, moved: IntArray | FloatArray | None, num_tokens: int, *, cp: int
    ) -> Transfers:
        """Return the ns of one micro-batch's collectives of keys, values and their gradients.

        Args:
            moved: Number of rows of K and V that rank i receives from rank j, shape [cp, cp]; None
                for an all-gather.
            num_tokens: Tokens of the micro-batch, which an all-gather moves; unused with `moved`.
            cp: Number of CP ranks.
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
        return Transfers(forward=there * layers, repeated=there * layers, gradients=back * layers)

    def _all_to_all_ns(self, moved: IntArray | FloatArray, value_bytes: int) -> float:
        """Return the ns of one layer's all-to-all of K and V, or of their gradients.

        Args:
            moved: Number of rows that rank i receives from rank j, shape [cp, cp].
            value_bytes: Bytes of one value: the data type's, or those of a gradient.
        """
        cp, tp = len(moved), self.parallel.tp
        if cp == 1:
            return 0.0
        node = np.arange(cp) * tp // self.profile.ranks_per_node
        row_bytes = 2 * self._with_copies.kv_dim / tp * value_bytes
        return all_to_all_ns(
            self.profile, moved, node[:, None] == node, row_bytes=row_bytes, span_ranks=tp * cp
        )

    def products_ns(self, num_tokens: int) -> Transfers:
        """Return the ns of the matrix products that run during each transfer of keys and values.

        These products hide the transfer. They are Q's projection in forward, the backward of the
        MLP and of the output projection while keys and values are sent a second time, and the
        backward of Q's projection while gradients return.
        """
        tokens = num_tokens * self.num_attention_layers
        return Transfers(*(ns * tokens for ns in self.hiding_ns))

    # Summaries of linear-attention layers, which are not part of W_l

    @property
    def summary_ns(self) -> float:
        """Time to send one span's summaries in all linear-attention layers of a pipeline rank (ns).

        Summaries are priced as if all of them used the slowest link of the CP group.
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
        """The model with KV heads copied, where there are fewer KV heads than TP ranks."""
        return self.model.with_kv_copies(self.parallel.tp)

    @property
    def heads_per_rank(self) -> int:
        """Number of query heads of a TP rank."""
        return self.model.num_heads // self.parallel.tp

    @property
    def num_layers_per_rank(self) -> int:
        """Mean number of layers of a pipeline rank, rounded up."""
        return self.linear.num_layers

    @property
    def num_attention_layers(self) -> float:
        """Mean number of attention layers of a pipeline rank; it may be a fraction."""
        return self.num_layers_per_rank * self.model.attention_share

    @property
    def cp_ranks_per_node(self) -> int:
        """Number of consecutive CP ranks that share a node."""
        return max(1, self.profile.ranks_per_node // self.parallel.tp)

    @property
    def sliding_window(self) -> int:
        """Number of keys that a query sees in a layer with a sliding window."""
        return self.model.sliding_window

    @property
    def sliding_share(self) -> float:
        """Fraction of layers that have a sliding window, assumed equal in all stages."""
        return self.model.num_sliding_layers / self.model.num_layers

    @property
    def of_other_layers(self) -> "ProfiledWorkload":
        """Prices of a model that has as many layers, but none with full attention.

        Every layer is like those layers of the model that have a sliding window or linear
        attention.
        """
        return _of_other_layers(self)


@lru_cache(maxsize=8)  # its tables take 2 ms, and telemetry needs them in every step
def _of_other_layers(cost: ProfiledWorkload) -> ProfiledWorkload:
    return replace(cost, model=replace(cost.model, full_every=0, full_first=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """The costs of a pipeline rank besides attention: W_l of one token, and costs outside of W.

    Costs outside of W are those of the embedding and the head, and constant times of kernel calls
    (W is the work of documents in the layers). Each field is also a field of `ProfiledWorkload`.
    All times are in ns.
    """

    model: ModelSpec  # model whose layers are priced
    parallel: ParallelSpec  # degrees of parallelism, which divide the work of layers
    profile: KernelProfile  # measured prices
    # Tokens of a typical micro-batch on a whole CP group; the throughput of matrix products is read
    # at this size.
    micro_batch_tokens: int
    recompute: Recompute  # `training.recompute`
    tp_overlap: float = 0.0  # fraction of TP's transfer time hidden behind matrix products
    expert_stages: int = 1  # `ep.stages`: stages in which rows travel to experts and back
    defers_weights: bool = False  # whether weight gradients are computed in separate passes
    # Rows of the EP rank with the most rows, divided by the mean of all EP ranks. All ranks of the
    # group wait for that rank in every layer with experts.
    expert_load: float = 1.0
    # Memory traffic of each element-wise operator, relative to the profile's fused kernel. It
    # describes trainers without such kernels (`PLAIN_TORCH`). An operator that is missing here has
    # the traffic of the fused kernel.
    traffic: Mapping[str, Passes] = field(default_factory=dict[str, Passes])
    # What another trainer recomputes; None: what wlb recomputes with `recompute`.
    recomputed: RecomputedWork | None = None

    def __post_init__(self) -> None:
        check_between("tp_overlap", self.tp_overlap, 0, 1, closed=True)

    # W_l of one token

    @property
    def ns_per_token(self) -> dict[str, float]:
        """Terms of W_l in ns for one token in all layers of a pipeline rank, by "<term>_<pass>".

        Examples are "gemm_forward", "elementwise_backward" and "tp_comm_forward".
        """
        parallel, exposed = self.parallel, 1 - self.tp_overlap
        # Each term has three times in one layer: forward, backward, and what backward recomputes.
        terms = {
            "gemm": self._products_with_load_ns(),
            "elementwise": self._in_layer(self._mean(self._elementwise_of)),
            # TP's collectives count without latency, which does not depend on the tokens.
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
        # With expert parallelism, rows are also sorted by expert, and ranks wait for rows whose
        # transfer no computation hides.
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
        """Mean number of layers of a pipeline rank, rounded up."""
        return -(-self.model.num_layers // self.parallel.pp)

    @property
    def recomputed_work(self) -> RecomputedWork:
        """What backward recomputes in one layer.

        For another trainer it is given by the field `recomputed`. For wlb that field is None, and
        the setting `training.recompute` decides.
        """
        return self.recomputed or recomputed_work(self.model, self.recompute)

    # W_l: matrix products

    def _products_with_load_ns(self) -> Work:
        """Return the ns (`Work`) of one token's matrix products in a layer, mean over all layers.

        The time of routed experts is multiplied by `expert_load`.
        """
        balanced, routed = self.products_ns(), self._routed_ns()
        forward, backward, recomputed = (
            a + (self.expert_load - 1) * b for a, b in zip(balanced, routed, strict=True)
        )
        return forward, backward, recomputed

    def products_ns(self, matrices: range = range(7), *, with_attention: bool = False) -> Work:
        """Return the ns of one token's matrix products in a layer, averaged over layers.

        All EP ranks are assumed to have equally many rows.

        Args:
            matrices: Positions in `layer_matrices` of the products to add up.
            with_attention: Whether to average only over the layers that have attention over keys.
                If the model has no such layers, the average is over all layers.
        """
        kinds = self.model.layer_kinds
        if with_attention:
            kinds = [kind for kind in kinds if not kind.is_linear] or kinds
        return self._in_layer(self._mean(lambda model: self._gemm_of(model, matrices), kinds))

    def _gemm_of(self, model: ModelSpec, matrices: range) -> Work:
        """Return the time of one token's matrix products in a layer of `model`, in ns.

        Args:
            model: A model in which all layers are equal.
            matrices: Positions in `layer_matrices` of the products to add up.
        """
        tp, cp, gemm = self.parallel.tp, self.parallel.cp, self.profile.gemm
        tokens = np.array([max(1.0, self.micro_batch_tokens / cp)])
        forward = backward = recomputed = 0.0
        for i, (rows, columns) in enumerate(layer_matrices(model.with_kv_copies(tp))):
            if i not in matrices:
                continue
            # TP divides the matrix, and CP divides the tokens. FLOPs / (TFLOP/s) has the unit
            # 1e-12 s, and the factor 1e-3 converts it to ns.
            weights = np.array([rows * columns / tp])
            work = 2 * rows * columns / (tp * cp) * 1e-3
            once = work / float(gemm.forward.at(tokens, weights)[0])
            forward += once
            backward += work * LINEAR_BACKWARD_FACTOR / float(gemm.backward.at(tokens, weights)[0])
            recomputed += once * (i in self.recomputed_work.matrices)
        if model.is_all_linear and 3 in matrices:
            # The recurrence of linear attention runs before the output projection (matrix 3). It
            # was not measured. So it is priced as small matrix products of the size of a head's
            # keys and values, whose throughput is low.
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
        """Return the time of one layer, averaged over the layers of the model, in ns.

        Args:
            work_of: Returns the time of a layer of a model in which all layers are equal.
            kinds: Kinds of layers to average over, weighted by their number; None means all kinds.
        """
        kinds = self.model.layer_kinds if kinds is None else kinds
        works = [(kind.layers, work_of(kind.model)) for kind in kinds]
        layers = sum(count for count, _ in works)
        forward, backward, recomputed = (sum(n * w[i] for n, w in works) / layers for i in range(3))
        return forward, backward, recomputed

    def _in_layer(self, work: Work) -> Work:
        """Scale times of operators that were measured alone to their longer times in a layer.

        Args:
            work: ns in forward, in backward, and of what backward recomputes.
        """
        (forward, backward, recomputed), layer = work, self.profile.layer
        in_forward = layer.forward_factor
        return forward * in_forward, backward * layer.backward_factor, recomputed * in_forward

    # W_l: element-wise operators

    def _elementwise_of(self, model: ModelSpec) -> Work:
        """Return the time of one token's element-wise operators in a layer of `model`, in ns."""
        size = DTYPE_BYTES[self.profile.dtype] / (self.parallel.tp * self.parallel.cp)
        calls = elementwise_calls(model)
        work = self.recomputed or recomputed_work(model, self.recompute)
        forward = backward = recomputed = 0.0
        of_all_ranks = elementwise_values(model.with_kv_copies(self.parallel.tp))
        for op, values in of_all_ranks.items():
            if op != Elementwise.EMBEDDING:
                cost = self.profile.elementwise_of(Elementwise(op))
                traffic = self.traffic.get(op, (1.0, 1.0))
                once = values[0] * traffic[0] * size / cost.forward_bytes_per_s * 1e9
                forward += once
                backward += values[1] * traffic[1] * size / cost.backward_bytes_per_s * 1e9
                recomputed += once * work.calls.get(op, 0) / calls[op]
        return forward, backward, recomputed

    # W_l: collectives of TP, and of CP's keys and values

    def tp_wire_ns(self, gathers: int, scatters: int) -> float:
        """Return the transfer time of one token's TP collectives, without latency, in ns.

        The part that is hidden behind matrix products (`tp_overlap`) is included.

        Args:
            gathers: Number of all-gathers of [tokens, hidden].
            scatters: Number of reduce-scatters of [tokens, hidden].
        """
        row_bytes = self.model.hidden_size * DTYPE_BYTES[self.profile.dtype] / self.parallel.cp
        tp = self.parallel.tp
        return self._wire_ns(row_bytes, tp, tp, gathers, scatters)

    def _kv_wire_ns(self, values: float) -> Work:
        """Return the CP transfer time of one token's keys and values and their gradients, in ns.

        Args:
            values: How many numbers the token's keys and values on one rank have together.
        """
        cp, span = self.parallel.cp, self.parallel.tp * self.parallel.cp
        gather = self._wire_ns(values * DTYPE_BYTES[self.profile.dtype], cp, span, 1, 0)
        scatter = self._wire_ns(values * GRADIENT_BYTES, cp, span, 0, 1)
        # Gathered keys are not saved, so backward gathers them a second time. With full recompute
        # this gather belongs to the recomputed forward pass.
        if self.recomputed_work.attention:
            return gather, scatter, gather
        return gather, scatter + gather, 0.0

    def _wire_ns(
        self, size_bytes: float, num_ranks: int, span_ranks: int, gathers: int, scatters: int
    ) -> float:
        """Return the transfer time of all-gathers and reduce-scatters, without latency, in ns.

        Args:
            size_bytes: Bytes of the whole buffer of one collective.
            num_ranks: Members of the group.
            span_ranks: Number of consecutive ranks over which the members of the group are spread.
            gathers: Number of all-gathers.
            scatters: Number of reduce-scatters.
        """
        costs = self.gather_and_scatter(span_ranks, num_ranks)
        gather, scatter = (cost.wire_ns(size_bytes, num_ranks=num_ranks) for cost in costs)
        return gathers * gather + scatters * scatter

    def gather_and_scatter(self, span_ranks: int, num_ranks: int) -> list[CollectiveCost]:
        """Return the costs of an all-gather and of a reduce-scatter.

        Args:
            span_ranks: Number of consecutive ranks over which the members of the group are spread.
            num_ranks: Members of the group.
        """
        return [
            self.profile.collective(op, span_ranks=span_ranks, num_ranks=num_ranks)
            for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        ]

    # W_l: experts

    def _routed_ns(self) -> Work:
        """Return the ns of routed experts' matrix products for one token, averaged over all layers.

        Layers without experts count as 0. All EP ranks are assumed to have equally many rows.
        """
        experts, model = self.model.experts, self.model.layer_kinds[0].model
        routed = self._routed_share * experts.per_token / (experts.per_token + experts.shared)
        forward, backward, recomputed = self._in_layer(self._gemm_of(model, range(4, 7)))
        return forward * routed, backward * routed, recomputed * routed

    def _routed_work(self) -> RoutedWork:
        """Return the times of the transfers to experts and of the computation that can hide them.

        All times are for one token in one layer with experts, on the EP rank with the most rows.
        """
        model, is_full = self.model.layer_kinds[0].model, self.recompute == Recompute.FULL
        products, moved = self._in_layer(self._gemm_of(model, range(4, 7))), self._reordered_ns()
        shared = model.experts.shared / (model.experts.per_token + model.experts.shared)
        forward, backward, recomputed = (ns * (1 - shared) * self.expert_load for ns in products)
        if not self.model.branch_norms:
            # Only a norm at the end of the branch needs the experts' outputs in backward. Without
            # it, recomputation leaves out the experts' last product.
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
        """Return the ns to sort one token's rows by expert, and to sort them back afterwards.

        The time is that of one layer with experts, on the EP rank with the most rows.
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
        """Fraction of the layers that have experts."""
        return self.model.num_expert_layers / self.model.num_layers

    # Not part of W: times of a micro-batch that do not depend on its tokens

    @property
    def call_ns(self) -> Passes:
        """Time of launches and of the latency of collectives for one micro-batch, in ns.

        The two times (forward, backward) do not depend on the number of tokens. They cover all
        layers of a pipeline rank. On a GPU they are upper bounds, because launches hide behind
        running kernels.
        """
        tp, cp, profile = self.parallel.tp, self.parallel.cp, self.profile
        work = self.recomputed_work
        forward: float = profile.layer.forward_call_ns
        backward: float = profile.layer.backward_call_ns
        # The constant time of a forward pass is only measured for whole layers. A layer that is
        # partly recomputed gets a part of it, in proportion to the matrix products it recomputes.
        backward += forward * len(work.matrices) / len(layer_matrices(self.model))
        elementwise = self._mean(self._elementwise_calls_of)
        forward, backward = forward + elementwise[0], backward + sum(elementwise[1:])
        tp_backward = [now + more for now, more in zip(TP_BACKWARD, work.tp, strict=True)]
        for op, tp_calls, cp_calls in (  # number of (forward, backward) calls over TP and over CP
            # Backward gathers K and V only once, even if it recomputes attention: then attention's
            # backward uses the K and V that the recomputation has gathered.
            (Collective.ALL_GATHER, (TP_FORWARD[0], tp_backward[0]), (1, 1)),
            (Collective.REDUCE_SCATTER, (TP_FORWARD[1], tp_backward[1]), (0, 1)),
        ):
            tp_alpha = profile.collective(op, span_ranks=tp).alpha_ns * (tp > 1)
            cp_alpha = profile.collective(op, span_ranks=tp * cp).alpha_ns * (cp > 1)
            cp_alpha *= self.model.attention_share
            forward += tp_calls[0] * tp_alpha + cp_calls[0] * cp_alpha
            backward += tp_calls[1] * tp_alpha + cp_calls[1] * cp_alpha
        # A linear-attention layer has two all-to-alls: one of the rows that the convolution reads
        # from the span before, and one of the summaries.
        exchanges = 2 * (1 - self.model.attention_share) * (cp > 1)
        latency = exchanges * all_to_all_latency_ns(profile, span_ranks=tp * cp)
        forward += latency
        backward += latency * (1 + work.attention)
        if self.parallel.ep > 1:
            more = [ns * self._routed_share for ns in self._stage_call_ns()]
            forward, backward = forward + more[0], backward + more[1]
        return forward * self.num_layers, backward * self.num_layers

    def _elementwise_calls_of(self, model: ModelSpec) -> Work:
        """Return the launch times of the element-wise operators of a layer, for one micro-batch."""
        work = self.recomputed or recomputed_work(model, self.recompute)
        forward = backward = recomputed = 0.0
        for op, calls in elementwise_calls(model).items():
            cost = self.profile.elementwise_of(Elementwise(op))
            forward += calls * cost.forward_call_ns
            backward += calls * cost.backward_call_ns
            recomputed += work.calls.get(op, 0) * cost.forward_call_ns
        return forward, backward, recomputed

    def _stage_call_ns(self) -> Passes:
        """Return the ns that expert parallelism adds to a layer, however many rows the layer has.

        They are the exposed latency of all-to-alls, and the time that is lost because experts are
        computed in `expert_stages` parts, each with smaller matrix products.
        """
        work, stages, tokens = self._routed_work(), self.expert_stages, self.micro_batch_tokens
        with_latency = work.waits(stages, self._routed_alpha_ns / tokens)
        without = work.waits(stages)
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
            (a - b) * tokens + more
            for a, b, more in zip(with_latency, without, smaller, strict=True)
        )
        return forward, backward

    @property
    def _routed_alpha_ns(self) -> float:
        """Latency of one all-to-all in the EP group, in ns."""
        span = min(self.parallel.ep, self.profile.ranks_per_node + 1)
        return all_to_all_latency_ns(self.profile, span_ranks=span)

    # Not part of W: embedding, output head and loss

    @property
    def embedding_ns_per_token(self) -> Passes:
        """Time to embed one token on the first stage, in ns: (forward, backward)."""
        cost = self.profile.elementwise_of(Elementwise.EMBEDDING)
        # The time is not divided by tp, because every TP rank looks up all tokens in its part of
        # the vocabulary.
        size = DTYPE_BYTES[self.profile.dtype] / self.parallel.cp
        forward, backward = elementwise_values(self.model)[Elementwise.EMBEDDING]
        return (
            forward * size / cost.forward_bytes_per_s * 1e9,
            backward * size / cost.backward_bytes_per_s * 1e9,
        )

    @property
    def head_ns_per_token(self) -> float:
        """Time of the output head and the loss for one token on the last stage, in ns.

        The time includes the gradients, which the head computes during the forward pass.
        """
        flops = (1 + LINEAR_BACKWARD_FACTOR) * head_flops(self.model)
        ranks = self.parallel.tp * self.parallel.cp
        return flops / ranks / self.profile.head.tflops * 1e-3

    @property
    def head_backward_ns(self) -> float:
        """Time of the head's backward pass for one micro-batch, in ns.

        The backward pass only scales the weight's gradient, which the forward pass has computed.
        """
        values = 3 * self.model.hidden_size * self.model.vocab_size / self.parallel.tp
        return values * GRADIENT_BYTES / self.profile.head.backward_bytes_per_s * 1e9

    # Parts of W_l

    @property
    def weight_products_ns_per_token(self) -> float:
        """Time of one token's weight-gradient products in all layers of a pipeline rank, in ns."""
        return self._products_with_load_ns()[1] / LINEAR_BACKWARD_FACTOR * self.num_layers

    @property
    def routed_ns_per_token(self) -> Work:
        """Ns per token of routed experts' matrix products, in all layers of a pipeline rank.

        They are part of `ns_per_token`. The products of an EP group are as slow as those of the EP
        rank that receives the most rows, so the time is that rank's (`expert_load` times the mean).
        """
        factor = self.num_layers * self.expert_load
        forward, backward, recomputed = self._routed_ns()
        return forward * factor, backward * factor, recomputed * factor

    def routed_rows_ns(self, num_tokens: int, num_micro_batches: int) -> tuple[float, float]:
        """Return (ns of a rank's all-to-alls to and from experts, how many of them are exposed).

        The exposed part of the time is the part that no computation hides. Both numbers count
        forward and backward together.

        Args:
            num_tokens: Tokens of all micro-batches together.
            num_micro_batches: Number of micro-batches. Each adds the latency of its all-to-alls.
        """
        work, each = self._routed_work(), num_tokens / num_micro_batches
        alpha = self._routed_alpha_ns / each
        # Rows travel to the experts and back in both passes, which makes four all-to-alls.
        # Recomputation sends them once more.
        whole = (4 + work.is_recomputed) * (work.wire + self.expert_stages * alpha)
        copies = num_tokens * self.num_layers * self._routed_share
        return whole * copies, sum(work.waits(self.expert_stages, alpha)) * copies


def workload_for(spec: RunSpec, device: str) -> ProfiledWorkload:
    """Choose a kernel profile for a run and return the workload that it prices.

    If cost.profile is "auto", the chosen profile is the one that matches the device and the
    attention kernel best. Otherwise it is the one that cost.profile names. If the profile lacks the
    attention kernel, the profile's first kernel prices attention, so that a run does not need a
    measurement first. `wlb.cost.mismatch` lists where the profile does not fit the run.

    Args:
        spec: The run.
        device: "cpu" or "cuda".
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
    """Build the workload of a run from a given profile.

    Args:
        spec: The run.
        profile: Measured prices.
        machine: Name of the device, for `mismatches`; "" if there is none.
        power_limit_w: Power limit of the device in W, for `mismatches`; 0 if unknown.
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
    """Return `cost` with collectives that take no time.

    Such prices can be compared with measured CPU time, which does not count waiting.
    """
    free = tuple(replace(c, alpha_ns=0, bytes_per_s=float("inf")) for c in cost.profile.collectives)
    return replace(cost, profile=replace(cost.profile, collectives=free))
