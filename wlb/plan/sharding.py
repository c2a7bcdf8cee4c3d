"""ShardingPlan: which span of which piece each context-parallel (CP) rank works on.

The packed sequence of S tokens is divided over cp ranks. A rank holds an ordered list of spans
[start, stop) of pieces; a span's queries see keys [0, stop) of their piece. Every rank works on
`local_tokens(S)` rows, the same on all ranks; rows past its spans are padding, one segment.
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
    """Rows of a rank are a multiple of this: lcm(tp, multiple)."""
    if tp < 1 or multiple < 1:
        raise UserError(f"tp = {tp} and row_multiple = {multiple} must be at least 1")
    return math.lcm(tp, multiple)


def local_tokens(num_tokens: int, *, cp: int, row_multiple: int) -> int:
    """T_local = ceil(S / (cp * q)) * q, and q for an empty micro-batch (padding only).

    The only thing a pipeline stage needs to know to size its buffers, so no shape is ever
    exchanged. Padding is less than cp * q tokens of a micro-batch that has any token.
    """
    if num_tokens < 0 or cp < 1 or row_multiple < 1:
        raise ValueError(f"num_tokens = {num_tokens}, cp = {cp}, row_multiple = {row_multiple}")
    return max(1, -(-num_tokens // (cp * row_multiple))) * row_multiple


class Span(NamedTuple):
    """Tokens [start, stop) of piece `piece` (its row in the micro-batch)."""

    piece: int
    start: int
    stop: int


class KeyExchange(StrEnum):
    """How CP ranks get each other's keys and values."""

    GATHER = "gather"  # an all-gather of all rows
    NEEDED = "needed"  # an all-to-all of the rows that each rank reads (`wlb.plan.exchange`)


_COLUMNS = ("lengths", "piece", "start", "stop", "rank_offsets", "forward_ns", "backward_ns")


class RankTimes:
    """Predicted times of CP ranks' kernels and launches, without collectives; ranks meet in each
    pass. forward_ns, backward_ns: shape [cp].
    """

    __slots__ = ()
    forward_ns: IntArray
    backward_ns: IntArray

    @property
    def latency_ns(self) -> IntArray:
        """Both passes of each rank, without collectives, shape [cp]."""
        return self.forward_ns + self.backward_ns

    @property
    def slowest_kernels_ns(self) -> int:
        """The slowest rank's forward plus the slowest rank's backward, without collectives."""
        return int(self.forward_ns.max()) + int(self.backward_ns.max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardingPlan(RankTimes):
    """Spans of one micro-batch on `cp` ranks, rank-major.

    strategy: that made them (of `adaptive` the chosen one). lengths: tokens of each piece, shape
    [num_pieces]. piece, start, stop: shape [num_spans]. rank_offsets: shape [cp + 1]; rank r holds
    spans [rank_offsets[r], rank_offsets[r + 1]). forward_ns, backward_ns: predicted time of each
    rank's attention kernels and launches, shape [cp]; zeros where it is not predicted. exchange:
    how the ranks get each other's keys.
    """

    strategy: str
    lengths: IntArray
    piece: IntArray
    start: IntArray
    stop: IntArray
    rank_offsets: IntArray
    forward_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    backward_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    exchange: KeyExchange = KeyExchange.GATHER

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
        """Real tokens of each rank, shape [cp]."""
        running = offsets_of(self.stop - self.start)
        return running[self.rank_offsets[1:]] - running[self.rank_offsets[:-1]]

    def validate(self) -> "ShardingPlan":
        """UserError unless spans cover each piece exactly once and ranks differ by <= 1 token."""
        order = np.lexsort((self.start, self.piece))
        piece, start, stop = self.piece[order], self.start[order], self.stop[order]
        first = np.ones(piece.size, bool)
        first[1:] = piece[1:] != piece[:-1]
        last = np.roll(first, -1)
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
        """The spans of one rank, 0 to cp - 1."""
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
        """The row of each token of the packed sequence among all ranks' rows, `local_tokens` of
        each one after the other, as an all-gather of K and V brings them; shape [num_tokens].
        """
        if (most := int(self.tokens.max())) > local_tokens:
            raise UserError(f"a rank holds {most} tokens, more than local_tokens = {local_tokens}")
        rows = np.empty(self.num_tokens, np.int64)
        for rank in range(self.cp):
            index = self.for_rank(rank).token_index
            rows[index] = rank * local_tokens + np.arange(index.size)
        return rows

    def digest(self) -> int:
        """60 bits that tell two shardings apart, equal on every host."""
        # Plans with an all-gather have the digests of versions that knew no other exchange.
        exchange = () if self.exchange == KeyExchange.GATHER else (str(self.exchange),)
        spans = (self.piece, self.start, self.stop, self.rank_offsets)
        return digest(self.strategy, self.lengths, *spans, *exchange)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`; `from_json` reads them again."""
        names = (*_COLUMNS, "latency_ns")
        columns = {n: getattr(self, n).tolist() for n in names}
        return {"strategy": self.strategy, "exchange": str(self.exchange), **columns}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ShardingPlan":
        """Read what `to_json` wrote; UserError if it is not a sharding plan."""
        with parsing("sharding"):
            values = {**data}
            both = values.pop("latency_ns")
            # Old files have only the sum of both, and no exchange.
            return cls(**{"forward_ns": both, **values})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSpans:
    """One rank's spans in order: the rows of its local tokens and its attention segments.

    piece, start, stop: shape [num_spans]. piece_offsets: start of each piece in the packed
    sequence, shape [num_pieces + 1]. All arrays are int64; kernels take those of `for_kernel`,
    int32. Attention is causal with the mask aligned bottom right, since a span's queries are the
    last of its keys: query i of q sees keys [0, k - q + i]. That is `causal=True` of FlashAttention
    from 2.1 on, and attn_mask_type "padding_causal_bottom_right" of Transformer Engine.
    """

    piece: IntArray
    start: IntArray
    stop: IntArray
    piece_offsets: IntArray

    @property
    def num_tokens(self) -> int:
        """Document tokens of the rank, padding left out."""
        return int((self.stop - self.start).sum())

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the spans as objects, in the order of the rank's rows."""
        columns = zip(self.piece.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return tuple(Span(*row) for row in columns)

    @property
    def cu_seqlens_q(self) -> IntArray:
        """Offsets of each span in the rank's rows, shape [num_spans + 1]."""
        return offsets_of(self.stop - self.start)

    @property
    def cu_seqlens_k(self) -> IntArray:
        """Offsets of each span's keys (the piece's prefix [0, stop)), shape [num_spans + 1]."""
        return offsets_of(self.stop)

    @property
    def max_seqlen_q(self) -> int:
        """Rows of the longest span, 0 without any."""
        return int((self.stop - self.start).max(initial=0))

    @property
    def max_seqlen_k(self) -> int:
        """Keys of the span that has most, 0 without any."""
        return int(self.stop.max(initial=0))

    @property
    def key_index(self) -> IntArray:
        """Row in the packed sequence of each span's keys, one span after the other; a piece's keys
        come once for each of its spans. Shape [cu_seqlens_k[-1]].
        """
        base = self.piece_offsets[self.piece]
        return ranges(base, base + self.stop)

    def for_kernel(self, key_rows: IntArray | None = None) -> "KernelSegments":
        """What a variable-length attention kernel takes.

        key_rows: the row of K and V in which each token of the packed sequence lies, as
        `ShardingPlan.gathered_rows` has it for an all-gather; None = they lie in packed order.
        UserError beyond int32.
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
        """The first key of its piece that each span reads, with a window of `sliding` keys (0 =
        all), shape [num_spans].
        """
        return np.maximum(0, self.start - sliding + 1) if sliding else np.zeros_like(self.start)

    @property
    def positions(self) -> IntArray:
        """Position in its piece of each of the rank's tokens, shape [num_tokens]."""
        return ranges(self.start, self.stop)

    @property
    def token_index(self) -> IntArray:
        """Row in the packed sequence of each of the rank's tokens, shape [num_tokens]."""
        base = self.piece_offsets[self.piece]
        return ranges(base + self.start, base + self.stop)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSegments:
    """One rank's call of a variable-length attention kernel, causal and aligned bottom right.

    cu_seqlens_q, cu_seqlens_k: int32, shape [num_spans + 1]. max_seqlen_q, max_seqlen_k: of the
    longest span, 0 on a rank without spans, which calls no kernel but joins every collective.
    key_index: which rows of K and V the call takes as its keys, shape [cu_seqlens_k[-1]].
    query_index: row in the packed sequence of each of the rank's queries, its first rows, shape
    [cu_seqlens_q[-1]]; rows after them are padding. With tensors: `flash_attn_varlen_func(q,
    k[key_index], v[key_index], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    causal=True)`.
    """

    cu_seqlens_q: Int32Array
    cu_seqlens_k: Int32Array
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: IntArray
    query_index: IntArray


def ranges(start: IntArray, stop: IntArray) -> IntArray:
    """`concatenate([arange(a, b) for a, b in zip(start, stop)])` without a Python loop."""
    sizes = stop - start
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    out = np.arange(total, dtype=np.int64)
    return out + np.repeat(start - (ends - sizes), sizes)
