"""W_a(d) + W_l(d) of Eq. 2: predicted work of a document, injected into packing and sharding.

The time of one pipeline rank's layers, forward and backward, for a piece of d tokens spread evenly
over the CP group: int64 ns, additive over pieces, 0 for length 0, monotone in length. W_a prices
the cheaper of two shardings (Section 5.3): per-document chunks, or the whole piece on one rank in
1 of cp cases. W_l is proportional to d. Padding, costs a call, embedding, head, pipeline messages
and gradient communication are left out: they do not depend on which documents share a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from wlb.cost.flops import FloatArray
from wlb.cost.linear import GRADIENT_BYTES, LinearCost, Passes, RecomputedWork
from wlb.cost.machine import gpu_power_limit_w, is_same, machine_name
from wlb.cost.monotone import MonotoneTable
from wlb.cost.profile import DTYPE_BYTES, AttentionTable, KernelProfile
from wlb.cost.profile_file import has_power, load_profile, matching_profile
from wlb.cost.surface import BoolArray
from wlb.plan import IntArray, IntLike, ShardingPlan, UserError, rows_moved
from wlb.plan.arrays import first_true
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec, Recompute, RunSpec

_MOST_TABLED = 1 << 18


class WorkloadModel(Protocol):
    """Costs as packing and sharding see them: int64 ns of a pipeline rank's layers, shape [n]."""

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
        """The forward part of each piece's workload, of which Section 7.4 takes the imbalance."""
        ...

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        """Forward and backward kernel time of segments (q rows over kv keys) on one rank; zero rows
        are free."""
        ...

    def attention_call_ns(
        self, q: IntLike, kv: IntLike, offsets: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Costs of calls without their segments, forward and backward, shape [num_calls].

        Call i holds segments [offsets[i], offsets[i + 1]); offsets: shape [num_calls + 1].
        """
        ...

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """Collectives of a micro-batch's keys and values over `cp` ranks, forward and backward."""
        ...


@runtime_checkable
class ExchangePrices(Protocol):
    """A workload that also prices the exchange by need; others are refused for needed and auto."""

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """All-to-alls of a micro-batch's keys and values and of their gradients, forward and
        backward. moved: rows that rank i receives of rank j's (`rows_of_layer`), shape [cp, cp]."""
        ...


class Transfers(NamedTuple):
    """ns in a pipeline rank's layers, or what hides them. there: K and V in forward. again: in
    backward, 0 if they are kept. back: their gradients."""

    there: float
    again: float
    back: float


@runtime_checkable
class HiddenExchange(Protocol):
    """A workload that knows what hides an exchange; of others all of it is taken to be waited for.

    overlaps: whether attention over own keys hides it too. stages: of an exchange by need then.
    cp_ranks_per_node: neighbours among CP ranks that share a node.
    """

    @property
    def overlaps(self) -> bool: ...

    @property
    def stages(self) -> int: ...

    @property
    def cp_ranks_per_node(self) -> int: ...

    def transfers_ns(
        self, moved: IntArray | FloatArray | None, num_tokens: int, *, cp: int
    ) -> Transfers:
        """Collectives of a micro-batch of `num_tokens`; moved: see `needed_exchange_ns`, None for
        an all-gather."""
        ...

    def products_ns(self, num_tokens: int) -> Transfers:
        """Matrix products that run meanwhile."""
        ...


@runtime_checkable
class SlidingLayers(Protocol):
    """A workload some of whose layers have a sliding window of keys; others have none.

    sliding_window: keys that a query sees in them. sliding_share: those layers over all.
    """

    @property
    def sliding_window(self) -> int: ...

    @property
    def sliding_share(self) -> float: ...


def rows_of_layer(plan: ShardingPlan, cost: WorkloadModel) -> IntArray | FloatArray:
    """Rows that rank i reads of rank j's in the mean layer, shape [cp, cp] (`rows_moved`)."""
    if not isinstance(cost, SlidingLayers) or not cost.sliding_share:
        return rows_moved(plan)
    share = cost.sliding_share
    sliding = rows_moved(plan, sliding=cost.sliding_window)
    return rows_moved(plan) * (1 - share) + sliding * share


def whole_ns(values: FloatArray) -> IntArray:
    """Whole ns; raises UserError for NaN, infinity and over 292 years."""
    bad = values[~(values < 2.0**63)]
    if bad.size:
        raise UserError(f"the cost model gives {bad[0]} ns; check the kernel profile's numbers")
    return np.rint(values).astype(np.int64)


def token_counts(name: str, values: IntLike) -> FloatArray:
    """Token counts as floats; UserError for others than whole ones of at least 0."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0):
        raise UserError(
            f"{name} must be whole token counts of at least 0, got dtype {array.dtype} with "
            f"minimum {array.min()}"
        )
    return array.astype(np.float64)


def segment_sizes(q: IntLike, kv: IntLike) -> tuple[FloatArray, FloatArray]:
    """Query rows and keys of segments as floats; UserError for more rows than keys."""
    rows, keys = token_counts("q", q), token_counts("kv", kv)
    if (i := first_true(rows > keys)) is not None:
        raise UserError(
            f"segment {i} has {rows[i]:.0f} query rows over {keys[i]:.0f} keys; kv is the end of "
            f"the span, at least q"
        )
    return rows, keys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledWorkload:
    """The workload of one pipeline rank, priced with a kernel profile.

    Attention by length is tabled at construction (about 2 ms), so that pricing is a look-up.
    """

    model: ModelSpec  # whose layers are priced
    parallel: ParallelSpec  # the layout, which divides them
    profile: KernelProfile  # the prices
    backend: str | None = None  # attention kernel; without a table of it, the profile's first
    micro_batch_tokens: int = 131072  # tokens at which GEMM throughput is read
    keep_gathered_kv: bool = False  # of [cp]
    recompute: Recompute = Recompute.NONE  # of [training]
    tp_overlap: float = 0.0  # share of TP collectives hidden behind matrix products
    kv_gradient_bytes: int = GRADIENT_BYTES  # of a value of dK and dV between CP ranks
    expert_load: float = 1.0  # as in `LinearCost`
    overlaps: bool = False  # cp.overlap
    stages: int = 1  # cp.stages
    expert_stages: int = 1  # as in `LinearCost`
    defers_weights: bool = False  # as in `LinearCost`
    traffic: Mapping[str, Passes] = field(default_factory=dict[str, Passes])  # as in `LinearCost`
    recomputed: RecomputedWork | None = None  # as in `LinearCost`
    machine: str = ""  # for `notes` only; "" if unknown
    power_limit_w: float = 0.0  # of the machine's GPU, for `notes` only; 0 if unknown
    dtype: str = ""  # for `notes` only; "" if unknown
    longest: int = 0  # most tokens of a piece, for `notes` only; 0 if unknown
    table: AttentionTable = field(init=False)  # of the profile, for this kernel and these heads
    linear: LinearCost = field(init=False)  # W_l, by operator
    ns_per_token: dict[str, float] = field(init=False)  # by linear term
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
            num_kv_heads=max(1, self.model.num_kv_heads // self.parallel.tp),
        )
        object.__setattr__(self, "table", table)
        # The arguments of `LinearCost` are fields of this class with the same names.
        linear = LinearCost(**{f.name: getattr(self, f.name) for f in fields(LinearCost)})
        object.__setattr__(self, "linear", linear)
        object.__setattr__(self, "ns_per_token", linear.ns_per_token)
        longest = max(128, min(self.micro_batch_tokens, _MOST_TABLED))
        tables = MonotoneTable.of(self._attention, longest=longest)
        for name, tabled in zip(("forward_ns", "backward_ns"), tables, strict=True):
            object.__setattr__(self, name, tabled)

    @property
    def heads_per_rank(self) -> int:
        """Query heads of a TP rank."""
        return self.model.num_heads // self.parallel.tp

    @property
    def num_layers_per_rank(self) -> int:
        """Layers of a pipeline rank."""
        return self.linear.num_layers

    @property
    def sliding_window(self) -> int:
        """Keys that a query sees in a sliding layer (`SlidingLayers`)."""
        return self.model.sliding_window

    @property
    def sliding_share(self) -> float:
        """Sliding layers over all; these prices are of stages that have the model's share."""
        return self.model.num_sliding_layers / self.model.num_layers

    @property
    def of_sliding_layers(self) -> "ProfiledWorkload":
        """Prices of as many layers whose window slides in all of them."""
        return _of_sliding_layers(self)

    def workload_ns(self, lengths: IntLike) -> IntArray:
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    def attention_ns(self, lengths: IntLike) -> IntArray:
        d = token_counts("lengths", lengths)
        return self.forward_ns.at(d) + self.backward_ns.at(d)

    def linear_ns(self, lengths: IntLike) -> IntArray:
        d = token_counts("lengths", lengths)
        return sum(
            (whole_ns(d * ns) for ns in self.ns_per_token.values()), np.zeros(d.size, np.int64)
        )

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

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        return self.linear.kv_exchange_ns(num_tokens, cp=cp)

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """Of the busiest rank, in the layers of a pipeline rank (`ExchangePrices`)."""
        return self.linear.needed_exchange_ns(moved)

    def pooled_ns(self, tokens: IntArray) -> IntArray:
        """The part of micro-batches' work that ranks of an EP group share: experts' products."""
        return np.rint(sum(self.linear.routed_ns_per_token) * tokens).astype(np.int64)

    @property
    def cp_ranks_per_node(self) -> int:
        """CP ranks that follow each other in a node (`HiddenExchange`)."""
        return max(1, self.profile.ranks_per_node // self.parallel.tp)

    def transfers_ns(
        self, moved: IntArray | FloatArray | None, num_tokens: int, *, cp: int
    ) -> Transfers:
        """Collectives of keys in the layers of a pipeline rank (`HiddenExchange`)."""
        return Transfers(*self.linear.transfers_ns(moved, num_tokens, cp=cp))

    def products_ns(self, num_tokens: int) -> Transfers:
        """Matrix products that run while keys travel (`HiddenExchange`)."""
        return Transfers(*self.linear.products_ns(num_tokens))

    def extrapolated(self, lengths: IntLike) -> BoolArray:
        """Mask of pieces that are priced with throughput at the edge of the profile's surface."""
        d = token_counts("lengths", lengths)
        rows, keys = self._chunks(d)
        return self.table.extrapolated(rows, keys) | self.table.extrapolated(d, d)

    @property
    def notes(self) -> tuple[str, ...]:
        """Mismatches between profile and run, as sentences for a log."""
        table, model, profile = self.table, self.model, self.profile
        notes: list[str] = []
        if self.machine and not is_same(self.machine, profile.device):
            notes.append(
                f"it is of {profile.device}, this machine has {self.machine}: `wlb profile` "
                f"measures it"
            )
        if not has_power(profile, self.power_limit_w):
            notes.append(
                f"it is of a GPU with a power limit of {profile.power_limit_w:g} W, this one has "
                f"{self.power_limit_w:g} W: matrix products run at another clock"
            )
        if self.dtype and self.dtype != profile.dtype:
            notes.append(f"{self.dtype} is priced with times of {profile.dtype}")
        if self.backend is not None and self.backend not in table.backends:
            notes.append(f"attention by {self.backend} is priced as {table.backends[0]}")
        if self.longest and self.extrapolated([self.longest])[0]:
            measured = table.forward
            notes.append(
                f"pieces of up to {self.longest} tokens are extrapolated: measured were "
                f"{measured.axis0[0]:.0f}..{measured.axis0[-1]:.0f} rows over "
                f"{measured.axis1[0]:.0f}..{measured.axis1[-1]:.0f} keys"
                + ("" if table.reach is None else f", {table.reach.min():.0f} with some rows")
            )
        notes += self.linear.notes
        if table.head_dim != model.head_size:
            notes.append(f"head size {model.head_size} is priced with a table of {table.head_dim}")
        group = model.num_heads // model.num_kv_heads
        table_group = table.num_heads // table.num_kv_heads
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
        forward = np.minimum(forward / cp, 2 * chunk_forward)
        return forward, np.minimum(backward / cp, 2 * chunk_backward)

    def _times(self, q: FloatArray, kv: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of all layers of a pipeline rank: of those that see all keys, and of the sliding ones."""
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
        """Numbers of layers and their windows, 0 for those that see all keys."""
        sliding = self.num_layers_per_rank * self.sliding_share
        both = ((self.num_layers_per_rank - sliding, 0), (sliding, self.model.sliding_window))
        return [(layers, window) for layers, window in both if layers]


def workload_for(spec: RunSpec, device: str) -> ProfiledWorkload:
    """The workload of a run on "cpu" or "cuda"; `.profile` says which profile it took.

    cost.profile = auto takes the profile that matches device and kernel. A kernel that the profile
    lacks, or "auto", is priced as its first, so that a run need not wait for a measurement;
    `.notes` tells mismatches.
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
        machine: Name of the device, for `.notes`; "" if there is none.
        power_limit_w: Power limit of the device in W, for `.notes`; 0 if it is unknown.
    """
    backend = str(spec.kernels.attention)
    return ProfiledWorkload(
        model=spec.model,
        parallel=spec.parallel,
        profile=profile,
        backend=None if backend == AttentionBackend.AUTO else backend,
        micro_batch_tokens=spec.data.context_window,
        keep_gathered_kv=spec.cp.keep_gathered_kv,
        tp_overlap=spec.cluster.tp_overlap,
        kv_gradient_bytes=DTYPE_BYTES[spec.cp.gradient_dtype],
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


@lru_cache(maxsize=8)  # its tables take 2 ms, and telemetry asks for them in every step
def _of_sliding_layers(cost: ProfiledWorkload) -> ProfiledWorkload:
    return replace(cost, model=replace(cost.model, full_every=0, full_first=0))
