"""An exchange by need among ranks of several nodes that brings each row to a node once.

Keys that ranks of a node read of another node land on that node's ranks in equal parts, and go on
from there to the ranks that read them; keys of the own node come as always. So a row crosses the
network between nodes once a node, not once a rank. What lands on a node is a list of rows, in the
order of spans, which its ranks divide. Cost: arrays of [num_spans, cp], and of [num_spans, near,
near] a node.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wlb.plan.arrays import BoolArray, IntArray, offsets_of
from wlb.plan.exchange import between_ranks, rank_of_span, rows_read, rows_read_of_others
from wlb.plan.sharding import ShardingPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Relay:
    """Who sends what in the exchange of one sharding. near: CP ranks a node, neighbours; the last
    node may have fewer."""

    sharding: ShardingPlan
    near: int

    @cached_property
    def nodes(self) -> IntArray:
        """The node of each rank, shape [cp]."""
        return np.arange(self.sharding.cp) // self.near

    @cached_property
    def _is_far(self) -> BoolArray:
        """Whether each span lies on another node than each rank, shape [num_spans, cp]."""
        return self.nodes[rank_of_span(self.sharding)][:, None] != self.nodes

    @cached_property
    def read_far(self) -> IntArray:
        """First rows of each span that each rank reads of other nodes, shape [num_spans, cp]."""
        return np.where(self._is_far, rows_read(self.sharding), 0)

    @cached_property
    def read_near(self) -> IntArray:
        """First rows of each span that each rank reads of others of its node, [num_spans, cp]."""
        return np.where(self._is_far, 0, rows_read_of_others(self.sharding))

    def ranks_of(self, node: int) -> range:
        return range(node * self.near, min(self.sharding.cp, (node + 1) * self.near))

    def landing(self, node: int) -> tuple[IntArray, IntArray]:
        """Rows of each span that land on a node, its first ones, shape [num_spans]; and where its
        ranks cut the list of all of them, shape [ranks of the node + 1]."""
        ranks = self.ranks_of(node)
        rows = self.read_far[:, ranks.start : ranks.stop].max(axis=1)
        cuts = np.arange(len(ranks) + 1) * int(rows.sum()) // len(ranks)
        return rows, cuts

    @cached_property
    def landed(self) -> IntArray:
        """Rows of rank j that land on rank i, shape [cp, cp] with i first."""
        out = np.zeros((self.sharding.cp,) * 2, np.int64)
        for node in range(int(self.nodes[-1]) + 1):
            rows, cuts = self.landing(node)
            of_rank = offsets_of(rows)[self.sharding.rank_offsets]
            out[list(self.ranks_of(node))] = _overlaps(cuts, of_rank)
        return out

    @cached_property
    def passed_on(self) -> IntArray:
        """Rows that rank i reads of those that landed on rank j, itself included, shape [cp, cp]
        with i first."""
        out = np.zeros((self.sharding.cp,) * 2, np.int64)
        for node in range(int(self.nodes[-1]) + 1):
            ranks = self.ranks_of(node)
            rows, cuts = self.landing(node)
            first = offsets_of(rows)[:-1, None]
            last = first + self.read_far[:, ranks.start : ranks.stop]
            low = np.maximum(first[..., None], cuts[:-1])
            high = np.minimum(last[..., None], cuts[1:])
            out[ranks.start : ranks.stop, ranks.start : ranks.stop] = np.maximum(0, high - low).sum(
                axis=0
            )
        return out

    @cached_property
    def moved_near(self) -> IntArray:
        """Rows that rank i reads of rank j of its node, shape [cp, cp]; zero for i = j."""
        return between_ranks(self.sharding, self.read_near)


def _overlaps(a: IntArray, b: IntArray) -> IntArray:
    """Whole numbers in both [a[i], a[i + 1]) and [b[j], b[j + 1]), by i and j."""
    high = np.minimum(a[1:, None], b[1:])
    return np.maximum(0, high - np.maximum(a[:-1, None], b[:-1]))
