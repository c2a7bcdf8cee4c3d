"""ShardingPlan: which tokens of a micro-batch each context-parallel (CP) rank processes.

The packed sequence of S tokens is divided over cp ranks. A rank has an ordered list of spans
[start, stop) of pieces. The queries of a span attend to the keys [0, stop) of the same piece. Every
rank has `local_tokens(S)` rows; rows behind its spans are padding.
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
    """Return the number that divides the rows of every rank: lcm(tp, multiple)."""
    if tp < 1 or multiple < 1:
        raise UserError(f"tp = {tp} and row_multiple = {multiple} must be at least 1")
    return math.lcm(tp, multiple)


def local_tokens(num_tokens: int, *, cp: int, row_multiple: int) -> int:
    """Return the rows of each CP rank: ceil(S / (cp * q)) * q for S tokens, and q if S = 0.

    S is `num_tokens` and q is `row_multiple`. Pipeline stages size their buffers by this formula,
    so ranks exchange no shapes. A micro-batch of at least one token has less than cp * q rows of
    padding.
    """
    if num_tokens < 0 or cp < 1 or row_multiple < 1:
        raise ValueError(f"num_tokens = {num_tokens}, cp = {cp}, row_multiple = {row_multiple}")
    return max(1, -(-num_tokens // (cp * row_multiple))) * row_multiple


class Span(NamedTuple):
    """Tokens [start, stop) of one piece."""

    piece: int  # row of the piece in the micro-batch
    start: int  # first token
    stop: int  # token behind the last one


class KeyExchange(StrEnum):
    """How CP ranks get each other's keys and values."""

    GATHER = "gather"  # all-gather of all rows
    NEEDED = "needed"  # all-to-all of the rows that each rank reads (`wlb.plan.exchange`)


_COLUMNS = ("lengths", "piece", "start", "stop", "rank_offsets", "forward_ns", "backward_ns")


class RankTimes:
    """Predicted kernel times of CP ranks, including launches but no collectives.

    CP ranks wait for each other in each pass, so the slowest rank of each pass decides.
    """

    __slots__ = ()
    forward_ns: IntArray  # shape [cp]
    backward_ns: IntArray  # shape [cp]

    @property
    def latency_ns(self) -> IntArray:
        """Forward plus backward of each rank, shape [cp]."""
        return self.forward_ns + self.backward_ns

    @property
    def slowest_kernels_ns(self) -> int:
        """The slowest rank's forward plus the slowest rank's backward."""
        return int(self.forward_ns.max()) + int(self.backward_ns.max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardingPlan(RankTimes):
    """Spans of one micro-batch on its CP ranks, rank 0's first."""

    strategy: str  # strategy that made the spans; with `adaptive`, the one that it chose
    lengths: IntArray  # tokens of each piece, shape [num_pieces]
    piece: IntArray  # piece of each span, shape [num_spans]
    start: IntArray  # first token of each span in its piece, shape [num_spans]
    stop: IntArray  # token behind the last one of each span, shape [num_spans]
    # rank r has the spans [rank_offsets[r], rank_offsets[r + 1]), shape [cp + 1]
    rank_offsets: IntArray
    # predicted forward time of each rank's attention kernels and their launches, shape [cp]; zeros
    # if unknown
    forward_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    # the same for backward
    backward_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    exchange: KeyExchange = KeyExchange.GATHER  # how ranks get each other's keys and values

    def __post_init__(self) -> None:
        if self.exchange not in set(KeyExchange):
            raise UserError(f"exchange = {self.exchange!r} is not one of {', '.join(KeyExchange)}")
        object.__setattr__(self, "exchange", KeyExchange(self.exchange))
        for name in _COLUMNS:
            object.__setattr__(self, name, int_array(f"ShardingPlan.{name}", getattr(self, name)))
        for name in ("forward_ns", "backward_ns"):
            times = getattr(self, name)
            if not times.size:
                object.__setattr__(self, name, np.zeros(self.cp, np.int64))
            elif times.size != self.cp:
                raise ValueError(f"{times.size} {name} for {self.cp} ranks")
        ends_ok = self.rank_offsets[0] == 0 and self.rank_offsets[-1] == self.piece.size
        if not ends_ok or bool(np.any(np.diff(self.rank_offsets) < 0)):
            raise ValueError(
                f"rank_offsets {self.rank_offsets.tolist()} do not divide {self.piece.size} spans"
            )
        bad = np.flatnonzero(
            (self.start < 0) | (self.stop <= self.start) | (self.stop > self.lengths[self.piece])
        )
        if bad.size:
            i = int(bad[0])
            raise ValueError(
                f"span {i} = [{self.start[i]}, {self.stop[i]}) is not inside piece {self.piece[i]} "
                f"of {self.lengths[self.piece[i]]} tokens"
            )

    @property
    def cp(self) -> int:
        """Number of ranks that share the micro-batch."""
        return self.rank_offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """Document tokens of the micro-batch."""
        return int(self.lengths.sum())

    @property
    def tokens(self) -> IntArray:
        """Document tokens of each rank, shape [cp]."""
        running = offsets_of(self.stop - self.start)
        return running[self.rank_offsets[1:]] - running[self.rank_offsets[:-1]]

    def validate(self) -> "ShardingPlan":
        """Check that spans cover each piece exactly once, and ranks differ by at most one token.

        Returns:
            The plan itself.

        Raises:
            ValueError: The plan breaks one of these rules, which is a defect of the strategy.
        """
        order = np.lexsort((self.start, self.piece))
        piece, start, stop = self.piece[order], self.start[order], self.stop[order]
        first = np.ones(piece.size, bool)
        first[1:] = piece[1:] != piece[:-1]
        last = np.roll(first, -1)
        # In order, each span must start where the one before it in the same piece stops.
        expected = np.where(first, 0, np.roll(stop, 1))
        covered = np.array_equal(piece[first], np.arange(self.lengths.size))
        if (
            not covered
            or not np.array_equal(start, expected)
            or not np.array_equal(stop[last], self.lengths)
        ):
            raise ValueError(f"{self.strategy}: spans do not cover every piece exactly once")
        tokens = self.tokens
        if int(tokens.max() - tokens.min()) > 1:
            raise ValueError(f"{self.strategy}: ranks hold {tokens.tolist()} tokens")
        return self

    def for_rank(self, rank: int) -> "RankSpans":
        """Return the spans of one rank, from 0 to cp - 1."""
        if not 0 <= rank < self.cp:
            raise ValueError(f"rank {rank} is outside the {self.cp} ranks of this plan")
        rows = slice(int(self.rank_offsets[rank]), int(self.rank_offsets[rank + 1]))
        return RankSpans(
            piece=self.piece[rows],
            start=self.start[rows],
            stop=self.stop[rows],
            piece_offsets=offsets_of(self.lengths),
        )

    def gathered_rows(self, local_tokens: int) -> IntArray:
        """Return where an all-gather of keys and values puts each token of the packed sequence.

        Args:
            local_tokens: Rows that each rank contributes, padding included.

        Returns:
            Row of each token in the gathered tensor, in which the ranks' rows follow each other;
            shape [num_tokens].
        """
        if (most := int(self.tokens.max())) > local_tokens:
            raise UserError(f"a rank holds {most} tokens, more than local_tokens = {local_tokens}")
        rows = np.empty(self.num_tokens, np.int64)
        for rank in range(self.cp):
            index = self.for_rank(rank).token_index
            rows[index] = rank * local_tokens + np.arange(index.size)
        return rows

    def digest(self) -> int:
        """Return a 60-bit hash of the spans, by which hosts notice that they differ."""
        # With an all-gather the digest stays what it was before there was another exchange.
        exchange = () if self.exchange == KeyExchange.GATHER else (str(self.exchange),)
        spans = (self.piece, self.start, self.stop, self.rank_offsets)
        return digest(self.strategy, self.lengths, *spans, *exchange)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; `from_json` reads them back."""
        names = (*_COLUMNS, "latency_ns")
        columns = {n: getattr(self, n).tolist() for n in names}
        return {"strategy": self.strategy, "exchange": str(self.exchange), **columns}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ShardingPlan":
        """Read what `to_json` wrote; UserError if it is not a sharding plan."""
        with parsing("sharding"):
            values = {**data}
            both = values.pop("latency_ns")
            # Files of early versions have no exchange, and only the sum of forward and backward.
            return cls(**{"forward_ns": both, **values})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSpans:
    """One rank's spans in order: the rows of its local tokens, and its attention segments.

    The queries of a span are the last of its keys, so the causal mask is aligned bottom right:
    query i of q attends to the keys [0, k - q + i]. In FlashAttention since 2.1 this is
    `causal=True`, in Transformer Engine attn_mask_type "padding_causal_bottom_right". All arrays
    are int64; `for_kernel` converts them to the int32 that kernels take.
    """

    piece: IntArray  # piece of each span, shape [num_spans]
    start: IntArray  # first token of each span in its piece, shape [num_spans]
    stop: IntArray  # token behind the last one of each span, shape [num_spans]
    piece_offsets: IntArray  # start of each piece in the packed sequence, shape [num_pieces + 1]

    @property
    def num_tokens(self) -> int:
        """Document tokens of the rank, without padding."""
        return int((self.stop - self.start).sum())

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans as objects, in the order of the rank's rows."""
        columns = zip(self.piece.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return tuple(Span(*row) for row in columns)

    @property
    def cu_seqlens_q(self) -> IntArray:
        """Offset of each span in the rank's rows, shape [num_spans + 1]."""
        return offsets_of(self.stop - self.start)

    @property
    def cu_seqlens_k(self) -> IntArray:
        """Offset of each span's keys, the prefix [0, stop) of its piece; shape [num_spans + 1]."""
        return offsets_of(self.stop)

    @property
    def max_seqlen_q(self) -> int:
        """Rows of the longest span; 0 without spans."""
        return int((self.stop - self.start).max(initial=0))

    @property
    def max_seqlen_k(self) -> int:
        """Keys of the span that has the most; 0 without spans."""
        return int(self.stop.max(initial=0))

    @property
    def key_index(self) -> IntArray:
        """Row in the packed sequence of each span's keys, shape [cu_seqlens_k[-1]].

        The spans follow each other. Keys that two spans of a piece attend to are listed twice.
        """
        base = self.piece_offsets[self.piece]
        return ranges(base, base + self.stop)

    def for_kernel(self, key_rows: IntArray | None = None) -> "KernelSegments":
        """Return the arguments of a variable-length attention kernel for this rank.

        Args:
            key_rows: Row of K and V at which each token of the packed sequence lies, such as
                `ShardingPlan.gathered_rows` returns for an all-gather. None means that K and V are
                in packed order.

        Raises:
            UserError: There are more keys than int32 offsets can address.
        """
        most = int(self.stop.sum())
        if most > MOST_INT32:
            raise UserError(
                f"the rank's spans have {most} keys, more than int32 offsets reach ({MOST_INT32}); "
                f"use more ranks, or shorter micro-batches"
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
        """Return the first key of its piece that each span attends to, shape [num_spans].

        Args:
            sliding: Keys of the sliding window; 0 means no window.
        """
        return np.maximum(0, self.start - sliding + 1) if sliding else np.zeros_like(self.start)

    @property
    def positions(self) -> IntArray:
        """Position of each of the rank's tokens in its piece, shape [num_tokens]."""
        return ranges(self.start, self.stop)

    @property
    def token_index(self) -> IntArray:
        """Row in the packed sequence of each of the rank's tokens, shape [num_tokens]."""
        base = self.piece_offsets[self.piece]
        return ranges(base + self.start, base + self.stop)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSegments:
    """Arguments of one rank's variable-length attention kernel, causal and aligned bottom right.

    With tensors: `flash_attn_varlen_func(q, k[key_index], v[key_index], cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k, causal=True)`. A rank without spans calls no kernel, but joins every
    collective.
    """

    cu_seqlens_q: Int32Array  # shape [num_spans + 1]
    cu_seqlens_k: Int32Array  # shape [num_spans + 1]
    max_seqlen_q: int  # queries of the longest span, 0 without spans
    max_seqlen_k: int  # keys of the span with the most, 0 without spans
    key_index: IntArray  # rows of K and V that are the call's keys, shape [cu_seqlens_k[-1]]
    # row in the packed sequence of each query, shape [cu_seqlens_q[-1]]. Queries are the rank's
    # first rows; the rows behind them are padding.
    query_index: IntArray


def ranges(start: IntArray, stop: IntArray) -> IntArray:
    """Return `concatenate([arange(a, b) for a, b in zip(start, stop)])` without a Python loop."""
    sizes = stop - start
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    # One arange over all ranges, shifted to the start of each.
    out = np.arange(total, dtype=np.int64)
    return out + np.repeat(start - (ends - sizes), sizes)
