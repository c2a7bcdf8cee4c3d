"""ContextExchange: which rows of keys and values CP ranks bring each other, and in which stages.

Queries of a span [start, stop) see keys [0, stop) of their document, with a sliding window of W
keys [start - W + 1, stop). What a rank reads of other ranks' spans follows from the sharding alone.
An exchange brings it in stages. Each stage is an all-to-all in which a rank sends ranges of its own
rows to each other rank; an all-gather is one in which all ranks send the same rows to all.
Planning makes the record, prices count its rows, and `wlb.parallel.context` executes it. Cost:
arrays with an entry for each span and rank that reads it, without a loop over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb.plan.arrays import BoolArray, IntArray, offsets_of
from wlb.plan.sharding import KeyExchange, ShardingPlan, ranges

STAGE_ROWS = 128
"""Rows of a kernel's tile of keys, of which stages have whole numbers."""


class RowRanges(NamedTuple):
    """Ranges of rows on their way from one rank to another, sorted by the first three columns and
    then by row. All columns have shape [n].
    """

    stage: IntArray  # stage of the exchange, from 0
    reader: IntArray  # rank that gets the rows
    holder: IntArray  # rank on which they lie
    first: IntArray  # first row, counted from the begin of the holder's rows
    last: IntArray  # row behind the last one
    piece: IntArray  # document whose keys they are; -1 for rows of any

    def of(self, chosen: IntArray | BoolArray) -> "RowRanges":
        """The ranges that a mask or indices select."""
        return RowRanges(*(column[chosen] for column in self))

    def sums(self, *columns: IntArray, shape: tuple[int, ...]) -> IntArray:
        """Rows added up by these columns, whose values are below `shape`."""
        at = np.ravel_multi_index(columns, shape)
        # Sums of rows are whole and far below 2^53, so that floats hold them.
        sums = np.bincount(at, weights=self.last - self.first, minlength=int(np.prod(shape)))
        return sums.astype(np.int64).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextExchange:
    """The exchange of one micro-batch's keys and values over its CP ranks, made by `exchange_of`.

    By need `travels` are the ranges of `reads`, and with an all-gather all rows of all ranks.
    """

    sharding: ShardingPlan
    local_tokens: int  # rows of each rank, padding included
    num_stages: int  # all-to-alls or all-gathers; 0 with one rank
    own_first: bool  # attention reads own keys before any arrive, and by need they do not travel
    sliding: int  # keys that a query sees, 0 = all
    reads: RowRanges  # rows of other ranks that a rank's queries see, where they arrive
    travels: RowRanges  # rows that are sent, a rank's to itself included

    @property
    def rows(self) -> IntArray:
        """Rows that rank i receives of rank j, shape [num_stages, cp, cp] with i before j."""
        moved, cp = self.travels, self.sharding.cp
        shape = (self.num_stages, cp, cp)
        return moved.sums(moved.stage, moved.reader, moved.holder, shape=shape)

    def __str__(self) -> str:
        """How keys travel, in words."""
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
        """Rows of each span's document that arrive in each stage and that the span's rank reads,
        shape [num_stages, num_spans].
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
        own_first: Attention has a call over own keys while the exchange runs (`cp.overlap_stages`).
        stages: Stages of an exchange with `own_first`; otherwise there is one.
        sliding: Keys that a query sees; 0 = all. With a window attention has one call, so that
            `own_first` and `stages` are left out.
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
        # Rows of a rank for itself are all of them, padding included.
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
    """Where an all-gather in stages cuts each rank's rows, shape [stages + 1], in whole tiles."""
    bounds = np.arange(stages + 1) * local_tokens // max(1, stages) // STAGE_ROWS * STAGE_ROWS
    bounds[stages] = local_tokens
    return bounds


def _reads(sharding: ShardingPlan, sliding: int) -> RowRanges:
    """What every rank reads of other ranks' spans, as one stage."""
    rank, piece = rank_of_span(sharding), sharding.piece
    start, stop = sharding.start, sharding.stop
    longest = int(sharding.lengths.max(initial=0))
    # Of a rank's spans of a piece, in order, each adds the keys that the one before does not read.
    order = np.lexsort((start, piece, rank))
    reader, of_piece, end = rank[order], piece[order], stop[order]
    begin = np.maximum(0, start[order] - (sliding or longest + 1) + 1)
    joins = (reader[1:] == reader[:-1]) & (of_piece[1:] == of_piece[:-1])
    begin[1:] = np.where(joins, np.maximum(begin[1:], end[:-1]), begin[1:])
    # The spans that hold these keys follow each other among a piece's spans, which tile it.
    held = np.lexsort((start, piece))
    at = piece[held] * (longest + 1)
    low = np.searchsorted(at + stop[held], of_piece * (longest + 1) + begin, side="right")
    high = np.searchsorted(at + start[held], of_piece * (longest + 1) + end, side="left")
    query, span = np.repeat(np.arange(reader.size), high - low), held[ranges(low, high)]
    is_other = rank[span] != reader[query]
    query, span = query[is_other], span[is_other]
    # From positions in the piece to rows of the rank that holds the span.
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
    """`reads`, cut where stages begin. bounds: of an all-gather (`_gather_bounds`).

    By need a range of at least `STAGE_ROWS` rows a stage is cut evenly, so that ranks send and
    receive alike in all stages. A shorter one goes whole, with those of the same document, because
    kernels work in tiles.
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
        # A reader's short ranges follow each other by document; their middle decides.
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
    """Rows that rank i reads of rank j's, shape [cp, cp] with i first; zero for i = j."""
    reads = _reads(sharding, sliding)
    return reads.sums(reads.reader, reads.holder, shape=(sharding.cp, sharding.cp))


def rows_gathered(sharding: ShardingPlan, *, local_tokens: int) -> int:
    """Rows that each rank receives in an all-gather of `local_tokens` rows a rank."""
    return (sharding.cp - 1) * local_tokens


def rank_of_span(sharding: ShardingPlan) -> IntArray:
    """The rank that holds each span, shape [num_spans]."""
    return np.repeat(np.arange(sharding.cp), np.diff(sharding.rank_offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Key rows that micro-batches exchange, each counted at the CP rank that receives most."""

    num_by_need: int = 0  # micro-batches whose ranks receive only rows that they read
    received: int = 0  # rows of all micro-batches
    gathered: int = 0  # the same if all were by all-gathers

    def __add__(self, other: "KeyRows") -> "KeyRows":
        return KeyRows(
            num_by_need=self.num_by_need + other.num_by_need,
            received=self.received + other.received,
            gathered=self.gathered + other.gathered,
        )

    @property
    def share(self) -> float:
        """Rows received over an all-gather's."""
        return self.received / self.gathered if self.gathered else 1.0


def key_rows(
    shardings: Sequence[ShardingPlan],
    local_tokens: Sequence[int],
    *,
    sliding: int = 0,
    sliding_share: float = 0.0,
) -> KeyRows:
    """Key rows of micro-batches with these rows on every CP rank, padding included, in the mean
    layer: `sliding_share` of all have a window of `sliding` keys.
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
