"""Tests where a watch is: nodes by what their ranks say, the root and its standby."""

import pytest

from wlb.launch.layout import Attendance, Leader, WatchLayout


def said(*nodes: tuple[int, str], leaders: tuple[int, ...]) -> list[Attendance]:
    """Returns what ranks say whose nodes are these; `leaders` start aggregators."""
    return [
        Attendance(
            node, Leader(rank, (node[1], 1000 + rank), f"t{rank}", "") if rank in leaders else None
        )
        for rank, node in enumerate(nodes)
    ]


def test_ranks_report_to_their_node_and_turn_to_a_root_elsewhere() -> None:
    """Slurm may number ranks across nodes, so a node's ranks need not be consecutive."""
    nodes = [(0, "a"), (1, "b"), (2, "c")] * 2
    layout = WatchLayout.of(said(*nodes, leaders=(0, 1, 2)))
    assert layout.nodes == ((0, 3), (1, 4), (2, 5))
    assert layout.roots == [("a", 1000), ("b", 1001)]
    reporting = [layout.reporting(rank, "here") for rank in range(6)]
    assert [r.aggregator[1] for r in reporting] == [0, 1, 2, 0, 1, 2]
    assert [r.others for r in reporting[:3]] == [
        [("b", 1001)],
        [("a", 1000)],
        [("a", 1000), ("b", 1001)],
    ]
    assert {r.token for r in reporting} == {"t0"}
    assert not any(r.is_first_alone for r in reporting)


def test_hosts_tell_nodes_apart_that_the_launcher_did_not_number() -> None:
    layout = WatchLayout.of(said((0, "a"), (0, "a"), (0, "b"), (0, "b"), leaders=(0, 2)))
    assert layout.nodes == ((0, 1), (2, 3))


def test_on_a_single_node_the_first_rank_reports_the_loss_of_the_watch() -> None:
    layout = WatchLayout.of(said((0, "a"), (0, "a"), leaders=(0,)))
    assert [layout.reporting(rank, "").is_first_alone for rank in range(2)] == [True, False]


def test_a_node_needs_one_rank_that_starts_its_aggregator() -> None:
    with pytest.raises(LookupError, match=r"ranks \[1\] of a node have 0 first ranks"):
        WatchLayout.of(said((0, "a"), (1, "b"), leaders=(0,)))
