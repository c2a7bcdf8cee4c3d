"""Which rows of keys and values each CP rank reads of the others', from a sharding alone.

Queries of a span see keys [0, stop) of their piece, so a rank reads of each piece the prefix up to
its furthest span, and of every span on another rank the first rows, one contiguous range. An
exchange by need moves these rows and no others; an all-gather moves all rows. Cost: arrays of
[num_spans, cp], without a loop over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wlb.plan.arrays import IntArray
from wlb.plan.sharding import KeyExchange, ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Key rows that micro-batches exchange, each counted at the CP rank that receives most.

    num_by_need: micro-batches whose ranks receive only rows that they read. received: rows of all
    micro-batches; gathered: the same if all were by all-gathers.
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


def key_rows(shardings: Sequence[ShardingPlan], local_tokens: Sequence[int]) -> KeyRows:
    """Key rows of micro-batches with these rows on every CP rank, padding included."""
    by_need = received = gathered = 0
    for sharding, rows in zip(shardings, local_tokens, strict=True):
        all_rows = rows_gathered(sharding, local_tokens=rows)
        gathered += all_rows
        is_needed = sharding.exchange == KeyExchange.NEEDED and sharding.cp > 1
        by_need += is_needed
        received += int(rows_moved(sharding).sum(axis=1).max()) if is_needed else all_rows
    return KeyRows(num_by_need=by_need, received=received, gathered=gathered)


def rows_read(sharding: ShardingPlan) -> IntArray:
    """The first rows of each span that each rank reads, shape [num_spans, cp].

    Of a rank's own spans all rows, because a span's keys include its own.
    """
    reach = _reach(sharding)
    furthest = np.minimum(sharding.stop[:, None], reach.T[sharding.piece])
    return np.maximum(furthest - sharding.start[:, None], 0)


def rows_moved(sharding: ShardingPlan) -> IntArray:
    """Rows that rank i reads of rank j's, shape [cp, cp] with i first; zero for i = j."""
    running = np.zeros((sharding.piece.size + 1, sharding.cp), np.int64)
    np.cumsum(rows_read(sharding), axis=0, out=running[1:])
    offsets = sharding.rank_offsets
    moved = (running[offsets[1:]] - running[offsets[:-1]]).T.copy()
    np.fill_diagonal(moved, 0)
    return moved


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
