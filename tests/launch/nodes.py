"""A watch of several nodes in one test: real aggregators, and threads in place of ranks."""

import queue
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wlb.launch import aggregator
from wlb.launch.failure import FailureReport
from wlb.launch.layout import Attendance, Leader, WatchLayout
from wlb.launch.position import Position
from wlb.launch.reporter import Reporter
from wlb.launch.root import WatchLimits

BOUND_S = 600.0  # ends a test that hangs; no test comes near it


class WatchedNodes:
    """`num_nodes` aggregators, with `each` ranks of each in step 5; `told` has what ranks got."""

    def __init__(
        self,
        folder: Path,
        num_nodes: int,
        *,
        each: int = 2,
        silence_s: float = 120.0,
        stuck_s: float = BOUND_S,
    ) -> None:
        size = num_nodes * each
        limits = WatchLimits(world_size=size, silence_s=silence_s, stuck_s=stuck_s, logs=folder)
        pairs = [
            (socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0)))
            for _ in range(num_nodes)
        ]
        said: list[Attendance] = []
        for node, (local, root) in enumerate(pairs):
            leader = Leader(
                local.getsockname()[1],
                ("127.0.0.1", root.getsockname()[1]),
                secrets.token_hex(16),
                secrets.token_hex(4),
            )
            said += [Attendance((node, f"n{node}"), None if i else leader) for i in range(each)]
        self.layout, self.told = WatchLayout.of(said), queue.Queue[FailureReport | None]()
        self.processes = []
        for node, pair in enumerate(pairs):
            self.processes.append(aggregator.start(self.layout.job(node, limits, pair)))
            for each_socket in pair:
                each_socket.close()
        self.positions = [Position() for _ in range(size)]
        # Ranks are let in when all of their node are there, so each begins in a thread.
        self.ranks = self._let_in(limits)
        for position, rank in zip(self.positions, self.ranks, strict=True):
            position.enter("computing", step=5)
            rank.start()

    def _let_in(self, limits: WatchLimits) -> list[Reporter]:
        def begin(rank: int) -> Reporter:
            reporting = self.layout.reporting(rank, f"node {self.layout.node_of(rank)}")
            return Reporter(reporting, self.positions[rank], limits, self.told.put)

        size = len(self.positions)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(begin, range(size)))

    def report(self, *lost: int) -> FailureReport:
        """The one report of all ranks but the lost ones, which were told to end."""
        size = len(self.ranks) - len(lost)
        reports = [self.told.get(timeout=BOUND_S) for _ in range(size)]
        for rank in self.ranks:
            rank._thread.join(BOUND_S)
        assert self.told.empty()
        (report,) = [r for r in reports if r is not None]
        return report

    def end(self) -> list[int]:
        """Exit statuses of the aggregators, each of which ends by itself."""
        statuses: list[int] = []
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            statuses.append(process.wait(BOUND_S))
        return statuses

    def kill(self) -> None:
        for rank in self.ranks:
            rank.drop()
            rank._thread.join(BOUND_S)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()
