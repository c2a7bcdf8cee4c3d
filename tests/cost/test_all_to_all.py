"""Tests the price of an all-to-all by hand: its latency, and the rank with most on its links."""

import numpy as np
import pytest

from wlb.cost import all_to_all_ns, link_bandwidths, load_profile
from wlb.cost.all_to_all import all_to_all_latency_ns
from wlb.cost.profile import Collective

H100 = load_profile("h100")
MOVED = np.array([[0, 3, 0], [1, 0, 5], [0, 0, 0]])
"""Rows that rank i receives of rank j; rank 2 is on another node."""
NODE = np.array([0, 0, 1])


def test_bandwidths_are_an_all_gathers_in_a_node_and_the_ranks_own_link_between_nodes() -> None:
    inside = H100.collective(Collective.ALL_GATHER, span_ranks=1)
    between = H100.collective(Collective.P2P, span_ranks=H100.ranks_per_node + 1)
    assert link_bandwidths(H100) == (inside.bytes_per_s, between.bytes_per_s)
    assert inside.bytes_per_s > between.bytes_per_s


def test_the_rank_that_sends_or_receives_longest_counts() -> None:
    """Rank 1 receives one row of its node and five of another; nobody sends for longer."""
    inside, between = link_bandwidths(H100)
    found = all_to_all_ns(
        H100, MOVED, NODE[:, None] == NODE, row_bytes=1000.0, span_ranks=16, axes=(0, 1)
    )
    latency = all_to_all_latency_ns(H100, span_ranks=16)
    assert found == pytest.approx(latency + (1000 / inside + 5000 / between) * 1e9)


def test_one_rank_of_it_has_the_rows_that_it_receives_and_sends() -> None:
    whole = {"row_bytes": 1000.0, "span_ranks": 16}
    of_1 = np.stack([MOVED[1], MOVED[:, 1]])
    assert all_to_all_ns(H100, of_1, NODE[1] == NODE, axes=(1,), **whole) == all_to_all_ns(
        H100, MOVED, NODE[:, None] == NODE, **whole
    )
