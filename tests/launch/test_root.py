"""Tests the watch of several nodes whose ranks, aggregators or whole nodes are lost."""

import asyncio
import contextlib
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.nodes import BOUND_S, WatchedNodes
from tests.launch.ports import socket_count
from tests.sets import full
from wlb.launch import root as roots
from wlb.launch.failure import RankStatus
from wlb.launch.root import RootAggregator, WatchLimits
from wlb.launch.wire import Member, Strangers, pack

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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.full
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


def test_many_strangers_do_not_stop_a_run(tmp_path: Path) -> None:
    """150 that say nothing to each of the root's ports: all but the newest few are closed."""
    with nodes_of(tmp_path, 1) as nodes, contextlib.ExitStack() as opened:
        (process,), spare = nodes.processes, 16
        before = socket_count(process.pid)
        for port in (nodes.layout.leaders[0].port, nodes.layout.roots[0][1]):
            strangers = [
                opened.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(150)
            ]
            # The root's port waits for ranks of a lost aggregator too: here two.
            for stranger in strangers[: -(spare + 2)]:
                stranger.settimeout(BOUND_S)
                assert stranger.recv(1) == b""
        assert socket_count(process.pid) <= before + 2 * spare + 2 + 1  # one is being accepted
        for rank in nodes.ranks:
            rank.goodbye()
        assert nodes.end() == [0]
        assert nodes.told.empty()


class DyingMember(Member):
    """A rank's connection; when the rank is asked to report, it and another one are gone."""

    def __init__(self, root: RootAggregator, rank: int) -> None:
        super().__init__("", root, Strangers(1))
        self.ranks, self.heard_s = {rank: "here"}, float("inf")
        self.root, self.others = root, list[Member]()

    def send(self, message: Any) -> None:
        if isinstance(message, dict):
            for member in self.others:
                self.root.lost(member)

    def close(self) -> None:
        pass


def test_ranks_that_die_while_one_is_asked_to_report_break_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SETTLE_S", "STACKS_S"):
        monkeypatch.setattr(roots, name, 0.0)

    async def run() -> dict[int, RankStatus]:
        limits = WatchLimits(world_size=3, silence_s=600.0, stuck_s=600.0, logs=tmp_path)
        root = RootAggregator(limits)
        members = [DyingMember(root, rank) for rank in range(3)]
        for member in members:
            root.joined(member)
        members[0].others = members[:2]
        root.lost(members[2])
        await asyncio.wait_for(root.run(), BOUND_S)
        return root._seen

    seen = asyncio.run(run())
    assert [seen[rank].is_dead for rank in range(3)] == [True] * 3
