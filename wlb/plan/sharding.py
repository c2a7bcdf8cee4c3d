"""ShardingPlan: which tokens of a micro-batch each context-parallel (CP) rank processes.

The S tokens of a packed sequence are divided over cp ranks. Each rank processes an ordered list of
spans; a span is the tokens [start, stop) of one piece. The queries of a span attend to the keys
[0, stop) of the same piece. Every rank has `local_tokens(S)` rows: the tokens of its spans,
followed by padding.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from wlb.plan.arrays import MOST_INT32, Int32Array, IntArray, digest, int_array, offsets_of
from wlb.plan.errors import UserError
from wlb.plan.plain import parsing


def row_multiple(tp: int, multiple: int) -> int:
    """Return lcm(tp, multiple). Every rank pads its number of rows to a multiple of this number.

    Args:
        tp: Tensor-parallel size. It must divide the number of rows, because sequence parallelism
            divides rows evenly over TP ranks.
        multiple: `data.row_multiple`, another number that must divide the number of rows.
    """
    if tp < 1 or multiple < 1:
        raise UserError(f"tp = {tp} and row_multiple = {multiple} must both be at least 1")
    return math.lcm(tp, multiple)


def local_tokens(num_tokens: int, *, cp: int, row_multiple: int) -> int:
    """Return how many rows each CP rank has for a micro-batch of `num_tokens` tokens.

    The tokens are divided evenly over `cp` ranks, and each share is rounded up to a multiple of
    `row_multiple`. A micro-batch without tokens has `row_multiple` rows of padding on each rank.
    Pipeline stages compute the sizes of their buffers with this function, so ranks need not send
    each other shapes.
    """
    if num_tokens < 0 or cp < 1 or row_multiple < 1:
        raise ValueError(
            f"num_tokens = {num_tokens} must be at least 0, and cp = {cp} and row_multiple = "
            f"{row_multiple} must be at least 1"
        )
    return max(1, -(-num_tokens // (cp * row_multiple))) * row_multiple


class Span(NamedTuple):
    """Tokens [start, stop) of one piece."""

    piece: int  # number of the piece in the micro-batch
    start: int  # position of the span's first token in the piece, from 0
    stop: int  # position of the span's last token in the piece, plus one


class KeyExchange(StrEnum):
    """The collective with which CP ranks receive each other's keys and values."""

    GATHER = "gather"  # all-gather: every rank receives all rows
    NEEDED = "needed"  # all-to-all: a rank receives only rows that its queries attend to


_COLUMNS = ("lengths", "piece", "start", "stop", "rank_offsets", "forward_ns", "backward_ns")


class RankTimes:
    """Predicted times of the attention kernels of one layer on each CP rank.

    The times include kernel launches, but not collectives. CP ranks wait for each other in the
    forward pass and again in the backward pass, so the slowest rank of a pass decides its duration.
    """

    __slots__ = ()
    forward_ns: IntArray  # time of the forward kernels of each rank, shape [cp]
    backward_ns: IntArray  # time of the backward kernels of each rank, shape [cp]

    @property
    def latency_ns(self) -> IntArray:
        """Each rank's time in attention kernels, forward plus backward, shape [cp]."""
        return self.forward_ns + self.backward_ns

    @property
    def slowest_kernels_ns(self) -> int:
        """Longest forward attention time of any CP rank, plus the longest backward time of any."""
        return int(self.forward_ns.max()) + int(self.backward_ns.max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardingPlan(RankTimes):
    """How one micro-batch is divided over CP ranks: a list of spans for each rank."""

    # name of the sharding strategy. `adaptive` gives the name of the static strategy it selected.
    strategy: str
    lengths: IntArray  # tokens of each piece of the micro-batch, shape [num_pieces]
    # The spans of rank 0 come first, then those of rank 1, and so on.
    piece: IntArray  # number of the piece of which each span is a part, shape [num_spans]
    start: IntArray  # position of each span's first token in its piece, shape [num_spans]
    stop: IntArray  # position of each span's last token in its piece, plus one; shape [num_spans]
    # rank r has the spans [rank_offsets[r], rank_offsets[r + 1]), shape [cp + 1]
    rank_offsets: IntArray
    # predicted time of each rank's forward attention kernels with their launches, shape [cp]; zeros
    # if unknown
    forward_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    # predicted time of each rank's backward attention kernels with their launches, shape [cp];
    # zeros if unknown
    backward_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    # the collective with which ranks receive each other's keys and values
    exchange: KeyExchange = KeyExchange.GATHER

    def __post_init__(self) -> None:
        if self.exchange not in set(KeyExchange):
            raise UserError(f"exchange = {self.exchange!r} must be one of {', '.join(KeyExchange)}")
        object.__setattr__(self, "exchange", KeyExchange(self.exchange))
        for name in _COLUMNS:
            object.__setattr__(self, name, int_array(f"ShardingPlan.{name}", getattr(self, name)))
        for name in ("forward_ns", "backward_ns"):
            times = getattr(self, name)
            if not times.size:
                object.__setattr__(self, name, np.zeros(self.cp, np.int64))
            elif times.size != self.cp:
                raise ValueError(
                    f"ShardingPlan.{name} has {times.size} entries, but must have one for each of "
                    f"the {self.cp} CP ranks"
                )
        ends_ok = self.rank_offsets[0] == 0 and self.rank_offsets[-1] == self.piece.size
        if not ends_ok or bool(np.any(np.diff(self.rank_offsets) < 0)):
            raise ValueError(
                f"ShardingPlan.rank_offsets = {self.rank_offsets.tolist()} must increase from 0 to "
                f"{self.piece.size}, the number of spans"
            )
        bad = np.flatnonzero(
            (self.start < 0) | (self.stop <= self.start) | (self.stop > self.lengths[self.piece])
        )
        if bad.size:
            i = int(bad[0])
            raise ValueError(
                f"span {i} has the tokens [{self.start[i]}, {self.stop[i]}) of piece "
                f"{self.piece[i]}, but must be a part of this piece's tokens [0, "
                f"{self.lengths[self.piece[i]]}) with at least one token"
            )

    @property
    def cp(self) -> int:
        """Number of context-parallel ranks that share the micro-batch."""
        return self.rank_offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """Number of document tokens in the micro-batch."""
        return int(self.lengths.sum())

    @property
    def tokens(self) -> IntArray:
        """Number of document tokens on each rank, without padding; shape [cp]."""
        running = offsets_of(self.stop - self.start)
        return running[self.rank_offsets[1:]] - running[self.rank_offsets[:-1]]

    def validate(self) -> "ShardingPlan":
        """Check that every token is in exactly one span, and that ranks have equally many tokens.

        Returns:
            The plan itself.

        Raises:
            ValueError: A token is in no span or in several spans, or the numbers of tokens of two
                ranks differ by more than one. Either is a bug of the sharding strategy.
        """
        order = np.lexsort((self.start, self.piece))
        piece, start, stop = self.piece[order], self.start[order], self.stop[order]
        first = np.ones(piece.size, bool)
        first[1:] = piece[1:] != piece[:-1]
        last = np.roll(first, -1)
        # With spans sorted by piece and start, each span must start where the previous span of the
        # same piece stops.
        expected = np.where(first, 0, np.roll(stop, 1))
        covered = np.array_equal(piece[first], np.arange(self.lengths.size))
        if (
            not covered
            or not np.array_equal(start, expected)
            or not np.array_equal(stop[last], self.lengths)
        ):
            raise ValueError(
                f"sharding strategy {self.strategy}: some token is in no span or in several spans; "
                f"this is a bug of the strategy"
            )
        tokens = self.tokens
        if int(tokens.max() - tokens.min()) > 1:
            raise ValueError(
                f"sharding strategy {self.strategy}: the CP ranks have {tokens.tolist()} tokens, "
                f"which must differ by at most 1; this is a bug of the strategy"
            )
        return self

    def for_rank(self, rank: int) -> "RankSpans":
        """Return the spans of CP rank `rank` (0 to cp - 1)."""
        if not 0 <= rank < self.cp:
            raise ValueError(
                f"rank = {rank} must be the number of a CP rank of this plan, 0 to {self.cp - 1}"
            )
        rows = slice(int(self.rank_offsets[rank]), int(self.rank_offsets[rank + 1]))
        return RankSpans(
            piece=self.piece[rows],
            start=self.start[rows],
            stop=self.stop[rows],
            piece_offsets=offsets_of(self.lengths),
        )

    def gathered_rows(self, local_tokens: int) -> IntArray:
        """Return in which row of an all-gathered tensor each token of the packed sequence is.

        Args:
            local_tokens: Rows of each rank, padding included.

        Returns:
            Row of each token, shape [num_tokens]. The gathered tensor has the rows of rank 0, then
            those of rank 1, and so on.
        """
        if (most := int(self.tokens.max())) > local_tokens:
            raise UserError(
                f"local_tokens = {local_tokens} must be at least {most}, because a CP rank has "
                "this many tokens"
            )
        rows = np.empty(self.num_tokens, np.int64)
        for rank in range(self.cp):
            index = self.for_rank(rank).token_index
            rows[index] = rank * local_tokens + np.arange(index.size)
        return rows

    def digest(self) -> int:
        """Return a 60-bit hash of the plan. Ranks compare it to detect that their plans differ."""
        # Leave an all-gather out of the hash, because earlier versions had no other exchange, and
        # their digests must stay valid.
        exchange = () if self.exchange == KeyExchange.GATHER else (str(self.exchange),)
        spans = (self.piece, self.start, self.stop, self.rank_offsets)
        return digest(self.strategy, self.lengths, *spans, *exchange)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary that `json.dumps` can write and `from_json` can read."""
        names = (*_COLUMNS, "latency_ns")
        columns = {n: getattr(self, n).tolist() for n in names}
        return {"strategy": self.strategy, "exchange": str(self.exchange), **columns}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ShardingPlan":
        """Make the plan from what `to_json` returned; UserError if it is not a sharding plan."""
        with parsing("sharding"):
            values = {**data}
            both = values.pop("latency_ns")
            # Files of early versions have no `exchange` and, instead of forward and backward times,
            # only their sum `latency_ns`. Use the sum as the forward time.
            return cls(**{"forward_ns": both, **values})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSpans:
    """The spans of one CP rank, in the order of the rank's rows.

    Attention treats each span as one segment. A span has the queries [start, stop) and the keys
    [0, stop) of its piece, so its queries are the last of its keys and the causal mask is aligned
    bottom right. With q queries and k keys, query i attends to the keys [0, k - q + i].
    FlashAttention (2.1 or later) does this with `causal=True`, Transformer Engine with the
    attn_mask_type "padding_causal_bottom_right". All arrays are int64; `for_kernel` converts them
    to int32.
    """

    piece: IntArray  # number of the piece of which each span is a part, shape [num_spans]
    start: IntArray  # position of each span's first token in its piece, shape [num_spans]
    stop: IntArray  # position of each span's last token in its piece, plus one; shape [num_spans]
    # row of each piece's first token in the packed sequence, then the number of all its tokens;
    # shape [num_pieces + 1]
    piece_offsets: IntArray

    @property
    def num_tokens(self) -> int:
        """Number of document tokens on the rank, without padding."""
        return int((self.stop - self.start).sum())

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans as `Span` objects, in the order of the rank's rows."""
        columns = zip(self.piece.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return tuple(Span(*row) for row in columns)

    @property
    def cu_seqlens_q(self) -> IntArray:
        """Offsets of the spans' queries in the rank's rows, shape [num_spans + 1]."""
        return offsets_of(self.stop - self.start)

    @property
    def cu_seqlens_k(self) -> IntArray:
        """Offset of each span's keys among the keys of all spans, shape [num_spans + 1]."""
        return offsets_of(self.stop)

    @property
    def max_seqlen_q(self) -> int:
        """Number of queries of the longest span; 0 without spans."""
        return int((self.stop - self.start).max(initial=0))

    @property
    def max_seqlen_k(self) -> int:
        """Number of keys of the span that has the most keys; 0 without spans."""
        return int(self.stop.max(initial=0))

    @property
    def key_index(self) -> IntArray:
        """Rows of the packed sequence that are the spans' keys, shape [cu_seqlens_k[-1]].

        The keys of the first span come first, then those of the second, and so on. If two spans of
        a piece attend to the same key, its row is listed for both.
        """
        base = self.piece_offsets[self.piece]
        return ranges(base, base + self.stop)

    def for_kernel(self, key_rows: IntArray | None = None) -> "KernelSegments":
        """Return the arguments of a variable-length attention kernel for this rank.

        Args:
            key_rows: For each token of the packed sequence, its row in the tensors K and V. After
                an all-gather these are `ShardingPlan.gathered_rows`. None means that K and V have
                the order of the packed sequence.

        Raises:
            UserError: There are more keys than int32 offsets can address.
        """
        most = int(self.stop.sum())
        if most > MOST_INT32:
            raise UserError(
                f"the rank's spans have {most} keys, but the int32 offsets of attention kernels "
                f"allow at most {MOST_INT32}; use more CP ranks or shorter micro-batches"
            )
        return KernelSegments(
            cu_seqlens_q=self.cu_seqlens_q.astype(np.int32),
            cu_seqlens_k=self.cu_seqlens_k.astype(np.int32),
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            key_index=self.key_index if key_rows is None else key_rows[self.key_index],
            query_index=self.token_index,
        )

    def first_keys(self, sliding: int = 0) -> IntArray:
        """Return the first key that each span attends to, as a position in the span's piece.

        Args:
            sliding: Length of the sliding attention window, in keys; 0 means no window.

        Returns:
            Positions, shape [num_spans].
        """
        return np.maximum(0, self.start - sliding + 1) if sliding else np.zeros_like(self.start)

    @property
    def positions(self) -> IntArray:
        """Position of each of the rank's tokens in its piece, shape [num_tokens]."""
        return ranges(self.start, self.stop)

    @property
    def token_index(self) -> IntArray:
        """Row of each of the rank's tokens in the packed sequence, shape [num_tokens]."""
        base = self.piece_offsets[self.piece]
        return ranges(base + self.start, base + self.stop)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSegments:
    """Arguments of the variable-length attention kernel for one CP rank.

    Call `flash_attn_varlen_func(q, k[key_index], v[key_index], cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k, causal=True)` with these fields. The causal mask is aligned bottom
    right. A rank without spans calls no kernel, but takes part in every collective.
    """

    cu_seqlens_q: Int32Array  # offsets of the spans' queries, shape [num_spans + 1]
    cu_seqlens_k: Int32Array  # offsets of the spans' keys in `key_index`, shape [num_spans + 1]
    max_seqlen_q: int  # number of queries of the longest span; 0 without spans
    max_seqlen_k: int  # number of keys of the span that has the most keys; 0 without spans
    key_index: IntArray  # rows to select from K and V, shape [cu_seqlens_k[-1]]
    # row of each query in the packed sequence, shape [cu_seqlens_q[-1]]. On the rank, the queries
    # are the first rows of Q, and padding follows.
    query_index: IntArray


def ranges(start: IntArray, stop: IntArray) -> IntArray:
    """Return `concatenate([arange(a, b) for a, b in zip(start, stop)])` without a Python loop."""
    sizes = stop - start
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    # Make one arange over all ranges, then shift the part of each range to its start.
    out = np.arange(total, dtype=np.int64)
    return out + np.repeat(start - (ends - sizes), sizes)
