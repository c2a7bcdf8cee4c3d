"""What packing and sharding know of prices, from one segment to a sharded micro-batch.

`WorkloadModel` is what prices pieces and segments, and `FlopsWorkload` the simplest one, a FLOPs
ratio; `wlb.cost.workload` has the one that a measured device prices (Eq. 2). A workload may also
price an exchange of keys by need (`ExchangePrices`), know what hides it (`HiddenExchange`), and
have layers with a sliding window (`SlidingLayers`).

`kernels_ns` and `attention_latency` price sharded micro-batches, for strategies and the simulator
(Section 5.3). Launches and CP's collectives are added: K and V are exchanged forward and, by
default, again in backward, and their gradients return. CP ranks meet in every layer, so a
micro-batch waits for the slowest rank of each pass, not of the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from wlb.plan import (
    FloatArray,
    IntArray,
    IntLike,
    KeyExchange,
    ShardingPlan,
    UserError,
    check_at_least,
    offsets_of,
    rows_moved,
    summaries_moved,
)
from wlb.plan.arrays import first_true
from wlb.plan.sharding import RankTimes


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
        are free.
        """
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
        backward. moved: rows that rank i receives of rank j's (`rows_of_layer`), shape [cp, cp].
        """
        ...


class Transfers(NamedTuple):
    """Times of an exchange in a pipeline rank's layers, or of what hides it, in ns."""

    there: float  # K and V in forward
    again: float  # K and V in backward, 0 if they are kept
    back: float  # their gradients


@runtime_checkable
class HiddenExchange(Protocol):
    """A workload that knows what hides an exchange. Of others all of it counts as waited for."""

    @property
    def overlaps(self) -> bool:
        """Whether attention over own keys hides it too."""
        ...

    @property
    def stages(self) -> int:
        """Stages of an exchange with `overlaps`."""
        ...

    @property
    def cp_ranks_per_node(self) -> int:
        """CP ranks that follow each other in a node."""
        ...

    def transfers_ns(
        self, moved: IntArray | FloatArray | None, num_tokens: int, *, cp: int
    ) -> Transfers:
        """Collectives of a micro-batch of `num_tokens`; moved: see `needed_exchange_ns`, None for
        an all-gather.
        """
        ...

    def products_ns(self, num_tokens: int) -> Transfers:
        """Matrix products that run meanwhile."""
        ...


@runtime_checkable
class SlidingLayers(Protocol):
    """A workload some of whose layers have a sliding window of keys; others have none."""

    @property
    def sliding_window(self) -> int:
        """Keys that a query sees in a sliding layer."""
        ...

    @property
    def sliding_share(self) -> float:
        """Sliding layers over all."""
        ...


@runtime_checkable
class SummaryPrices(Protocol):
    """A workload of a model with linear or recurrent layers, whose summaries of cut spans travel
    between CP ranks (`wlb.plan.summaries`).
    """

    @property
    def summary_ns(self) -> float:
        """Time to move one summary of all of a pipeline rank's linear layers, in one pass; 0 where
        there are no such layers.
        """
        ...


def summaries_ns(plan: ShardingPlan, cost: WorkloadModel) -> int:
    """Time for which a micro-batch waits for summaries in one pass: that of the rank which sends or
    receives most of them. 0 where the model has no linear layers.
    """
    if not isinstance(cost, SummaryPrices) or not cost.summary_ns or plan.cp == 1:
        return 0
    moved = summaries_moved(plan)
    return round(int(max(moved.sum(0).max(), moved.sum(1).max())) * cost.summary_ns)


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


FORWARD_FLOPS_PER_PAIR = 4
"""Forward FLOPs per query-key pair, head and head_dim: a multiply-add each for QK^T and PV."""
BACKWARD_FLOPS_PER_PAIR = 10
"""The same in backward: a multiply-add each for QK^T again, dV, dP, dQ and dK."""


def causal_pairs(q: IntArray, kv: IntArray, *, sliding: int = 0) -> IntArray:
    """Query-key pairs of segments of `q` rows that end at key `kv` (bottom-right causal).

    Row i of q sees keys [0, kv - q + i]: q * kv - q * (q - 1) / 2 pairs, for q <= kv. With a
    sliding window it sees the latest `sliding` of them (0 = all). Shape [n].
    """
    q, kv = np.asarray(q, np.int64), np.asarray(kv, np.int64)
    if (i := first_true((q < 0) | (q > kv))) is not None:
        raise ValueError(
            f"segment {i} has q = {q.flat[i]} rows over kv = {kv.flat[i]} keys; a causal segment "
            f"needs 0 <= q <= kv"
        )
    pairs = q * kv - q * (q - 1) // 2
    if not sliding:
        return pairs
    # Row i leaves out kv - q + i + 1 - sliding keys, from the row on where that is above 0.
    hidden = kv - q + 1 - sliding
    first = np.clip(-hidden, 0, q)
    return pairs - ((q - first) * (2 * hidden + first + q - 1)) // 2


def tile_pairs(q: FloatArray, kv: FloatArray, *, tile_rows: int, sliding: int = 0) -> FloatArray:
    """Pairs that a kernel on whole tiles of `tile_rows` query rows computes (Section 5.3).

    Tile t of ceil(q / tile_rows) computes all its rows over the keys of its last row, kv - q +
    (t + 1) * tile_rows, at most kv: 16 rows cost as much as 128. Tiles of one row give
    `causal_pairs`. Floats, because mean lengths are allowed. With a sliding window a tile computes
    no keys before those of its first row's window.
    """
    num_tiles = np.ceil(q / tile_rows)
    full = (num_tiles - 1) * (kv - q) + tile_rows * (num_tiles * (num_tiles - 1) / 2)
    if sliding:
        # Tile t leaves out kv - q + t * tile_rows + 1 - sliding keys, where that is above 0.
        left_out = kv - q + 1 - sliding
        first = np.clip(np.ceil(-left_out / tile_rows), 0, num_tiles)
        last = np.maximum(first, num_tiles) - 1
        full = full - (num_tiles - first) * (left_out + tile_rows * (first + last) / 2)
    return np.where(q > 0, tile_rows * (full + kv), 0.0)


TILE_ROWS = 128
"""Query rows of a tile of FlashAttention's kernels on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsWorkload:
    """W(d) = quadratic_ns * d * d + linear_ns_per_token * d, for a stated ratio.

    A segment of q rows over kv keys costs quadratic_ns * q * (2 * kv - q), so segments of a piece
    add up to W_a(d) however it is cut; two sevenths are forward (two products of a flash kernel
    against five). `forward_latency_ns` is the whole W. Launches and CP's collectives are free.
    tile_rows: query rows that a kernel computes at least (128 on GPUs), by which strategies of
    sharding see that many short segments are slow; above 1 segments add up to more than W_a.
    """

    quadratic_ns: float = 1.0
    linear_ns_per_token: float = 0.0
    tile_rows: int = 1

    def __post_init__(self) -> None:
        if not (self.quadratic_ns >= 0 and self.linear_ns_per_token >= 0):
            raise UserError(
                f"quadratic_ns = {self.quadratic_ns} and linear_ns_per_token = "
                f"{self.linear_ns_per_token} must be at least 0"
            )
        check_at_least("tile_rows", self.tile_rows, 1)

    def workload_ns(self, lengths: IntLike) -> IntArray:
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    def attention_ns(self, lengths: IntLike) -> IntArray:
        d = token_counts("lengths", lengths)
        return whole_ns(self.quadratic_ns * d * d)

    def linear_ns(self, lengths: IntLike) -> IntArray:
        return whole_ns(self.linear_ns_per_token * token_counts("lengths", lengths))

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        return self.workload_ns(lengths)

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        rows, keys = segment_sizes(q, kv)
        both = self.quadratic_ns * rows * (2 * keys - rows)
        if self.tile_rows > 1:
            both = 2 * self.quadratic_ns * tile_pairs(rows, keys, tile_rows=self.tile_rows)
        share = FORWARD_FLOPS_PER_PAIR / (FORWARD_FLOPS_PER_PAIR + BACKWARD_FLOPS_PER_PAIR)
        forward = whole_ns(both * share)
        return forward, whole_ns(both) - forward

    def attention_call_ns(
        self, q: IntLike, kv: IntLike, offsets: IntArray
    ) -> tuple[IntArray, IntArray]:
        free = np.zeros(offsets.size - 1, np.int64)
        return free, free

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        return 0, 0

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """Free, as all collectives (`ExchangePrices`)."""
        return 0, 0


LLAMA2_7B = FlopsWorkload(quadratic_ns=8192.0, linear_ns_per_token=4.0e8, tile_rows=TILE_ROWS)
"""FLOPs of a layer, forward, a nanosecond each: 2 * hidden * d^2 for causal attention and 2 * 202e6
(its parameters) * d for linear layers; only the ratio matters. Segments fill tiles, so that
strategies of sharding do not cut short documents finely."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLatency(RankTimes):
    """Attention times of a pipeline rank's layers."""

    forward_ns: IntArray  # kernels and launches of each CP rank, shape [cp]
    backward_ns: IntArray  # the same in backward
    gather_forward_ns: int  # collectives in forward, of the slowest rank
    exchange_backward_ns: int  # collectives in backward, of the slowest rank

    @property
    def slowest_ns(self) -> int:
        """Time of the micro-batch's attention: `slowest_kernels_ns` and the collectives."""
        return self.slowest_kernels_ns + self.gather_forward_ns + self.exchange_backward_ns

    @property
    def imbalance(self) -> float:
        """Slowest rank over the mean rank, kernels and launches of both passes."""
        mean = float(self.forward_ns.mean() + self.backward_ns.mean())
        return self.slowest_kernels_ns / mean if mean else 1.0


def attention_latency(plan: ShardingPlan, cost: WorkloadModel) -> AttentionLatency:
    """Predicted attention time of each rank of `plan`; pure, integer nanoseconds."""
    forward, backward = kernels_ns([plan], cost, cp=plan.cp)
    gather, exchange = exchange_ns(plan, cost)
    return AttentionLatency(
        forward_ns=forward[0],
        backward_ns=backward[0],
        gather_forward_ns=gather,
        exchange_backward_ns=exchange,
    )


def exchange_ns(
    plan: ShardingPlan, cost: WorkloadModel, *, num_rows: int | None = None
) -> tuple[int, int]:
    """(forward, backward) collectives of a micro-batch's keys and values by the plan's exchange,
    and of its summaries.

    num_rows: rows of all ranks, padding included, which an all-gather moves as well; None: without
    padding. UserError if the workload does not price the plan's exchange.
    """
    summaries = summaries_ns(plan, cost)
    if plan.exchange == KeyExchange.GATHER:
        tokens = plan.num_tokens if num_rows is None else num_rows
        there, back = cost.kv_exchange_ns(tokens, cp=plan.cp)
        return there + summaries, back + summaries
    if not isinstance(cost, ExchangePrices):
        raise UserError(
            f"{type(cost).__name__} has no method needed_exchange_ns, by which an exchange by need "
            f"is priced; add it, or set exchange = gather"
        )
    there, back = cost.needed_exchange_ns(rows_of_layer(plan, cost))
    return there + summaries, back + summaries


def kernels_ns(
    plans: Sequence[ShardingPlan], cost: WorkloadModel, *, cp: int
) -> tuple[IntArray, IntArray]:
    """Kernels and launches of each of `cp` ranks, forward and backward, shape [num_plans, cp].

    Pricing all segments together takes a tenth of the time of one plan after the other.
    """
    if not plans:
        return np.zeros((0, cp), np.int64), np.zeros((0, cp), np.int64)
    stop = np.concatenate([plan.stop for plan in plans])
    rows = stop - np.concatenate([plan.start for plan in plans])
    offsets = offsets_of(np.concatenate([np.diff(plan.rank_offsets) for plan in plans]))
    times = cost.segment_times_ns(rows, stop)
    calls = cost.attention_call_ns(rows, stop, offsets)
    forward, backward = (
        (_of_ranks(segments, offsets) + call).reshape(len(plans), cp)
        for segments, call in zip(times, calls, strict=True)
    )
    return forward, backward


def ideal_kernels_ns(lengths: IntLike, cost: WorkloadModel, *, cp: int) -> int:
    """`slowest_kernels_ns` if `cp` ranks shared uncut documents evenly; lengths: [num_pieces].

    A yardstick, not a bound: spans cost mostly more than whole documents, sometimes a little less.
    A rank's call is taken to hold every `cp`-th document, the longest one with them.
    """
    forward, backward = cost.segment_times_ns(lengths, lengths)
    mine = np.sort(np.asarray(lengths))[::-1][::cp]
    calls = cost.attention_call_ns(mine, mine, np.array([0, mine.size]))
    return (int(forward.sum()) + int(backward.sum())) // cp + sum(int(x[0]) for x in calls)


def _of_ranks(times: IntArray, rank_offsets: IntArray) -> IntArray:
    if float(times.sum(dtype=np.float64)) >= 2.0**63:
        raise UserError("the cost model's times of micro-batches add up to over 292 years")
    running = offsets_of(times)
    return running[rank_offsets[1:]] - running[rank_offsets[:-1]]
