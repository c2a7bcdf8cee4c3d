"""Ranks watch each other: one that dies, stops, hangs or raises ends all of them with one report.

A thread of every rank sends its position or failure to the aggregator of its node, a process of its
own, over a TCP connection that works while the main thread waits in a collective. Aggregators tell
the root beside rank 0. README.md describes how it tells dead, silent, failed and hanging ranks
apart, and what happens when an aggregator or the root is lost.
"""

import contextlib
import resource
import secrets
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wlb.launch import aggregator
from wlb.launch.failure import FailureReport
from wlb.launch.layout import Attendance, Leader, WatchLayout
from wlb.launch.position import Position
from wlb.launch.reporter import Reporter
from wlb.launch.root import WatchLimits
from wlb.parallel.host import host_group
from wlb.parallel.world import World
from wlb.plan import UserError

_OTHER_FILES = 64
"""File descriptors of an aggregator beside its connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """silence_s: a rank without a sign of life for this long counts as lost. stuck_s: a run without
    progress on any rank for this long counts as hung, unless a slow activity is under way. logs:
    folder of the logs `rank-<n>.log`, which all nodes share. place: where this rank runs, in words.
    """

    silence_s: float
    stuck_s: float
    logs: Path
    place: str


class Watch:
    """The watch of one rank; all ranks construct it together after the process group is set up.
    The first rank of a node starts its aggregator.
    end: called with the report on the rank that reports, with None on others; it does not return.
    """

    def __init__(
        self,
        world: World,
        position: Position,
        options: WatchOptions,
        end: Callable[[FailureReport | None], None],
    ) -> None:
        self.world, self.position, self.options = world, position, options
        self.limits = WatchLimits(
            world_size=world.world_size,
            silence_s=options.silence_s,
            stuck_s=options.stuck_s,
            logs=options.logs.absolute(),
        )
        self._end = end
        self._process: subprocess.Popen[bytes] | None = None
        problem = self._begin()
        problems: list[Any] = [None] * world.world_size
        dist.all_gather_object(problems, problem, group=host_group())
        if found := [p for p in problems if p]:
            self._abandon()
            raise UserError(
                f"{found[0]}; ranks watch each other through a port of rank 0's node: open it, or "
                f"set training.heartbeat_s = 0 to train without a watch"
            )
        self._reporter.start()

    def raised(self, error: BaseException) -> None:
        """Report this rank's failure and wait to be ended; return if nobody does."""
        self._reporter.raised(error)

    def close(self) -> None:
        """Say goodbye; all ranks close at the end of a run. The node's first rank waits for its
        aggregator, which ends when all its ranks, and on rank 0's node all ranks, said goodbye."""
        self._reporter.goodbye()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.options.silence_s)
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _begin(self) -> str:
        """Meet the other ranks, start this node's aggregator and report to it; the problem if that
        fails."""
        world, limits = self.world, self.limits
        sockets = self._sockets() if world.local_rank == 0 else None
        leader = None
        if sockets is not None:
            ports = [each.getsockname()[1] for each in sockets]
            token, failure_id = secrets.token_hex(16), secrets.token_hex(4)
            leader = Leader(ports[0], (_host_of(world), ports[1]), token, failure_id)
        said: list[Any] = [None] * world.world_size
        # If the launcher gives no node numbers, host names distinguish nodes.
        own = Attendance((world.node_rank, socket.gethostname()), leader)
        dist.all_gather_object(said, own, group=host_group())
        try:
            layout = WatchLayout.of(said)
            if sockets is not None:
                node = layout.node_of(world.rank)
                check_files(len(layout.nodes), world.local_world_size, node)
                self._process = aggregator.start(layout.job(node, limits, sockets))
            reporting = layout.reporting(world.rank, self.options.place)
            self._reporter = Reporter(reporting, self.position, limits, self._end)
        except (OSError, LookupError) as error:
            return f"rank {world.rank} cannot join the watch ({error})"
        finally:
            for each in sockets or ():
                each.close()
        return ""

    def _sockets(self) -> tuple[socket.socket, socket.socket]:
        """Sockets of an aggregator for its node's ranks, and for other nodes should it be root."""
        is_local = self.world.local_world_size == self.world.world_size
        local = socket.create_server(("127.0.0.1", 0), backlog=4096)
        host = "127.0.0.1" if is_local else ""
        return local, socket.create_server((host, 0), backlog=4096)

    def _abandon(self) -> None:
        if hasattr(self, "_reporter"):
            self._reporter.drop()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()


def check_files(num_nodes: int, num_ranks: int, node: int) -> None:
    """The root has a socket for every node, and its standby may; OSError beyond `ulimit -Hn`."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = num_nodes + num_ranks + _OTHER_FILES
    if node < 2 and most != resource.RLIM_INFINITY and most < needed:
        raise OSError(
            f"the watch of {num_nodes} nodes needs {needed} open files, and `ulimit -Hn` is "
            f"{most}: raise it"
        )


def _host_of(world: World) -> str:
    """The address of this node for other nodes: of the interface that leads to rank 0's node."""
    if world.local_world_size == world.world_size:
        return "127.0.0.1"
    if world.node_rank == 0 and world.master_address:
        return world.master_address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((world.master_address, 1))
            return probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
