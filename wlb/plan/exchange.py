"""ContextExchange: which rows of keys and values CP ranks send each other before attention.

The queries of a span [start, stop) attend to the keys [0, stop) of their document or, with a
sliding window of W keys, to the keys [start - W + 1, stop). So the sharding plan determines which
rows a rank reads from other ranks, and ranks need not send each other sizes.

The rows are sent in one or more stages, so that attention over the rows of one stage can run while
the next stage is in transit. A stage is either an all-to-all, in which each rank sends ranges of
its rows to the ranks that read them, or an all-gather, in which every rank sends rows to all ranks.
The planner makes a `ContextExchange`, the cost model counts its rows, and `wlb.parallel.context`
executes the exchange.

The functions use arrays with one entry for each pair of a span that reads keys and a span that has
them. They never loop over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb.plan.arrays import BoolArray, IntArray, offsets_of
from wlb.plan.sharding import KeyExchange, ShardingPlan, ranges

STAGE_ROWS = 128
"""Number of keys in one tile of an attention kernel. Stages of an exchange begin at multiples of
this number, so that attention kernels do not compute partly filled tiles."""


class RowRanges(NamedTuple):
    """A table of row ranges [first, last), each of which one CP rank sends to another CP rank.

    All columns have shape [n]. The table is sorted by stage, reader, holder and first row.
    """

    stage: IntArray  # stage of the exchange in which the range is sent, from 0
    reader: IntArray  # rank that receives the rows
    holder: IntArray  # rank that has the rows and sends them
    first: IntArray  # first row of the range, counted from the holder's first row
    last: IntArray  # last row of the range, plus one
    # number of the piece that the rows belong to; -1 if they are padding or of several pieces
    piece: IntArray

    def of(self, chosen: IntArray | BoolArray) -> "RowRanges":
        """Return the table's entries that a boolean mask or an array of indices selects."""
        return RowRanges(*(column[chosen] for column in self))

    def sums(self, *columns: IntArray, shape: tuple[int, ...]) -> IntArray:
        """Add up the row counts of all ranges that have equal values in `columns`.

        For example, `table.sums(table.reader, table.holder, shape=(cp, cp))` counts the rows that
        each rank receives from each other rank.

        Args:
            *columns: Columns of this table, by which the ranges are grouped.
            shape: Shape of the result: for each column, its largest possible value plus one.
        """
        at = np.ravel_multi_index(columns, shape)
        # `bincount` sums in float64. The sums are far below 2^53, so they are exact.
        sums = np.bincount(at, weights=self.last - self.first, minlength=int(np.prod(shape)))
        return sums.astype(np.int64).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextExchange:
    """Which rows of keys and values CP ranks send each other in one micro-batch (`exchange_of`)."""

    sharding: ShardingPlan  # how the micro-batch is divided over CP ranks
    local_tokens: int  # rows of each rank, padding included
    num_stages: int  # number of all-to-alls or all-gathers; 0 with one rank
    # whether attention over a rank's local keys runs while the first stage is in transit. If so, a
    # rank does not send its local rows to itself in a `needed` exchange.
    own_first: bool
    sliding: int  # length of the sliding attention window in keys; 0 means no window
    # the rows of other ranks that each rank's queries attend to, with the stage in which they
    # arrive
    reads: RowRanges
    # the rows that are sent. In an all-gather these are all rows. In a `needed` exchange these are
    # the rows of `reads` and, without `own_first`, also each rank's local rows, which the rank
    # sends to itself.
    travels: RowRanges

    @property
    def rows(self) -> IntArray:
        """Number of rows that rank i receives from rank j in stage s, as an array [s, i, j]."""
        moved, cp = self.travels, self.sharding.cp
        shape = (self.num_stages, cp, cp)
        return moved.sums(moved.stage, moved.reader, moved.holder, shape=shape)

    def __str__(self) -> str:
        """Return a sentence that says which collective sends how many rows."""
        if not self.num_stages:
            return "no keys travel: one rank has all"
        cp, stages = self.sharding.cp, f"{self.num_stages} stage{'s' * (self.num_stages > 1)}"
        own = "; attention over local keys runs during the first stage" if self.own_first else ""
        if self.sharding.exchange == KeyExchange.GATHER:
            return f"an all-gather of {self.local_tokens:,} rows of each rank, in {stages}{own}"
        rows = self.rows.sum(axis=0)
        most = int((rows.sum(axis=1) - rows.diagonal()).max())
        whole = (cp - 1) * self.local_tokens
        return (
            f"an exchange of needed rows, in {stages}: a rank receives at most {most:,} rows from "
            f"other ranks, and would receive {whole:,} rows in an all-gather{own}"
        )

    @property
    def keys_by_stage(self) -> IntArray:
        """Number of keys that arrive for each span in each stage, shape [num_stages, num_spans].

        If a rank has several spans of a piece, it receives the keys of the piece only once, but
        this property counts them for each of these spans.
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
    """Plan which rows of keys and values CP ranks send each other in a micro-batch.

    Args:
        sharding: How the micro-batch is divided over CP ranks, and with which collective
            (`sharding.exchange`).
        local_tokens: Rows of each rank, padding included.
        own_first: Whether attention over local keys runs while the first stage is in transit
            (`cp.overlap_stages`).
        stages: Number of stages of an exchange with `own_first`. Without it there is one stage.
        sliding: Length of the sliding attention window in keys; 0 means no window. With a window,
            attention is one kernel call over all keys, so `own_first` and `stages` are ignored.
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
        # Attention reads all of its keys from the received rows, so each rank also sends all of its
        # local rows, padding included, to itself.
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
    """Return the first local row of each stage of an all-gather, then `local_tokens`.

    Within a stage, the same range of local rows is gathered from every rank. Each range begins at a
    multiple of `STAGE_ROWS`.

    Args:
        local_tokens: Rows of each rank, padding included.
        stages: Number of stages.

    Returns:
        Numbers of local rows, shape [stages + 1].
    """
    bounds = np.arange(stages + 1) * local_tokens // max(1, stages) // STAGE_ROWS * STAGE_ROWS
    bounds[stages] = local_tokens
    return bounds


def _reads(sharding: ShardingPlan, sliding: int) -> RowRanges:
    """Return the rows of other ranks that each rank's queries attend to.

    The column `stage` of the result is 0 for all rows; `_in_stages` assigns rows to stages later.

    Args:
        sharding: How the micro-batch is divided over CP ranks.
        sliding: Length of the sliding attention window in keys; 0 means no window.
    """
    rank, piece = rank_of_span(sharding), sharding.piece
    start, stop = sharding.start, sharding.stop
    longest = int(sharding.lengths.max(initial=0))
    # 1. Find the range of keys [begin, end) that each span reads, as positions in its piece. Leave
    # out keys that an earlier span of the same rank and piece reads, so that they are sent once.
    order = np.lexsort((start, piece, rank))
    reader, of_piece, end = rank[order], piece[order], stop[order]
    begin = np.maximum(0, start[order] - (sliding or longest + 1) + 1)
    joins = (reader[1:] == reader[:-1]) & (of_piece[1:] == of_piece[:-1])
    begin[1:] = np.where(joins, np.maximum(begin[1:], end[:-1]), begin[1:])
    # 2. Find the spans that contain these keys. The spans of a piece cover it without gaps, so in
    # the order of `start` the spans that contain a range of keys are consecutive.
    held = np.lexsort((start, piece))
    at = piece[held] * (longest + 1)
    low = np.searchsorted(at + stop[held], of_piece * (longest + 1) + begin, side="right")
    high = np.searchsorted(at + start[held], of_piece * (longest + 1) + end, side="left")
    query, span = np.repeat(np.arange(reader.size), high - low), held[ranges(low, high)]
    is_other = rank[span] != reader[query]
    query, span = query[is_other], span[is_other]
    # 3. Convert positions in the piece to rows on the rank that has the span.
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
    """Assign the rows that ranks read to stages, and return the ranges of all stages.

    In a `needed` exchange, a range of at least `stages * STAGE_ROWS` rows is divided evenly among
    the stages, so that a rank sends and receives equally many rows in each stage. A shorter range
    is sent whole in one stage, if possible together with other ranges of its document, because
    attention kernels work in tiles and would compute many partly filled tiles.

    Args:
        sharding: How the micro-batch is divided over CP ranks.
        reads: The rows that each rank reads. Their `stage` must be 0.
        stages: Number of stages.
        bounds: For an all-gather, the first row of each stage (`_gather_bounds`). None for a
            `needed` exchange.
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
        # Sort the short ranges of each receiving rank by document, and number their rows from 0.
        # The number of a range's middle row decides in which stage the range is sent.
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
    """Return how many rows of rank j the queries of rank i attend to, as an array [i, j].

    Args:
        sharding: How the micro-batch is divided over CP ranks.
        sliding: Length of the sliding attention window in keys; 0 means no window.

    Returns:
        Row counts, shape [cp, cp]. The diagonal is zero.
    """
    reads = _reads(sharding, sliding)
    return reads.sums(reads.reader, reads.holder, shape=(sharding.cp, sharding.cp))


def rows_gathered(sharding: ShardingPlan, *, local_tokens: int) -> int:
    """Return how many rows each rank receives from other ranks in an all-gather.

    Args:
        sharding: How the micro-batch is divided over CP ranks.
        local_tokens: Rows of each rank, padding included.
    """
    return (sharding.cp - 1) * local_tokens


def rank_of_span(sharding: ShardingPlan) -> IntArray:
    """Return the number of the CP rank that has each span, shape [num_spans]."""
    return np.repeat(np.arange(sharding.cp), np.diff(sharding.rank_offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Rows of keys that a CP rank receives per attention layer, summed over micro-batches."""

    num_by_need: int = 0  # number of micro-batches with a `needed` exchange
    # rows that a rank receives from other ranks. In each micro-batch this is the number of rows of
    # the rank that receives the most.
    received: int = 0
    gathered: int = 0  # rows that a rank would receive if all micro-batches used an all-gather

    def __add__(self, other: "KeyRows") -> "KeyRows":
        return KeyRows(
            num_by_need=self.num_by_need + other.num_by_need,
            received=self.received + other.received,
            gathered=self.gathered + other.gathered,
        )

    @property
    def share(self) -> float:
        """`received` / `gathered`: the share of an all-gather's rows that is transferred."""
        return self.received / self.gathered if self.gathered else 1.0


def key_rows(
    shardings: Sequence[ShardingPlan],
    local_tokens: Sequence[int],
    *,
    sliding: int = 0,
    sliding_share: float = 0.0,
) -> KeyRows:
    """Count the rows of keys that CP ranks receive per attention layer, for some micro-batches.

    In each micro-batch the rank that receives the most counts. Counts are averaged over attention
    layers, which differ if only some have a sliding window, and summed over micro-batches.

    Args:
        shardings: For each micro-batch, how it is divided over CP ranks.
        local_tokens: For each micro-batch, the rows of each CP rank, padding included.
        sliding: Length of the sliding attention window in keys, in layers that have one.
        sliding_share: Fraction of the layers that have a sliding window, from 0 to 1.
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
