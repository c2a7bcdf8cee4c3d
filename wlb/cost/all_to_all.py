"""The price of an all-to-all: of keys between CP ranks, and of experts' rows.

Its latency is an all-gather's. In a node rows move at an all-gather's bandwidth; between nodes over
the rank's own link, which a ring shares with the other members of its node. The links of a rank are
taken to work one after the other, so that it is not priced too low. Nobody has measured this.
"""

from typing import NamedTuple

import numpy as np

from wlb.cost.profile import Collective, KernelProfile
from wlb.plan import BoolArray, FloatArray, IntArray


class LinkBandwidths(NamedTuple):
    """Bytes a second between two ranks of an all-to-all."""

    inside: float  # of one node
    between: float  # of two nodes


def link_bandwidths(profile: KernelProfile) -> LinkBandwidths:
    inside = profile.collective(Collective.ALL_GATHER, span_ranks=1)
    between = profile.collective(Collective.P2P, span_ranks=profile.ranks_per_node + 1)
    return LinkBandwidths(inside.bytes_per_s, between.bytes_per_s)


def all_to_all_latency_ns(profile: KernelProfile, *, span_ranks: int) -> int:
    """Latency of an all-to-all of ranks that span so many consecutive ones."""
    return profile.collective(Collective.ALL_GATHER, span_ranks=span_ranks).alpha_ns


def all_to_all_ns(
    profile: KernelProfile,
    rows: IntArray | FloatArray,
    is_near: BoolArray,
    *,
    row_bytes: float,
    span_ranks: int,
    axes: tuple[int, ...] = (0, 1),
) -> float:
    """Time of an all-to-all: its latency, and the rank that sends or receives longest.

    Args:
        profile: Prices.
        rows: Rows that rank i receives of rank j, [ranks, ranks], or those that one rank receives
            of each and sends to each, [2, ranks].
        is_near: Whether two ranks share a node, in a shape that broadcasts to that of `rows`.
        row_bytes: Bytes of a row.
        span_ranks: Consecutive ranks that the group spans.
        axes: Axes of `rows` over which the rows of a rank add up: of one rank (1,).
    """
    inside, between = link_bandwidths(profile)
    seconds = np.where(is_near, row_bytes / inside, row_bytes / between).astype(np.float64)
    times = rows.astype(np.float64) * seconds * 1e9
    longest = max(float(times.sum(axis).max()) for axis in axes)
    return all_to_all_latency_ns(profile, span_ranks=span_ranks) + longest
