"""What packing and sharding require of a cost model, and the price of a sharded micro-batch.

The protocol `WorkloadModel` prices documents and attention segments. `FlopsWorkload` is its
simplest implementation, which only knows the ratio of attention's FLOPs to all other FLOPs.
`wlb.cost.workload` implements it with a measured profile (Eq. 2). A workload may implement further
protocols:

- `ExchangePrices`: it can price the exchange "needed".
- `HiddenExchange`: it knows which computation hides an exchange of keys.
- `SlidingLayers`: some of its layers have a sliding window.
- `SummaryPrices`: its model has linear-attention or recurrent layers.

`kernels_ns` and `attention_latency` price sharded micro-batches, for the sharding strategies and
the simulator (Section 5.3). The prices include kernel launches and the collectives of context
parallelism: K and V are exchanged in forward and, by default, a second time in backward, and the
gradients of K and V return in backward. CP ranks wait for each other in every layer. So a
micro-batch takes the forward time of the rank that is slowest in forward, plus the backward time of
the rank that is slowest in backward.
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
    """A cost model: prices of pieces and of attention segments, for packing and sharding.

    All prices are times in the layers of one pipeline rank, in ns (int64). Arrays have shape [n],
    one entry for each piece, unless stated otherwise.
    """

    def workload_ns(self, lengths: IntLike) -> IntArray:
        """Return W_a + W_l of pieces with these lengths (Eq. 2)."""
        ...

    def attention_ns(self, lengths: IntLike) -> IntArray:
        """Return W_a of each piece: attention, which is quadratic in the length."""
        ...

    def linear_ns(self, lengths: IntLike) -> IntArray:
        """Return W_l of each piece: all work besides attention, which is linear in the length."""
        ...

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        """Return the forward part of each piece's work; forward imbalance is computed from it."""
        ...

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        """Return the forward and backward kernel time of attention segments on one rank.

        Args:
            q: Query rows of each segment, shape [n]. A segment without rows costs nothing.
            kv: Keys of each segment, shape [n].
        """
        ...

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
        ...

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """Return the time to all-gather a micro-batch's keys and values over `cp` ranks.

        Args:
            num_tokens: Tokens of the micro-batch on all CP ranks.
            cp: Number of CP ranks.

        Returns:
            Forward and backward, in ns. Backward gathers keys and values a second time and
            reduce-scatters their gradients.
        """
        ...


@runtime_checkable
class ExchangePrices(Protocol):
    """A cost model that prices the exchange "needed", in which ranks receive only rows they read.

    A run with `sharding.exchange` "needed" or "auto" requires such a cost model.
    """

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """Return the time of a micro-batch's all-to-alls of K and V, and of their gradients.

        Args:
            moved: Number of rows that CP rank i receives from rank j in a layer, shape [cp, cp].

        Returns:
            Forward and backward ns on the busiest CP rank, in all layers of a pipeline rank.
        """
        ...


class Transfers(NamedTuple):
    """Times of an exchange's three transfers, or of the computation that hides each transfer.

    The times are in ns, and are those of all layers of a pipeline rank unless stated otherwise.
    """

    forward: float  # time of K and V in forward
    repeated: float  # time of K and V, sent a second time in backward; 0 if forward saved them
    gradients: float  # time of the gradients of K and V in backward


@runtime_checkable
class HiddenExchange(Protocol):
    """A cost model that knows which computation hides an exchange of keys.

    With any other cost model, ranks are assumed to wait for the whole exchange.
    """

    @property
    def overlaps(self) -> bool:
        """Whether attention over a rank's local keys runs while other ranks' keys travel."""
        ...

    @property
    def stages(self) -> int:
        """Number of stages in which an exchange travels if `overlaps` is set."""
        ...

    @property
    def cp_ranks_per_node(self) -> int:
        """Number of consecutive CP ranks that share a node."""
        ...

    def transfers_ns(
        self, moved: IntArray | FloatArray | None, num_tokens: int, *, cp: int
    ) -> Transfers:
        """Return the time of a micro-batch's collectives of keys, values and their gradients.

        Args:
            moved: Number of rows that CP rank i receives from rank j, shape [cp, cp]; None for an
                all-gather.
            num_tokens: Tokens of the micro-batch, which an all-gather moves.
            cp: Number of CP ranks.
        """
        ...

    def products_ns(self, num_tokens: int) -> Transfers:
        """Return the ns of the matrix products that run during each transfer of an exchange.

        Args:
            num_tokens: Tokens of the micro-batch.
        """
        ...


@runtime_checkable
class SlidingLayers(Protocol):
    """A cost model of a model in which some layers have a sliding window of keys.

    With a cost model that does not implement this protocol there are no such layers.
    """

    @property
    def sliding_window(self) -> int:
        """Number of keys that a query sees in a layer with a sliding window."""
        ...

    @property
    def sliding_share(self) -> float:
        """Fraction of the layers that have a sliding window."""
        ...


@runtime_checkable
class SummaryPrices(Protocol):
    """A cost model that prices the summaries of linear-attention or recurrent layers.

    If the spans of a document are on several CP ranks, these layers pass a summary of each span to
    the rank of the next span (`wlb.plan.summaries`).
    """

    @property
    def summary_ns(self) -> float:
        """Time in ns to send one span's summaries in one pass, in all layers of a pipeline rank.

        The time is 0 if the model has no linear-attention layers.
        """
        ...


def summaries_ns(plan: ShardingPlan, cost: WorkloadModel) -> int:
    """Return how long a micro-batch waits for summaries of linear attention in one pass, in ns.

    The time is that of the CP rank that sends or receives the most summaries. It is 0 for a model
    without linear-attention layers.
    """
    if not isinstance(cost, SummaryPrices) or not cost.summary_ns or plan.cp == 1:
        return 0
    moved = summaries_moved(plan)
    return round(int(max(moved.sum(0).max(), moved.sum(1).max())) * cost.summary_ns)


def rows_of_layer(plan: ShardingPlan, cost: WorkloadModel) -> IntArray | FloatArray:
    """Count the rows of K and V that CP rank i reads from rank j in one layer, shape [cp, cp].

    If some layers have a sliding window, the counts are averages over all layers of the model.
    """
    if not isinstance(cost, SlidingLayers) or not cost.sliding_share:
        return rows_moved(plan)
    share = cost.sliding_share
    sliding = rows_moved(plan, sliding=cost.sliding_window)
    return rows_moved(plan) * (1 - share) + sliding * share


def whole_ns(values: FloatArray) -> IntArray:
    """Round times to whole ns.

    Raises:
        UserError: A time is NaN, infinite, or longer than 292 years (2^63 ns).
    """
    bad = values[~(values < 2.0**63)]
    if bad.size:
        raise UserError(
            f"the cost model predicts a time of {bad[0]} ns, but times must be below 2^63 ns; "
            "correct the speeds in the kernel profile"
        )
    return np.rint(values).astype(np.int64)


def token_counts(name: str, values: IntLike) -> FloatArray:
    """Check token counts and return them as floats.

    Args:
        name: Name of the argument, for the error message.
        values: Token counts.

    Raises:
        UserError: A count is negative, or not a whole number.
    """
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0):
        raise UserError(
            f"{name} must be whole numbers of tokens, each at least 0, but they have dtype "
            f"{array.dtype} and a minimum of {array.min()}; give an integer array"
        )
    return array.astype(np.float64)


def segment_sizes(q: IntLike, kv: IntLike) -> tuple[FloatArray, FloatArray]:
    """Check the sizes of segments and return them as floats.

    Args:
        q: Query rows of each segment, shape [n].
        kv: Keys of each segment, shape [n].

    Raises:
        UserError: A segment has more rows than keys, or a number is not a count of tokens.
    """
    rows, keys = token_counts("q", q), token_counts("kv", kv)
    if (i := first_true(rows > keys)) is not None:
        raise UserError(
            f"segment {i} has {rows[i]:.0f} query rows (q) but only {keys[i]:.0f} keys (kv); kv "
            "must count all tokens of the document up to the end of the segment"
        )
    return rows, keys


FORWARD_FLOPS_PER_PAIR = 4
"""Forward FLOPs of attention for each query-key pair, head and head dimension.

QK^T and PV take one multiply-add each, and a multiply-add counts as two FLOPs.
"""
BACKWARD_FLOPS_PER_PAIR = 10
"""Backward FLOPs of attention for each query-key pair, head and head dimension.

The recomputed QK^T and dV, dP, dQ and dK take one multiply-add each.
"""


def causal_pairs(q: IntArray, kv: IntArray, *, sliding: int = 0) -> IntArray:
    """Count the query-key pairs of causal segments whose last query row is at the last key.

    Row i of a segment sees keys [0, kv - q + i], so without a window there are q * kv - q * (q - 1)
    / 2 pairs.

    Args:
        q: Query rows of each segment, shape [n].
        kv: Keys of each segment, shape [n]; at least q.
        sliding: Latest keys that a row sees; 0 means all.

    Returns:
        Pairs of each segment, shape [n].
    """
    q, kv = np.asarray(q, np.int64), np.asarray(kv, np.int64)
    if (i := first_true((q < 0) | (q > kv))) is not None:
        raise ValueError(
            f"segment {i} has q = {q.flat[i]} query rows and kv = {kv.flat[i]} keys, but a causal "
            "segment needs 0 <= q <= kv"
        )
    pairs = q * kv - q * (q - 1) // 2
    if not sliding:
        return pairs
    # Row i does not see the first kv - q + i + 1 - sliding keys, if that number is above 0.
    # `first` is the first row that leaves out a key.
    hidden = kv - q + 1 - sliding
    first = np.clip(-hidden, 0, q)
    return pairs - ((q - first) * (2 * hidden + first + q - 1)) // 2


def tile_pairs(q: FloatArray, kv: FloatArray, *, tile_rows: int, sliding: int = 0) -> FloatArray:
    """Count the query-key pairs that a kernel computes on whole tiles of query rows (Section 5.3).

    A kernel computes all rows of a tile, so with tiles of 128 rows a segment of 16 rows costs as
    much as one of 128. Tile t reads the keys up to its last row: kv - q + (t + 1) * tile_rows, at
    most kv. With tiles of one row the count is that of `causal_pairs`.

    Args:
        q: Query rows of each segment, shape [n]. Floats, because mean lengths are priced too.
        kv: Keys of each segment, shape [n].
        tile_rows: Query rows of a tile.
        sliding: Latest keys that a row sees; 0 means all. With a window, a tile skips the keys
            before the window of its first row.
    """
    num_tiles = np.ceil(q / tile_rows)
    full = (num_tiles - 1) * (kv - q) + tile_rows * (num_tiles * (num_tiles - 1) / 2)
    if sliding:
        # Tile t skips the first kv - q + t * tile_rows + 1 - sliding keys, if that number is above
        # 0. `first` is the first tile that skips a key.
        left_out = kv - q + 1 - sliding
        first = np.clip(np.ceil(-left_out / tile_rows), 0, num_tiles)
        last = np.maximum(first, num_tiles) - 1
        full = full - (num_tiles - first) * (left_out + tile_rows * (first + last) / 2)
    return np.where(q > 0, tile_rows * (full + kv), 0.0)


TILE_ROWS = 128
"""Query rows of a tile in FlashAttention's kernels on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsWorkload:
    """A cost model without measurements: W(d) = quadratic_ns * d * d + linear_ns_per_token * d.

    Only the ratio of the two prices matters to a plan. A segment of q rows and kv keys costs
    quadratic_ns * q * (2 * kv - q), so the segments of a piece add up to W_a however the piece is
    cut. Two sevenths of attention's time are forward, because a flash kernel has two products in
    forward and five in backward. `forward_latency_ns` returns the whole W. Kernel launches and
    collectives cost nothing.
    """

    quadratic_ns: float = 1.0  # ns of both passes per squared token
    linear_ns_per_token: float = 0.0  # ns of both passes per token
    # Query rows of a kernel's tile (128 on GPUs). A kernel computes whole tiles, so with a value
    # above 1 a document that is cut into many short segments costs more than its W_a, and sharding
    # strategies avoid such cuts.
    tile_rows: int = 1

    def __post_init__(self) -> None:
        if not (self.quadratic_ns >= 0 and self.linear_ns_per_token >= 0):
            raise UserError(
                f"quadratic_ns = {self.quadratic_ns} and linear_ns_per_token = "
                f"{self.linear_ns_per_token} must both be at least 0; correct the cost model"
            )
        check_at_least("tile_rows", self.tile_rows, 1)

    def workload_ns(self, lengths: IntLike) -> IntArray:
        """Return W of pieces with these lengths, in ns, shape [n]."""
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    def attention_ns(self, lengths: IntLike) -> IntArray:
        """Return W_a of each piece: quadratic_ns * d * d for a piece of d tokens, in ns."""
        d = token_counts("lengths", lengths)
        return whole_ns(self.quadratic_ns * d * d)

    def linear_ns(self, lengths: IntLike) -> IntArray:
        """Return W_l of each piece: linear_ns_per_token * d for a piece of d tokens, in ns."""
        return whole_ns(self.linear_ns_per_token * token_counts("lengths", lengths))

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        """Return the whole work W of each piece, forward and backward, instead of its forward part.

        The result is only used for forward imbalance, a ratio of times. Forward is assumed to be
        the same fraction of W for every piece, so the ratio is the same.
        """
        return self.workload_ns(lengths)

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        """Return forward and backward ns of segments with q query rows and kv keys each.

        The time is proportional to the number of query-key pairs. If `tile_rows` is above 1, all
        pairs in every tile that the kernel computes are counted.
        """
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
        """Return zeros, because this workload gives kernel launches no price."""
        free = np.zeros(offsets.size - 1, np.int64)
        return free, free

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        """Return (0, 0), because this workload gives collectives no price."""
        return 0, 0

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """Return (0, 0), because this workload gives collectives no price."""
        return 0, 0


LLAMA2_7B = FlopsWorkload(quadratic_ns=8192.0, linear_ns_per_token=4.0e8, tile_rows=TILE_ROWS)
"""Workload of Llama 2 7B, in which one ns stands for one forward FLOP of a layer.

In a document of d tokens, causal attention takes 2 * hidden * d^2 FLOPs and the layer's 202e6
parameters take 2 * 202e6 * d. Only the ratio matters. Pairs are counted in whole tiles, so that
sharding strategies do not cut short documents into small parts.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLatency(RankTimes):
    """Attention times of one micro-batch in a pipeline rank's layers, in ns."""

    forward_ns: IntArray  # time of forward kernels and launches on each CP rank, shape [cp]
    backward_ns: IntArray  # time of backward kernels and launches on each CP rank, shape [cp]
    gather_forward_ns: int  # time of forward collectives on the slowest CP rank
    exchange_backward_ns: int  # time of backward collectives on the slowest CP rank

    @property
    def slowest_ns(self) -> int:
        """Attention time of the micro-batch in ns: `slowest_kernels_ns` and the collectives."""
        return self.slowest_kernels_ns + self.gather_forward_ns + self.exchange_backward_ns

    @property
    def imbalance(self) -> float:
        """Attention time of the slowest CP rank over the mean of all ranks, without collectives.

        Both are sums of a forward and a backward time. The slowest rank in forward may be another
        one than in backward.
        """
        mean = float(self.forward_ns.mean() + self.backward_ns.mean())
        return self.slowest_kernels_ns / mean if mean else 1.0


def attention_latency(plan: ShardingPlan, cost: WorkloadModel) -> AttentionLatency:
    """Predict the attention time of each CP rank for the sharded micro-batch `plan`, in ns."""
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
    """Return (forward, backward) ns of a micro-batch's collectives under context parallelism.

    The collectives are the plan's exchange of keys and values, and the transfer of the summaries of
    linear-attention layers.

    Args:
        plan: The sharded micro-batch.
        cost: Prices.
        num_rows: Rows of all ranks together, including padding, which an all-gather also moves;
            None means that there is no padding.

    Raises:
        UserError: The workload cannot price the plan's exchange.
    """
    summaries = summaries_ns(plan, cost)
    if plan.exchange == KeyExchange.GATHER:
        tokens = plan.num_tokens if num_rows is None else num_rows
        there, back = cost.kv_exchange_ns(tokens, cp=plan.cp)
        return there + summaries, back + summaries
    if not isinstance(cost, ExchangePrices):
        raise UserError(
            f"{type(cost).__name__} has no method needed_exchange_ns, so it cannot price the "
            "exchange 'needed'; add the method, or set sharding.exchange to gather"
        )
    there, back = cost.needed_exchange_ns(rows_of_layer(plan, cost))
    return there + summaries, back + summaries


def kernels_ns(
    plans: Sequence[ShardingPlan], cost: WorkloadModel, *, cp: int
) -> tuple[IntArray, IntArray]:
    """Return forward and backward attention ns of each CP rank, shape [num_plans, cp] each.

    The times include kernels and their launches. The segments of all plans are priced in one call,
    which takes a tenth of the time of pricing each plan alone.

    Args:
        plans: Sharded micro-batches.
        cost: Prices.
        cp: Number of CP ranks of each plan.
    """
    if not plans:
        return np.zeros((0, cp), np.int64), np.zeros((0, cp), np.int64)
    stop = np.concatenate([plan.stop for plan in plans])
    rows = stop - np.concatenate([plan.start for plan in plans])
    offsets = offsets_of(np.concatenate([np.diff(plan.rank_offsets) for plan in plans]))
    # A span reads the keys of its piece from 0 to its end, so `stop` is its number of keys.
    times = cost.segment_times_ns(rows, stop)
    calls = cost.attention_call_ns(rows, stop, offsets)
    forward, backward = (
        (_of_ranks(segments, offsets) + call).reshape(len(plans), cp)
        for segments, call in zip(times, calls, strict=True)
    )
    return forward, backward


def ideal_kernels_ns(lengths: IntLike, cost: WorkloadModel, *, cp: int) -> int:
    """Return the attention ns of a CP rank if all ranks had exactly equal shares of the work.

    This time is that of all whole documents divided by `cp`, plus the launch of one call. Reports
    compare shardings with it. A sharding may be a little faster than this: dividing a document
    mostly makes its attention slower, but sometimes a little faster.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cost: Prices.
        cp: Number of CP ranks.
    """
    forward, backward = cost.segment_times_ns(lengths, lengths)
    # The price of a launch depends on the segments of the call. So price a call with an equal share
    # of the documents: every `cp`-th document, from the longest to the shortest.
    mine = np.sort(np.asarray(lengths))[::-1][::cp]
    calls = cost.attention_call_ns(mine, mine, np.array([0, mine.size]))
    return (int(forward.sum()) + int(backward.sum())) // cp + sum(int(x[0]) for x in calls)


def _of_ranks(times: IntArray, rank_offsets: IntArray) -> IntArray:
    if float(times.sum(dtype=np.float64)) >= 2.0**63:
        raise UserError(
            "the cost model's times of all micro-batches add up to 2^63 ns (292 years) or more; "
            "correct the units of the cost model, which must be ns"
        )
    running = offsets_of(times)
    return running[rank_offsets[1:]] - running[rank_offsets[:-1]]
