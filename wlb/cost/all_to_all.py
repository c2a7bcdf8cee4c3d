"""The price of an all-to-all, of keys between CP ranks or of experts' rows.

The latency is that of an all-gather. Inside a node rows move at an all-gather's bandwidth. Between
nodes they use the rank's own network link; only a ring can also use the links of the node's other
members. A rank's links are assumed to work one after the other, so that the price is rather too
high than too low. It was not measured.
"""

from typing import NamedTuple

import numpy as np

from wlb.cost.profile import Collective, KernelProfile
from wlb.plan import BoolArray, FloatArray, IntArray


class LinkBandwidths(NamedTuple):
    """Bytes per second between two ranks of an all-to-all."""

    inside: float  # ranks of one node
    between: float  # ranks of two nodes


def link_bandwidths(profile: KernelProfile) -> LinkBandwidths:
    """Return the bandwidths inside and between nodes."""
    # An all-gather inside a node uses the node's links. A P2P transfer between nodes uses one
    # rank's link, as an all-to-all does.
    inside = profile.collective(Collective.ALL_GATHER, span_ranks=1)
    between = profile.collective(Collective.P2P, span_ranks=profile.ranks_per_node + 1)
    return LinkBandwidths(inside.bytes_per_s, between.bytes_per_s)


def all_to_all_latency_ns(profile: KernelProfile, *, span_ranks: int) -> int:
    """Return the latency of an all-to-all in a group that spans `span_ranks` consecutive ranks."""
    return profile.collective(Collective.ALL_GATHER, span_ranks=span_ranks).alpha_ns


def all_to_all_ns(
    profile: KernelProfile,
    rows: IntArray | FloatArray,
    shares_node: BoolArray,
    *,
    row_bytes: float,
    span_ranks: int,
    axes: tuple[int, ...] = (0, 1),
) -> float:
    """Return the time of an all-to-all: its latency, and the time of the busiest rank.

    Args:
        profile: Prices.
        rows: Rows that rank i receives from rank j, [ranks, ranks]; or for one rank the rows that
            it receives from and sends to each other rank, [2, ranks].
        shares_node: Whether two ranks share a node, in a shape that broadcasts to the shape of
            `rows`.
        row_bytes: Bytes of a row.
        span_ranks: Consecutive ranks over which the group is spread.
        axes: Axes of `rows` over which the rows of one rank add up; (1,) for the rows of one rank.
    """
    inside, between = link_bandwidths(profile)
    seconds = np.where(shares_node, row_bytes / inside, row_bytes / between).astype(np.float64)
    times = rows.astype(np.float64) * seconds * 1e9
    # A rank's transfers take turns on its links, so their times add up; the slowest rank counts.
    longest = max(float(times.sum(axis).max()) for axis in axes)
    return all_to_all_latency_ns(profile, span_ranks=span_ranks) + longest
