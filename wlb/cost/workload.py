"""What a document costs: W_a(d) + W_l(d) of Eq. 2, injected into packing and sharding.

A workload is the time of one pipeline rank's layers, forward and backward, for a piece of d tokens
that is spread evenly over the context-parallel (CP) group and whose matrices are split over tensor
parallelism (TP, with sequence parallelism). It is additive over pieces, zero for length 0, monotone
in length, and int64 nanoseconds, so that all ranks compare the same numbers. Filler is not priced.

W_a, attention: tile-quantised FLOPs over achieved TFLOP/s (Section 5.3) of a balanced CP rank: the
cheaper of the two ways to share a piece (forward and backward apart), roughly what adaptive
sharding (Section 5.3) comes to:
- per document, 2 * cp chunks, two of them a rank, priced as two segments of d / (2 * cp) rows over
  the mean of their keys, d * (2 * cp + 1) / (4 * cp) (same FLOPs as the true pair of chunks);
- whole on one rank, which a rank meets once in cp pieces: time(d, d) / cp.
W_l, everything else, is proportional to d: GEMMs, element-wise operators, TP and CP collectives by
their bandwidth term. Costs once a call (launches, collective latency) do not depend on documents
and stay out of W; `per_micro_batch_ns` has them. Embedding, output head, pipeline transfers and
gradient communication are not part of W either: they are the same for any packing of equal tokens.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wlb.cost.flops import (
    BACKWARD_FLOPS_PER_PAIR,
    FORWARD_FLOPS_PER_PAIR,
    LINEAR_BACKWARD_FACTOR,
    FloatArray,
    layer_matrices,
)
from wlb.cost.monotone import MonotoneTable
from wlb.cost.profile import DTYPE_BYTES, AttentionTable, Collective, KernelProfile
from wlb.cost.profile_file import default_profile_name, load_profile
from wlb.cost.surface import BoolArray
from wlb.plan import IntArray, IntLike
from wlb.spec import ModelSpec, ParallelSpec, RunSpec

TP_GATHERS = 6
"""All-gathers of [tokens, hidden] a layer: 2 forward; backward gathers both saved inputs again and
the gradients of both outputs."""
TP_SCATTERS = 4
"""Reduce-scatters of [tokens, hidden] a layer: 2 forward, 2 backward."""
ELEMENTWISE_CALLS = 18
"""Element-wise kernels a layer, forward and backward: norms, residuals, rotations, SwiGLU."""

GRADIENT_BYTES = 4
"""Of a value of dK and dV on its way to its rank: float32, whatever the run computes in."""

_MOST_TABLED = 1 << 18


class WorkloadModel(Protocol):
    """What packing and sharding know about cost: times of a pipeline rank's layers.

    Arrays have shape [n], int64.
    """

    def workload_ns(self, lengths: IntLike) -> IntArray:
        """W_a + W_l of each piece."""
        ...

    def attention_ns(self, lengths: IntLike) -> IntArray:
        """W_a of each piece."""
        ...

    def linear_ns(self, lengths: IntLike) -> IntArray:
        """W_l of each piece."""
        ...

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        """The forward part of each piece's workload: what Section 7.4's imbalance is taken over."""
        ...

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        """Forward and backward kernel time of each segment (q rows over kv keys) on one rank.

        Segments without rows are free.
        """
        ...

    def attention_call_ns(self) -> tuple[int, int]:
        """Launch cost of attention, forward and backward, whatever the calls hold."""
        ...

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """Collectives of a micro-batch's keys and values over `cp` ranks, forward and backward."""
        ...


def _ns(values: FloatArray) -> IntArray:
    """Whole ns; ValueError for what is no time (NaN, infinite, over 292 years)."""
    bad = np.flatnonzero(~(values < 2.0**63))
    if bad.size:
        raise ValueError(
            f"the cost model gives {values[bad[0]]} ns; check the kernel profile's numbers"
        )
    return np.rint(values).astype(np.int64)


def _lengths(name: str, values: IntLike) -> FloatArray:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0):
        raise ValueError(
            f"{name} must be whole token counts of at least 0, got dtype {array.dtype} with "
            f"minimum {array.min()}"
        )
    return array.astype(np.float64)


def _segments(q: IntLike, kv: IntLike) -> tuple[FloatArray, FloatArray]:
    rows, keys = _lengths("q", q), _lengths("kv", kv)
    bad = np.flatnonzero(rows > keys)
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"segment {i} has {rows[i]:.0f} query rows over {keys[i]:.0f} keys; kv is the end of "
            f"the span, at least q"
        )
    return rows, keys


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsWorkload:
    """W(d) = quadratic_ns * d * d + linear_ns_per_token * d: states a ratio literally.

    Forward is taken to be the same part of both terms, so `forward_latency_ns` is the whole.
    A segment of q rows over kv keys costs quadratic_ns * q * (2 * kv - q), so that the segments of
    a piece add up to its W_a(d), however it is cut; two sevenths of it forward (two matrix products
    of a flash kernel against five). Launches and CP's collectives are free.
    """

    quadratic_ns: float = 1.0
    linear_ns_per_token: float = 0.0

    def __post_init__(self) -> None:
        if not (self.quadratic_ns >= 0 and self.linear_ns_per_token >= 0):
            raise ValueError(
                f"quadratic_ns = {self.quadratic_ns} and linear_ns_per_token = "
                f"{self.linear_ns_per_token} must be at least 0"
            )

    def workload_ns(self, lengths: IntLike) -> IntArray:
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    def attention_ns(self, lengths: IntLike) -> IntArray:
        d = _lengths("lengths", lengths)
        return _ns(self.quadratic_ns * d * d)

    def linear_ns(self, lengths: IntLike) -> IntArray:
        return _ns(self.linear_ns_per_token * _lengths("lengths", lengths))

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        return self.workload_ns(lengths)

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        rows, keys = _segments(q, kv)
        both = self.quadratic_ns * rows * (2 * keys - rows)
        share = FORWARD_FLOPS_PER_PAIR / (FORWARD_FLOPS_PER_PAIR + BACKWARD_FLOPS_PER_PAIR)
        forward = _ns(both * share)
        return forward, _ns(both) - forward

    def attention_call_ns(self) -> tuple[int, int]:
        return 0, 0

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        return 0, 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledWorkload:
    """The workload of one pipeline rank, priced with a kernel profile.

    backend: attention kernel (None = the profile's first). micro_batch_tokens: tokens of a typical
    micro-batch, at which GEMM throughput is read (W_l is linear in d, a micro-batch's GEMMs run on
    all its tokens together). Attention of every length up to that (at most 2^18) is tabled at
    construction, 0.6 us a token, so that pricing is a look-up. keep_gathered_kv: backward does not
    gather keys and values again (`cp.keep_gathered_kv`).
    """

    model: ModelSpec
    parallel: ParallelSpec
    profile: KernelProfile
    backend: str | None = None
    micro_batch_tokens: int = 131072
    keep_gathered_kv: bool = False
    table: AttentionTable = field(init=False)
    ns_per_token: dict[str, float] = field(init=False)
    forward_ns: MonotoneTable = field(init=False, repr=False)
    backward_ns: MonotoneTable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model.num_layers % self.parallel.pp or self.model.num_heads % self.parallel.tp:
            raise ValueError(
                f"model.num_layers = {self.model.num_layers} and num_heads = "
                f"{self.model.num_heads} must be multiples of pp = {self.parallel.pp} and tp = "
                f"{self.parallel.tp}"
            )
        table = self.profile.table(
            backend=self.backend, head_dim=self.model.head_size, num_heads=self.heads_per_rank
        )
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "ns_per_token", _linear_ns_per_token(self))
        num_dense = 1 + max(128, min(self.micro_batch_tokens, _MOST_TABLED))
        for i, name in enumerate(("forward_ns", "backward_ns")):
            tabled = MonotoneTable.of(lambda d, i=i: self._attention(d)[i], num_dense=num_dense)
            object.__setattr__(self, name, tabled)

    @property
    def heads_per_rank(self) -> int:
        return self.model.num_heads // self.parallel.tp

    @property
    def num_layers_per_rank(self) -> int:
        return self.model.num_layers // self.parallel.pp

    def workload_ns(self, lengths: IntLike) -> IntArray:
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    def attention_ns(self, lengths: IntLike) -> IntArray:
        d = _lengths("lengths", lengths)
        return self.forward_ns.at(d) + self.backward_ns.at(d)

    def linear_ns(self, lengths: IntLike) -> IntArray:
        d = _lengths("lengths", lengths)
        return sum((_ns(d * ns) for ns in self.ns_per_token.values()), np.zeros(d.size, np.int64))

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        d = _lengths("lengths", lengths)
        return self.forward_ns.at(d) + _ns(d * sum(_linear_ns_per_token(self, _FORWARD).values()))

    def terms(self, lengths: IntLike) -> dict[str, IntArray]:
        """The parts of W, as Figure 7 draws them; they add up to `workload_ns`."""
        d = _lengths("lengths", lengths)
        attention = {
            "attention_forward": self.forward_ns.at(d),
            "attention_backward": self.backward_ns.at(d),
        }
        return attention | {name: _ns(d * ns) for name, ns in self.ns_per_token.items()}

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        forward, backward = self._times(*_segments(q, kv))
        return _ns(forward), _ns(backward)

    def attention_call_ns(self) -> tuple[int, int]:
        layers = self.num_layers_per_rank
        return self.table.launch_forward_ns * layers, self.table.launch_backward_ns * layers

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """One all-gather forward; backward a reduce-scatter and, by default, the gather again.

        Gradients travel in float32 (`wlb.parallel.context_op`).
        """
        tp = self.parallel.tp
        values = num_tokens * 2 * self.model.kv_dim / tp
        gather, scatter = (
            self.profile.collective(op, span_ranks=tp * cp).time_ns(values * b, num_ranks=cp)
            for op, b in (
                (Collective.ALL_GATHER, DTYPE_BYTES[self.profile.dtype]),
                (Collective.REDUCE_SCATTER, GRADIENT_BYTES),
            )
        )
        backward = scatter + (0 if self.keep_gathered_kv else gather)
        layers = self.num_layers_per_rank
        return round(gather * layers), round(backward * layers)

    def extrapolated(self, lengths: IntLike) -> BoolArray:
        """Which pieces are priced with throughput from the edge of the profile's surface."""
        d = _lengths("lengths", lengths)
        rows, keys = self._chunks(d)
        return self.table.extrapolated(rows, keys) | self.table.extrapolated(d, d)

    @property
    def per_micro_batch_ns(self) -> int:
        """Costs once a micro-batch, whatever is in it: launches and collective latency.

        An upper bound on a GPU, where launches hide behind running kernels.
        """
        tp, cp = self.parallel.tp, self.parallel.cp
        layer = self.table.launch_forward_ns + self.table.launch_backward_ns
        layer += ELEMENTWISE_CALLS * self.profile.elementwise.call_ns
        for op, tp_calls, cp_calls in (
            (Collective.ALL_GATHER, TP_GATHERS, 1 if self.keep_gathered_kv else 2),
            (Collective.REDUCE_SCATTER, TP_SCATTERS, 1),
        ):
            if tp > 1:
                layer += tp_calls * self.profile.collective(op, span_ranks=tp).alpha_ns
            if cp > 1:
                layer += cp_calls * self.profile.collective(op, span_ranks=tp * cp).alpha_ns
        return layer * self.num_layers_per_rank

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the profile does not match the model, in words for a log."""
        table, model = self.table, self.model
        notes: list[str] = []
        if table.head_dim != model.head_size:
            notes.append(f"head size {model.head_size} is priced with a table of {table.head_dim}")
        group, table_group = model.num_heads // model.num_kv_heads, table.num_heads
        table_group //= table.num_kv_heads
        if group != table_group:
            notes.append(
                f"{group} query heads a KV head are priced with a table of {table_group} a KV head"
            )
        if not table.heads[0] <= self.heads_per_rank <= table.heads[-1]:
            notes.append(
                f"{self.heads_per_rank} heads a rank are outside the table's "
                f"{table.heads[0]:.0f}..{table.heads[-1]:.0f}"
            )
        return tuple(notes)

    def _chunks(self, d: FloatArray) -> tuple[FloatArray, FloatArray]:
        cp = self.parallel.cp
        return (d, d) if cp == 1 else (d / (2 * cp), d * (2 * cp + 1) / (4 * cp))

    def _attention(self, d: FloatArray) -> tuple[FloatArray, FloatArray]:
        forward, backward = self._times(d, d)
        cp = self.parallel.cp
        if cp == 1:
            return forward, backward
        chunk_forward, chunk_backward = self._times(*self._chunks(d))
        return (
            np.minimum(forward / cp, 2 * chunk_forward),
            np.minimum(backward / cp, 2 * chunk_backward),
        )

    def _times(self, q: FloatArray, kv: FloatArray) -> tuple[FloatArray, FloatArray]:
        forward, backward = self.table.times_ns(
            q, kv, num_heads=self.heads_per_rank, head_dim=self.model.head_size
        )
        return forward * self.num_layers_per_rank, backward * self.num_layers_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Which passes of a layer are priced: GEMMs per forward GEMM, collectives, element-wise."""

    gemms: int
    tp_gathers: int
    tp_scatters: int
    has_backward: bool


_FORWARD = _Passes(gemms=1, tp_gathers=2, tp_scatters=2, has_backward=False)
_BOTH = _Passes(
    gemms=1 + LINEAR_BACKWARD_FACTOR,
    tp_gathers=TP_GATHERS,
    tp_scatters=TP_SCATTERS,
    has_backward=True,
)


def _linear_ns_per_token(work: ProfiledWorkload, passes: _Passes = _BOTH) -> dict[str, float]:
    """W_l's terms for one token of a piece, in ns of a rank's layers."""
    model, parallel, profile = work.model, work.parallel, work.profile
    tp, cp, size = parallel.tp, parallel.cp, DTYPE_BYTES[profile.dtype]
    values = _elementwise_values(model, has_backward=passes.has_backward)
    elementwise_bytes = values * size / (tp * cp)
    row_bytes = model.hidden_size * size / cp
    kv_bytes = 2 * model.kv_dim / tp * size
    cp_gathers = 2 if passes.has_backward and not work.keep_gathered_kv else 1
    per_layer = {
        "gemm": _gemm_ns(work, passes.gemms),
        "elementwise": elementwise_bytes / profile.elementwise.bytes_per_s * 1e9,
        "tp_comm": _gather_scatter_ns(
            profile, row_bytes, tp, tp, passes.tp_gathers, passes.tp_scatters
        ),
        "cp_comm": _gather_scatter_ns(profile, kv_bytes, cp, tp * cp, cp_gathers, 0)
        + _gather_scatter_ns(
            profile, kv_bytes * GRADIENT_BYTES / size, cp, tp * cp, 0, int(passes.has_backward)
        ),
    }
    return {name: ns * work.num_layers_per_rank for name, ns in per_layer.items()}


def _gemm_ns(work: ProfiledWorkload, gemms: int) -> float:
    """GEMMs of one token in one layer, `gemms` x the forward ones: FLOPs over throughput."""
    tp, cp = work.parallel.tp, work.parallel.cp
    surface = work.profile.gemm.tflops
    tokens = np.array([max(1.0, work.micro_batch_tokens / cp)])
    total = 0.0
    for rows, columns in layer_matrices(work.model):
        width = np.array([(rows * columns / tp) ** 0.5])
        flops = 2 * rows * columns / (tp * cp) * gemms
        total += flops * 1e-3 / float(surface.at(tokens, width)[0])
    return total


def _elementwise_values(model: ModelSpec, *, has_backward: bool) -> int:
    """Values one token reads and writes in one layer's element-wise operators.

    Forward: two norms (read, write), two residual additions (read two, write one), rotation of Q
    and K (read, write), SwiGLU (read two, write one). Backward: the norms' (read two, write one)
    and the residual gradients' additions (read two, write one), the rotation's, and SwiGLU's
    (read three, write two).
    """
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    rotated = model.q_dim + model.kv_dim
    forward = 4 * hidden + 6 * hidden + 2 * rotated + 3 * ffn
    backward = 6 * hidden + 6 * hidden + 2 * rotated + 5 * ffn
    return forward + backward * has_backward


def _gather_scatter_ns(
    profile: KernelProfile,
    size_bytes: float,
    num_ranks: int,
    span_ranks: int,
    gathers: int,
    scatters: int,
) -> float:
    gather = profile.collective(Collective.ALL_GATHER, span_ranks=span_ranks)
    scatter = profile.collective(Collective.REDUCE_SCATTER, span_ranks=span_ranks)
    return gathers * gather.wire_ns(size_bytes, num_ranks=num_ranks) + scatters * scatter.wire_ns(
        size_bytes, num_ranks=num_ranks
    )


def workload_for(spec: RunSpec, device: str) -> ProfiledWorkload:
    """The workload of a run on "cpu" or "cuda"; `.profile.name` says which profile it took.

    kernels.attention picks the kernel's table; "auto", or a kernel that the profile lacks, takes
    the profile's first (`.table.backends` says which): a run need not wait for a measurement.
    """
    name = spec.cost.profile
    profile = load_profile(default_profile_name(device) if name == "auto" else name)
    backend = str(spec.kernels.attention)
    return ProfiledWorkload(
        model=spec.model,
        parallel=spec.parallel,
        profile=profile,
        backend=backend if backend in profile.backends else None,
        micro_batch_tokens=spec.data.context_window,
        keep_gathered_kv=spec.cp.keep_gathered_kv,
    )
