"""Tests the watch of several nodes whose ranks, aggregators or whole nodes are lost."""

import contextlib
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.nodes import WatchedNodes
from tests.sets import full
from wlb.launch.wire import pack

pytestmark = pytest.mark.process


@contextlib.contextmanager
def nodes_of(
    folder: Path, num: int, *, silence_s: float = 120.0, stuck_s: float = 600.0
) -> Iterator[WatchedNodes]:
    nodes = WatchedNodes(folder, num, silence_s=silence_s, stuck_s=stuck_s)
    try:
        yield nodes
    finally:
        nodes.kill()


def folders(parent: Path, num: int) -> list[Path]:
    made = [parent / str(i) for i in range(num)]
    for folder in made:
        folder.mkdir()
    return made


def at_work(text: str) -> list[int]:
    """Ranks that a report found in step 5, and not before: all were asked for their stacks."""
    found = re.findall(r"rank (\d+) was running \(in step 5: computing\)", text)
    return sorted(map(int, found))


@pytest.mark.parametrize("num", [1, 3])
def test_ranks_that_say_goodbye_end_all_aggregators(tmp_path: Path, num: int) -> None:
    with nodes_of(tmp_path, num) as nodes:
        for rank in nodes.ranks:
            rank.goodbye()
        assert nodes.end() == [0] * num
        assert nodes.told.empty()


def test_a_rank_that_dies_on_another_node(tmp_path: Path) -> None:
    (tmp_path / "rank-3.log").write_text("its last line\n")
    with nodes_of(tmp_path, 3) as nodes:
        nodes.ranks[3].drop()
        report = nodes.report(3)
        assert report.rank == 3
        assert report.text.startswith("rank 3 of 6 died\n")
        assert "  node 1\n  last lines of its log:\n    its last line\n" in report.text
        assert at_work(report.text) == [0, 1, 2, 4, 5]
        assert nodes.end() == [0, 0, 0]


def test_a_rank_that_raises_on_another_node(tmp_path: Path) -> None:
    with nodes_of(tmp_path, 2) as nodes:
        nodes.ranks[2].raised(ArithmeticError("wrong"))
        report = nodes.report()
        assert (report.rank, report.error) == (2, "ArithmeticError: wrong")
        assert at_work(report.text) == [0, 1, 3]


@pytest.mark.parametrize("node", [0, 1, *full(2)])
def test_an_aggregator_that_is_killed(tmp_path: Path, node: int) -> None:
    """All ranks are alive, so the report names the watch and finds each of them at work."""
    with nodes_of(tmp_path, 3) as nodes:
        nodes.processes[node].kill()
        report = nodes.report()
        first = 2 * node
        assert report.rank == first
        named = "the root, on n0" if node == 0 else r"process \d+ on .*"
        assert re.match(rf"the watch of rank {first}, {first + 1} \({named}\) died\n", report.text)
        assert at_work(report.text) == [0, 1, 2, 3, 4, 5]
        assert nodes.end() == [-9 if i == node else 0 for i in range(3)]


@pytest.mark.full
def test_a_node_that_is_lost(tmp_path: Path) -> None:
    """Each of three runs loses another node; the runs wait for their reports together."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(nodes_of(folder, 3)) for folder in folders(tmp_path, 3)]
        for node, nodes in enumerate(runs):
            lost = [2 * node, 2 * node + 1]
            for rank in lost:
                nodes.ranks[rank]._is_dropped = True  # nobody answers for it any more
            nodes.processes[node].kill()
            for rank in lost:
                nodes.ranks[rank].drop()
        for node, nodes in enumerate(runs):
            one, other = 2 * node, 2 * node + 1
            text = nodes.report(one, other).text
            assert text.startswith(f"rank {one} of 6 died\n")
            assert f"rank {other} as well\n" in text
            assert re.search(rf"\nthe watch of rank {one}, {other} \(.*\) died\n", text)
            assert at_work(text) == sorted({0, 1, 2, 3, 4, 5} - {one, other})


@pytest.mark.full
def test_an_aggregator_that_is_stopped(tmp_path: Path) -> None:
    """Either of two, in two runs that wait for their reports together."""
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(nodes_of(folder, 2, silence_s=20.0))
            for folder in folders(tmp_path, 2)
        ]
        for node, nodes in enumerate(runs):
            nodes.processes[node].send_signal(signal.SIGSTOP)
        for node, nodes in enumerate(runs):
            text = nodes.report().text
            assert text.startswith(f"the watch of rank {2 * node}, {2 * node + 1} (")
            assert text.partition("\n")[0].endswith(") gave no sign of life for 20 s")


def test_the_only_aggregator_that_is_killed(tmp_path: Path) -> None:
    """Nobody hears the ranks of a single node any more; one of them reports."""
    with nodes_of(tmp_path, 1) as nodes:
        nodes.processes[0].kill()
        text = nodes.report().text
        assert re.match(r"the watch of rank 0, 1 \(.*\) died; rank \d reports it", text)
        assert len(at_work(text)) == 1


@pytest.mark.full
def test_both_roots_that_are_killed(tmp_path: Path) -> None:
    """Parts that hear of nobody report once, because all see the folder of logs."""
    with nodes_of(tmp_path, 3) as nodes:
        for process in nodes.processes[:2]:
            process.kill()
        assert "died" in nodes.report().text


def test_signals_to_a_job_leave_aggregators_alone(tmp_path: Path) -> None:
    with nodes_of(tmp_path, 2) as nodes:
        for process in nodes.processes:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                process.send_signal(number)
        for rank in nodes.ranks:
            rank.goodbye()
        assert nodes.end() == [0, 0]
        assert nodes.told.empty()


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", *full(pack("wrong") + pack({}), pack(None), b"\xff" * 1000, b"")],
    ids=["http", "token", "null", "length", "nothing"],
)
def test_a_stranger_does_not_stop_a_run(tmp_path: Path, said: bytes) -> None:
    with nodes_of(tmp_path, 2) as nodes:
        for port in (nodes.layout.leaders[1].port, nodes.layout.roots[0][1]):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1000) == b""  # it is told nothing
        for rank in nodes.ranks:
            rank.goodbye()
        assert nodes.end() == [0, 0]
        assert nodes.told.empty()
