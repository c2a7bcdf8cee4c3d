"""The price of an all-to-all: of keys and values between CP ranks, or of tokens' rows to experts.

All-to-alls were not measured. Their price is derived from measured prices of other collectives:

- The latency is that of an all-gather.
- Between ranks of one node, rows move at the bandwidth of an all-gather.
- Between nodes, rows move at the bandwidth of a P2P transfer, because the rows of a rank use only
  this rank's network link. (A ring all-gather also uses the links of the node's other members.)
- A rank's transfers inside and between nodes are assumed to run one after the other, so the price
  is more likely too high than too low.
"""

from typing import NamedTuple

import numpy as np

from wlb.cost.profile import Collective, KernelProfile
from wlb.plan import BoolArray, FloatArray, IntArray


class LinkBandwidths(NamedTuple):
    """Bytes per second between two ranks of an all-to-all."""

    inside: float  # between two ranks of one node
    between: float  # between ranks of different nodes


def link_bandwidths(profile: KernelProfile) -> LinkBandwidths:
    """Return the bandwidths of an all-to-all inside and between nodes."""
    # No profile has an all-to-all. Inside a node an all-gather uses the same links. Between nodes a
    # P2P transfer does, because both use one rank's network link.
    inside = profile.collective(Collective.ALL_GATHER, span_ranks=1)
    between = profile.collective(Collective.P2P, span_ranks=profile.ranks_per_node + 1)
    return LinkBandwidths(inside.bytes_per_s, between.bytes_per_s)


def all_to_all_latency_ns(profile: KernelProfile, *, span_ranks: int) -> int:
    """Return the latency of an all-to-all in ns.

    Args:
        profile: Prices.
        span_ranks: Number of consecutive ranks over which the members of the group are spread.
    """
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
    """Return the ns of an all-to-all: its latency plus the transfer time of the busiest rank.

    Args:
        profile: Prices.
        rows: Number of rows that rank i receives from rank j, [ranks, ranks]. For a single rank:
            numbers of rows that it receives from each rank, and sends to each rank, [2, ranks].
        shares_node: Whether the two ranks of each entry of `rows` share a node; its shape
            broadcasts to the shape of `rows`.
        row_bytes: Bytes of a row.
        span_ranks: Number of consecutive ranks over which the members of the group are spread.
        axes: Axes of `rows` along which the transfers of one rank are added up. Use (1,) if `rows`
            has the transfers of a single rank.
    """
    inside, between = link_bandwidths(profile)
    seconds = np.where(shares_node, row_bytes / inside, row_bytes / between).astype(np.float64)
    times = rows.astype(np.float64) * seconds * 1e9
    # The transfers of a rank are assumed to run one after the other, so their times add up. The
    # all-to-all takes as long as its slowest rank.
    longest = max(float(times.sum(axis).max()) for axis in axes)
    return all_to_all_latency_ns(profile, span_ranks=span_ranks) + longest
