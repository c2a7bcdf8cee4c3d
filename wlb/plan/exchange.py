"""Which rows of keys and values each CP rank reads of the others', from a sharding alone.

Queries of a span see keys [0, stop) of their piece, so a rank reads of each piece the prefix up to
its furthest span, and of every span on another rank the first rows, one contiguous range. With a
sliding window of W keys (`sliding`; 0 = all) a span [start, stop) sees [start - W + 1, stop), and a
rank may read several ranges of a span. An exchange by need moves these rows and no others; an
all-gather moves all rows. Cost: arrays of [num_spans, cp], without a loop over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb.plan.arrays import BoolArray, IntArray
from wlb.plan.sharding import KeyExchange, ShardingPlan, ranges

STAGE_ROWS = 128
"""Rows of a kernel's tile of keys, of which stages have whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Key rows that micro-batches exchange, each counted at the CP rank that receives most.

    num_by_need: micro-batches whose ranks receive only rows that they read; those that come by way
    of another rank count where they are read. received: rows of all micro-batches; gathered: the
    same if all were by all-gathers.
    """

    num_by_need: int = 0
    received: int = 0
    gathered: int = 0

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
    layer: `sliding_share` of all have a window of `sliding` keys."""
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


def rows_read(sharding: ShardingPlan) -> IntArray:
    """The first rows of each span that each rank reads, shape [num_spans, cp].

    Of a rank's own spans all rows, because a span's keys include its own.
    """
    reach = _reach(sharding)
    furthest = np.minimum(sharding.stop[:, None], reach.T[sharding.piece])
    return np.maximum(furthest - sharding.start[:, None], 0)


class ReadRanges(NamedTuple):
    """Rows [first, last) of span `span` that rank `reader` reads, by reader, span and row; shape
    [n] each. Of its own spans a rank reads all rows, each in one range."""

    reader: IntArray
    span: IntArray
    first: IntArray
    last: IntArray

    def of(self, chosen: IntArray | BoolArray) -> "ReadRanges":
        """The ranges that a mask or indices select."""
        return ReadRanges(*(column[chosen] for column in self))


def ranges_read(sharding: ShardingPlan, *, sliding: int = 0) -> ReadRanges:
    """What every rank reads of every span."""
    if not sliding:
        read = rows_read(sharding)
        reader, span = np.nonzero(read.T)
        return ReadRanges(reader, span, np.zeros_like(span), read[span, reader])
    rank, piece = rank_of_span(sharding), sharding.piece
    start, stop = sharding.start, sharding.stop
    # Of a rank's spans of a piece, in order, each adds the keys that the one before does not read.
    order = np.lexsort((start, piece, rank))
    rank, piece, end = rank[order], piece[order], stop[order]
    begin = np.maximum(0, start[order] - sliding + 1)
    joins = (rank[1:] == rank[:-1]) & (piece[1:] == piece[:-1])
    begin[1:] = np.where(joins, np.maximum(begin[1:], end[:-1]), begin[1:])
    # The spans that hold these keys follow each other among a piece's spans, which tile it.
    held = np.lexsort((start, sharding.piece))
    far = int(sharding.lengths.max(initial=0)) + 1
    at = sharding.piece[held] * far
    low = np.searchsorted(at + stop[held], piece * far + begin, side="right")
    high = np.searchsorted(at + start[held], piece * far + end, side="left")
    of, holder = np.repeat(np.arange(rank.size), high - low), held[ranges(low, high)]
    found = ReadRanges(
        rank[of],
        holder,
        np.maximum(begin[of], start[holder]) - start[holder],
        np.minimum(end[of], stop[holder]) - start[holder],
    )
    return found.of(np.lexsort((found.first, found.span, found.reader)))


def rows_moved(sharding: ShardingPlan, *, sliding: int = 0) -> IntArray:
    """Rows that rank i reads of rank j's, shape [cp, cp] with i first; zero for i = j."""
    if sliding:
        reader, span, first, last = ranges_read(sharding, sliding=sliding)
        moved = np.zeros((sharding.cp, sharding.cp), np.int64)
        np.add.at(moved, (reader, rank_of_span(sharding)[span]), last - first)
        np.fill_diagonal(moved, 0)
        return moved
    return between_ranks(sharding, rows_read_of_others(sharding))


def rows_read_of_others(sharding: ShardingPlan) -> IntArray:
    """`rows_read`, but of a rank's own spans none."""
    read = rows_read(sharding)
    read[np.arange(read.shape[0]), rank_of_span(sharding)] = 0
    return read


def between_ranks(sharding: ShardingPlan, rows: IntArray) -> IntArray:
    """Rows of each rank's spans, shape [..., cp, cp] with the receiver first; rows: of each span to
    each rank, shape [..., num_spans, cp]."""
    running = np.zeros((*rows.shape[:-2], rows.shape[-2] + 1, rows.shape[-1]), np.int64)
    np.cumsum(rows, axis=-2, out=running[..., 1:, :])
    offsets = sharding.rank_offsets
    return (running[..., offsets[1:], :] - running[..., offsets[:-1], :]).swapaxes(-1, -2).copy()


def stage_bounds(sharding: ShardingPlan, read: IntArray, *, stages: int) -> IntArray:
    """Where an exchange by need in stages cuts the rows of each span that a rank reads.

    read: rows of each span that each rank receives, shape [num_spans, cp]. Stage s brings rows
    [out[s], out[s + 1]) of them; out: shape [stages + 1, num_spans, cp]. A range of at least
    `STAGE_ROWS` rows a stage is cut evenly, so that ranks send and receive alike in all stages. A
    shorter one goes whole, with those of the same document, because kernels work in tiles.
    """
    out = np.zeros((stages + 1, *read.shape), np.int64)
    out[stages] = read
    if stages == 1:
        return out
    is_cut = read >= stages * STAGE_ROWS
    order = np.lexsort((sharding.start, sharding.piece))
    whole = np.where(is_cut, 0, read)[order]
    middle = np.cumsum(whole, axis=0) - (whole + 1) // 2
    stage = np.empty_like(read)
    stage[order] = middle * stages // np.maximum(1, whole.sum(axis=0))
    for s in range(1, stages):
        even = read * s // stages // STAGE_ROWS * STAGE_ROWS
        out[s] = np.where(is_cut, even, np.where(stage < s, read, 0))
    return out


def gather_bounds(local_tokens: int, *, stages: int) -> IntArray:
    """Where an all-gather in stages cuts each rank's rows, shape [stages + 1], in whole tiles."""
    bounds = np.arange(stages + 1) * local_tokens // stages // STAGE_ROWS * STAGE_ROWS
    bounds[stages] = local_tokens
    return bounds


def rows_moved_in_stages(sharding: ShardingPlan, *, stages: int) -> IntArray:
    """`rows_moved` of each stage, shape [stages, cp, cp]; they add up to it."""
    bounds = stage_bounds(sharding, rows_read_of_others(sharding), stages=stages)
    return between_ranks(sharding, np.diff(bounds, axis=0))


def least_rows_received(sharding: ShardingPlan) -> IntArray:
    """Rows that each rank has to receive with these spans, however they are sent, shape [cp]: the
    prefixes that it reads less the rows that it holds."""
    return _reach(sharding).sum(axis=1) - sharding.tokens


def rows_gathered(sharding: ShardingPlan, *, local_tokens: int) -> int:
    """Rows that each rank receives in an all-gather of `local_tokens` rows a rank."""
    return (sharding.cp - 1) * local_tokens


def rank_of_span(sharding: ShardingPlan) -> IntArray:
    """The rank that holds each span, shape [num_spans]."""
    return np.repeat(np.arange(sharding.cp), np.diff(sharding.rank_offsets))


def _reach(sharding: ShardingPlan) -> IntArray:
    """Keys [0, reach) of each piece that each rank reads, shape [cp, num_pieces]."""
    num_pieces = sharding.lengths.size
    reach = np.zeros(sharding.cp * num_pieces, np.int64)
    at = rank_of_span(sharding) * num_pieces + sharding.piece
    np.maximum.at(reach, at, sharding.stop)
    return reach.reshape(sharding.cp, num_pieces)
