"""ContextExchange: which rows of keys and values CP ranks exchange, and in which stages.

Queries of a span [start, stop) attend to the keys [0, stop) of their document or, with a sliding
window of W keys, to [start - W + 1, stop). The rows that a rank reads of other ranks' spans
therefore follow from the sharding alone, and ranks exchange no sizes.

The rows travel in one or more stages. A stage is an all-to-all in which each rank sends ranges of
its rows to the ranks that read them, or an all-gather in which every rank sends the same rows to
all. The planner makes this record, the cost model counts its rows, and `wlb.parallel.context`
executes it.

Cost: arrays with one entry for each span and rank that reads it; no loop over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb.plan.arrays import BoolArray, IntArray, offsets_of
from wlb.plan.sharding import KeyExchange, ShardingPlan, ranges

STAGE_ROWS = 128
"""Rows of a kernel's tile of keys. Stages are cut at multiples of it, so that no tile is half
empty."""


class RowRanges(NamedTuple):
    """Ranges of rows that travel from one rank to another; all columns have shape [n].

    Sorted by stage, reader, holder and first row.
    """

    stage: IntArray  # stage of the exchange, from 0
    reader: IntArray  # rank that receives the rows
    holder: IntArray  # rank that has the rows and sends them
    first: IntArray  # first row, counted from the beginning of the holder's rows
    last: IntArray  # row behind the last one
    piece: IntArray  # piece whose keys they are; -1 for rows of several pieces or padding

    def of(self, chosen: IntArray | BoolArray) -> "RowRanges":
        """Return the ranges that a mask or indices select."""
        return RowRanges(*(column[chosen] for column in self))

    def sums(self, *columns: IntArray, shape: tuple[int, ...]) -> IntArray:
        """Sum the numbers of rows by the values of some columns.

        Args:
            *columns: Integer columns of shape [n].
            shape: One more than the largest possible value of each column; the shape of the result.
        """
        at = np.ravel_multi_index(columns, shape)
        # `bincount` sums floats. They are exact here, since the sums are far below 2^53.
        sums = np.bincount(at, weights=self.last - self.first, minlength=int(np.prod(shape)))
        return sums.astype(np.int64).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextExchange:
    """The exchange of one micro-batch's keys and values over CP ranks (`exchange_of`)."""

    sharding: ShardingPlan
    local_tokens: int  # rows of each rank, padding included
    num_stages: int  # number of all-to-alls or all-gathers; 0 with one rank
    # attention reads the rank's local keys while the first stage travels. A `needed` exchange then
    # does not send rows from a rank to itself.
    own_first: bool
    sliding: int  # keys that a query sees; 0 means all
    # rows of other ranks that a rank's queries attend to, by the stage in which they arrive
    reads: RowRanges
    # rows that are sent: the same rows in a `needed` exchange (and, without `own_first`, a rank's
    # rows to itself), or all rows in an all-gather
    travels: RowRanges

    @property
    def rows(self) -> IntArray:
        """Rows that rank i receives from rank j, shape [num_stages, cp (i), cp (j)]."""
        moved, cp = self.travels, self.sharding.cp
        shape = (self.num_stages, cp, cp)
        return moved.sums(moved.stage, moved.reader, moved.holder, shape=shape)

    def __str__(self) -> str:
        """Describe in words how keys travel."""
        if not self.num_stages:
            return "no keys travel: one rank has all"
        cp, stages = self.sharding.cp, f"{self.num_stages} stage{'s' * (self.num_stages > 1)}"
        own = "; attention over own keys runs meanwhile" if self.own_first else ""
        if self.sharding.exchange == KeyExchange.GATHER:
            return f"an all-gather of {self.local_tokens:,} rows a rank in {stages}{own}"
        rows = self.rows.sum(axis=0)
        most = int((rows.sum(axis=1) - rows.diagonal()).max())
        whole = (cp - 1) * self.local_tokens
        return (
            f"by need in {stages}: the rank that needs most receives {most:,} rows of others, an "
            f"all-gather would bring {whole:,}{own}"
        )

    @property
    def keys_by_stage(self) -> IntArray:
        """Keys of each span that other ranks send, by stage; shape [num_stages, num_spans].

        Spans of a rank that belong to the same piece share its keys, and each counts all of them.
        """
        reads, sharding = self.reads, self.sharding
        shape = (self.num_stages, sharding.cp, sharding.lengths.size)
        of_piece = reads.sums(reads.stage, reads.reader, reads.piece, shape=shape)
        return of_piece[:, rank_of_span(sharding), sharding.piece]


def exchange_of(
    sharding: ShardingPlan,
    *,
    local_tokens: int,
    own_first: bool = False,
    stages: int = 1,
    sliding: int = 0,
) -> ContextExchange:
    """Plan the exchange of a micro-batch's keys, by `sharding.exchange`.

    Args:
        sharding: Spans of the micro-batch.
        local_tokens: Rows of each rank, padding included.
        own_first: Whether attention over local keys runs while the exchange travels
            (`cp.overlap_stages`).
        stages: Stages of an exchange with `own_first`; otherwise there is one.
        sliding: Keys that a query sees; 0 means all. With a sliding window, attention is one kernel
            call over all keys, so `own_first` and `stages` have no effect.
    """
    cp, is_gather = sharding.cp, sharding.exchange == KeyExchange.GATHER
    own_first = own_first and not sliding
    stages = 0 if cp == 1 else stages if own_first else 1
    bounds = _gather_bounds(local_tokens, stages) if is_gather else None
    reads = _in_stages(sharding, _reads(sharding, sliding), stages, bounds)
    if bounds is not None:
        stage, reader, holder = np.indices((stages, cp, cp), np.int64).reshape(3, -1)
        whole = np.full(stage.size, -1)
        travels = RowRanges(stage, reader, holder, bounds[stage], bounds[stage + 1], whole)
    elif own_first or cp == 1:
        travels = reads
    else:
        # Attention takes its keys from the received rows alone, so a rank sends all of its rows,
        # padding included, to itself.
        rank, zero = np.arange(cp), np.zeros(cp, np.int64)
        own = RowRanges(zero, rank, rank, zero, zero + local_tokens, zero - 1)
        travels = RowRanges(*map(np.concatenate, zip(reads, own, strict=True)))
        travels = travels.of(np.lexsort((travels.first, travels.holder, travels.reader)))
    return ContextExchange(
        sharding=sharding,
        local_tokens=local_tokens,
        num_stages=stages,
        own_first=own_first,
        sliding=sliding,
        reads=reads,
        travels=travels,
    )


def _gather_bounds(local_tokens: int, stages: int) -> IntArray:
    """Return the rows at which a staged all-gather cuts each rank's rows, shape [stages + 1].

    The cuts are multiples of `STAGE_ROWS`.
    """
    bounds = np.arange(stages + 1) * local_tokens // max(1, stages) // STAGE_ROWS * STAGE_ROWS
    bounds[stages] = local_tokens
    return bounds


def _reads(sharding: ShardingPlan, sliding: int) -> RowRanges:
    """Return the rows that every rank reads of other ranks' spans, all in one stage."""
    rank, piece = rank_of_span(sharding), sharding.piece
    start, stop = sharding.start, sharding.stop
    longest = int(sharding.lengths.max(initial=0))
    # 1. Key ranges [begin, end) that each span adds. Spans of one rank and piece follow each other;
    # keys that an earlier span already reads are not requested once more.
    order = np.lexsort((start, piece, rank))
    reader, of_piece, end = rank[order], piece[order], stop[order]
    begin = np.maximum(0, start[order] - (sliding or longest + 1) + 1)
    joins = (reader[1:] == reader[:-1]) & (of_piece[1:] == of_piece[:-1])
    begin[1:] = np.where(joins, np.maximum(begin[1:], end[:-1]), begin[1:])
    # 2. The spans that have these keys. The spans of a piece tile it, so in order they are
    # neighbours.
    held = np.lexsort((start, piece))
    at = piece[held] * (longest + 1)
    low = np.searchsorted(at + stop[held], of_piece * (longest + 1) + begin, side="right")
    high = np.searchsorted(at + start[held], of_piece * (longest + 1) + end, side="left")
    query, span = np.repeat(np.arange(reader.size), high - low), held[ranges(low, high)]
    is_other = rank[span] != reader[query]
    query, span = query[is_other], span[is_other]
    # 3. Convert positions in the piece to rows of the rank that has the span.
    row = (offsets_of(stop - start)[:-1] - offsets_of(sharding.tokens)[rank] - start)[span]
    found = RowRanges(
        stage=np.zeros_like(span),
        reader=reader[query],
        holder=rank[span],
        first=row + np.maximum(begin[query], start[span]),
        last=row + np.minimum(end[query], stop[span]),
        piece=piece[span],
    )
    return found.of(np.lexsort((found.first, found.holder, found.reader)))


def _in_stages(
    sharding: ShardingPlan, reads: RowRanges, stages: int, bounds: IntArray | None
) -> RowRanges:
    """Divide the rows that ranks read into stages.

    In an all-gather, stages are cut at `bounds` (`_gather_bounds`). In a `needed` exchange, a range
    that has at least `STAGE_ROWS` rows for each stage is cut evenly, so that ranks send and receive
    equally much in all stages. A shorter range travels whole, with the others of its document,
    because kernels work in tiles.
    """
    if stages <= 1:
        return reads
    first, last = reads.first, reads.last
    size = last - first
    cuts = np.empty((stages + 1, size.size), np.int64)
    cuts[0], cuts[stages] = first, last
    if bounds is not None:
        cuts[1:stages] = np.clip(bounds[1:stages, None], first, last)
    else:
        is_cut = size >= stages * STAGE_ROWS
        # Order a reader's short ranges by document. The middle of a range, counted in rows of all
        # short ranges before it, decides in which stage the range travels.
        span_row = offsets_of(sharding.stop - sharding.start)[:-1]
        rank_row = offsets_of(sharding.tokens)
        span = np.searchsorted(span_row, rank_row[reads.holder] + first, side="right") - 1
        order = np.lexsort((sharding.start[span], reads.piece, reads.reader))
        whole, reader = np.where(is_cut, 0, size)[order], reads.reader[order]
        total = reads.of(~is_cut).sums(reads.reader[~is_cut], shape=(sharding.cp,))
        middle = np.cumsum(whole) - offsets_of(total)[reader] - (whole + 1) // 2
        stage = np.empty_like(size)
        stage[order] = middle * stages // np.maximum(1, total[reader])
        for s in range(1, stages):
            even = size * s // stages // STAGE_ROWS * STAGE_ROWS
            cuts[s] = first + np.where(is_cut, even, np.where(stage < s, size, 0))
    stage, i = np.nonzero(cuts[1:] - cuts[:-1])
    return reads.of(i)._replace(stage=stage, first=cuts[stage, i], last=cuts[stage + 1, i])


def rows_moved(sharding: ShardingPlan, *, sliding: int = 0) -> IntArray:
    """Return the rows that rank i reads of rank j, shape [cp (i), cp (j)]; the diagonal is zero."""
    reads = _reads(sharding, sliding)
    return reads.sums(reads.reader, reads.holder, shape=(sharding.cp, sharding.cp))


def rows_gathered(sharding: ShardingPlan, *, local_tokens: int) -> int:
    """Return the rows that each rank receives in an all-gather of `local_tokens` rows a rank."""
    return (sharding.cp - 1) * local_tokens


def rank_of_span(sharding: ShardingPlan) -> IntArray:
    """Return the rank of each span, shape [num_spans]."""
    return np.repeat(np.arange(sharding.cp), np.diff(sharding.rank_offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Key rows that micro-batches exchange, counted at the CP rank that receives the most."""

    num_by_need: int = 0  # micro-batches with a `needed` exchange
    received: int = 0  # rows of all micro-batches
    gathered: int = 0  # rows that all-gathers would bring instead

    def __add__(self, other: "KeyRows") -> "KeyRows":
        return KeyRows(
            num_by_need=self.num_by_need + other.num_by_need,
            received=self.received + other.received,
            gathered=self.gathered + other.gathered,
        )

    @property
    def share(self) -> float:
        """Received rows as a share of the rows that all-gathers would bring."""
        return self.received / self.gathered if self.gathered else 1.0


def key_rows(
    shardings: Sequence[ShardingPlan],
    local_tokens: Sequence[int],
    *,
    sliding: int = 0,
    sliding_share: float = 0.0,
) -> KeyRows:
    """Count the key rows that micro-batches exchange in the mean layer.

    Args:
        shardings: Spans of each micro-batch.
        local_tokens: Rows of each micro-batch on every CP rank, padding included.
        sliding: Keys of the sliding window in layers that have one.
        sliding_share: Share of the layers that have a sliding window.
    """
    by_need = received = gathered = 0
    for sharding, rows in zip(shardings, local_tokens, strict=True):
        all_rows = rows_gathered(sharding, local_tokens=rows)
        gathered += all_rows
        is_needed = sharding.exchange != KeyExchange.GATHER and sharding.cp > 1
        by_need += is_needed
        if not is_needed:
            received += all_rows
            continue
        moved = rows_moved(sharding).sum(axis=1) * (1 - sliding_share)
        if sliding_share:
            moved += rows_moved(sharding, sliding=sliding).sum(axis=1) * sliding_share
        received += round(float(moved.max()))
    return KeyRows(num_by_need=by_need, received=received, gathered=gathered)
