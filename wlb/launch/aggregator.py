"""The watch's process of one node, `python -m wlb.launch.aggregator`; local rank 0 starts it.

It imports no torch. On the first node it is the root as well, on the second the root's standby. Its
job comes as a line of JSON on standard input, which stays open as long as the rank that started it
lives; listening sockets are inherited. It ends with its ranks; signals to a job leave it alone.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wlb.launch.failure import AggregatorLoss
from wlb.launch.node import NodeAggregator
from wlb.launch.root import RootAggregator, WatchLimits
from wlb.launch.wire import Listener, Strangers, admit

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Launchers send these signals to all processes of a job; the ranks decide how to react."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorJob:
    """token: of the run. ranks: of this node. roots: addresses of the root and its standby.
    root_name, root_ranks: of the root's node. is_root, is_standby: this process is that.
    listener, root_listener: file descriptors; the second is -1 on other nodes. num_nodes: of the
    run. Others: see `WatchLimits`."""

    token: str
    ranks: list[int]
    roots: list[tuple[str, int]]
    root_name: str
    root_ranks: list[int]
    is_root: bool
    is_standby: bool
    listener: int
    root_listener: int
    num_nodes: int
    world_size: int
    silence_s: float
    stuck_s: float
    logs: str

    @property
    def limits(self) -> WatchLimits:
        return WatchLimits(
            world_size=self.world_size,
            silence_s=self.silence_s,
            stuck_s=self.stuck_s,
            logs=Path(self.logs),
        )


def start(job: AggregatorJob) -> "subprocess.Popen[bytes]":
    """Start the process; it ends with the ranks, or with this process if no rank came yet."""
    descriptors = tuple(fd for fd in (job.listener, job.root_listener) if fd >= 0)
    # The new process inherits the blocked signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "wlb.launch.aggregator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
    process.stdin.flush()
    return process


def process_name(pid: int) -> str:
    return f"process {pid} on {socket.gethostname()}"


async def serve(job: AggregatorJob) -> None:
    """Be the aggregator of a node, and its root or standby, until the run ends."""
    loop = asyncio.get_running_loop()
    limits = job.limits
    root = None
    if job.is_root or job.is_standby:
        root = RootAggregator(limits, is_standby=job.is_standby)

    def root_lost(is_silent: bool) -> None:
        if root is not None and job.is_standby:
            root.take_over(
                AggregatorLoss(ranks=tuple(job.root_ranks), name=job.root_name, is_silent=is_silent)
            )

    node = NodeAggregator(
        limits,
        token=job.token,
        ranks=job.ranks,
        roots=job.roots,
        name=process_name(os.getpid()),
        on_root_lost=root_lost,
    )
    watching, doors = None, [_door(job, job.listener, node, num_expected=len(job.ranks))]
    if root is not None:
        # Ranks of this node come as well where its aggregator is lost.
        num = job.num_nodes + len(job.ranks)
        doors.append(_door(job, job.root_listener, root, num_expected=num))
        watching = asyncio.ensure_future(root.run())
    await loop.connect_read_pipe(lambda: _Parent(node), sys.stdin)
    await node.run()
    if root is not None and watching is not None:
        while not (await asyncio.wait([watching], timeout=limits.check_s))[0]:
            if not root.is_active or (node.is_parent_gone and not root.members):
                watching.cancel()
    for door in doors:
        door.cancel()


def _door(
    job: AggregatorJob, descriptor: int, listener: Listener, *, num_expected: int
) -> "asyncio.Task[None]":
    listening = socket.socket(fileno=descriptor)
    strangers = Strangers(num_expected)
    return asyncio.ensure_future(admit(listening, job.token, listener, strangers))


class _Parent(asyncio.Protocol):
    """The pipe from the rank that started this process."""

    def __init__(self, node: NodeAggregator) -> None:
        self._node = node

    def connection_lost(self, exc: Exception | None) -> None:
        self._node.parent_gone()


def _main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # A root has a socket for each node.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    job: dict[str, Any] = json.loads(sys.stdin.buffer.raw.readline())  # pyright: ignore
    asyncio.run(serve(AggregatorJob(**job)))


if __name__ == "__main__":
    _main()
