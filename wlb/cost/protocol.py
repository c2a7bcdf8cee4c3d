"""What packing and sharding know of prices: `WorkloadModel`, and the simplest one, a FLOPs ratio.

`wlb.cost.workload` has the one that a measured device prices (Eq. 2). A workload may also price an
exchange of keys by need (`ExchangePrices`), know what hides it (`HiddenExchange`), and have layers
with a sliding window (`SlidingLayers`).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from wlb.cost.pairs import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR, tile_pairs
from wlb.plan import (
    FloatArray,
    IntArray,
    IntLike,
    ShardingPlan,
    UserError,
    check_at_least,
    rows_moved,
)
from wlb.plan.arrays import first_true


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
