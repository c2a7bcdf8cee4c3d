"""Measures the load of the ranks' watch at 1,000 and 10,000 ranks, with simulated nodes.

`python -m experiments.watch_load` starts the real aggregators of two nodes (the root, and one more)
and speaks for their ranks and for all other nodes over loopback, at the default heartbeat of 60 s.
Then a rank of the second node dies, or falls silent, and all nodes answer with every rank's stack.
`before` is the design that aggregators replaced, fed by as many ranks. Processor time is that of
the process that listens, read from the kernel, on which other work has little effect.
"""

import argparse
import asyncio
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.pages import How, Table, show, this_machine, write_results
from wlb.launch import aggregator
from wlb.launch.layout import Attendance, Leader, WatchLayout
from wlb.launch.node import Uplink
from wlb.launch.root import WatchLimits
from wlb.launch.wire import END, STACK, introduction, pack

EACH = 8
SILENCE_S = 60.0
STACK_LINES = [f'  File "/opt/wlb/wlb/parallel/pipeline.py", line {i}, in step' for i in range(20)]
PLACE = "tp 1, cp 3, pp 2, dp 31; process 1234567 on gpu-node-0123, cuda:5"


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@dataclass
class Reached:
    """Times at which the simulated nodes were asked for stacks, got the report, and were told to
    end."""

    messages: int = 0
    sent_bytes: int = 0
    stack_s: float = 0.0
    report_s: float = 0.0
    end_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Speaker:
    """Reports for ranks over one connection: for all of a node to the root, or for one to its
    node."""

    def __init__(self, ranks: Sequence[int], address: tuple[str, int], token: str, name: str):
        self.ranks, self.address, self.beats = ranks, address, 0
        first = introduction(token, {rank: PLACE for rank in ranks}, name=name)
        self.reached = Reached()
        self.uplink = Uplink(first, self.obey, asyncio.Event())

    async def join(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.uplink, *self.address)
        await self.uplink.welcomed.wait()

    def obey(self, message: Any) -> None:
        now = time.monotonic()
        if message == STACK:
            self.reached.stack_s = now
            for rank in self.ranks:
                self.send({rank: {"at": self.at(), "stack": STACK_LINES}})
        elif message == END:
            self.reached.end_s = now
            self.reached.ended.set()
            self.uplink.close()
        else:
            self.reached.report_s = now
            self.send({message["of"]: {"has_report": True, "has_written": True}})

    def at(self) -> list[Any]:
        step, cell = self.beats, self.beats % 16
        return [1000 + step, "computing", False, 40_000 + 97 * step, ["backward", 3, cell]]

    def send(self, updates: dict[int, Any]) -> None:
        self.reached.messages += 1
        self.reached.sent_bytes += len(pack(updates))
        self.uplink.send(updates)

    async def beat(self, beat_s: float, phase: float) -> None:
        await asyncio.sleep(beat_s * phase)
        while not (self.reached.ended.is_set() or self.uplink.lost.is_set()):
            self.beats += 1
            self.send({rank: {"at": self.at()} for rank in self.ranks})
            await asyncio.sleep(beat_s)


@dataclass
class Loads:
    """Measurements of one size: shares of a core, and seconds from a rank's loss."""

    root_share: float
    node_share: float
    root_mib: float
    node_mib: float
    messages_per_s: float
    bytes_per_s: float
    beat_s: float
    end_processor_s: float
    asked_s: float
    reported_s: float
    ended_s: float


def layout_of(num_nodes: int) -> tuple[WatchLayout, list[tuple[socket.socket, socket.socket]]]:
    sockets = [
        tuple(socket.create_server(("127.0.0.1", 0), backlog=4096) for _ in range(2))
        for _ in range(2)
    ]
    said: list[Attendance] = []
    for node in range(num_nodes):
        ports = [each.getsockname()[1] for each in sockets[min(node, 1)]]
        leader = Leader(ports[0], ("127.0.0.1", ports[1]), secrets.token_hex(16), "failure")
        said += [Attendance((node, f"n{node}"), None if i else leader) for i in range(EACH)]
    return WatchLayout.of(said), sockets  # pyright: ignore[reportReturnType]


async def measure(num_nodes: int, window_s: float, logs: Path, *, dies: bool) -> Loads:
    """Runs the watch of `num_nodes` nodes for `window_s`, then loses a rank of the second one.
    logs: a folder for its reports."""
    layout, sockets = layout_of(num_nodes)
    limits = WatchLimits(
        world_size=num_nodes * EACH, silence_s=SILENCE_S, stuck_s=3600.0, logs=logs
    )
    real = [aggregator.start(layout.job(node, limits, sockets[node])) for node in range(2)]
    for each in (*sockets[0], *sockets[1]):
        each.close()
    token, root = layout.leaders[0].token, layout.roots[0]
    ranks = [
        Speaker([rank], ("127.0.0.1", layout.leaders[node].port), token, "")
        for node in range(2)
        for rank in layout.nodes[node]
    ]
    nodes = [Speaker(own, root, token, f"process {i}") for i, own in enumerate(layout.nodes)][2:]
    await asyncio.gather(*(speaker.join() for speaker in (*ranks, *nodes)))
    beats = [
        asyncio.ensure_future(s.beat(beat_s, i / len(speakers)))
        for speakers, beat_s in ((ranks, limits.rank_beat_s), (nodes, limits.node_beat_s))
        for i, s in enumerate(speakers)
    ]
    await asyncio.sleep(limits.node_beat_s)
    began, before = time.monotonic(), [processor_s(process.pid) for process in real]
    count = sum(s.reached.messages for s in nodes), sum(s.reached.sent_bytes for s in nodes)
    await asyncio.sleep(window_s)
    took = time.monotonic() - began
    shares = [(processor_s(p.pid) - b) / took for p, b in zip(real, before, strict=True)]
    memory = [resident_mib(process.pid) for process in real]
    messages = sum(s.reached.messages for s in nodes) - count[0]
    sent = sum(s.reached.sent_bytes for s in nodes) - count[1]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = sum(processor_s(process.pid) for process in real)
    lost = time.monotonic()
    beats[EACH].cancel()
    if dies:
        ranks[EACH].uplink.close()
    else:
        ranks[EACH].send = lambda updates: None  # type: ignore[method-assign]
    left = [s for s in (*ranks, *nodes) if s is not ranks[EACH]]
    await asyncio.gather(*(speaker.reached.ended.wait() for speaker in left))
    ranks[EACH].uplink.close()
    for task in beats:
        task.cancel()
    for process in real:
        await asyncio.to_thread(process.wait)
        process.stdin.close()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = now.ru_utime + now.ru_stime - ended.ru_utime - ended.ru_stime
    # Scale up for the two nodes whose messages are not counted here.
    scale = num_nodes / len(nodes)
    return Loads(
        shares[0],
        shares[1],
        memory[0],
        memory[1],
        scale * messages / took,
        scale * sent / took,
        limits.node_beat_s,
        total - spent,
        max(s.reached.stack_s for s in left) - lost,
        max(s.reached.report_s for s in left) - lost,
        max(s.reached.end_s for s in left) - lost,
    )


async def speak_before(port: int, rank: int, beat_s: float, phase: float, sent: list[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(beat_s * phase)
    step = 0
    while not writer.is_closing():
        step += 1
        at = {"cell": ["backward", 3, step % 16], "doing": "computing", "is_slow": False}
        message = {
            "token": "0123456789abcdef",
            "rank": rank,
            "place": PLACE,
            "at": {**at, "num_changes": 40_000 + 97 * step, "step": 1000 + step},
            "failure": None,
            "stack": None,
            "bye": False,
        }
        line = json.dumps(message).encode() + b"\n"
        writer.write(line)
        sent[0] += 1
        sent[1] += len(line)
        await reader.readline()
        await asyncio.sleep(beat_s)


def before_beat_s(num_ranks: int) -> float:
    """Returns the seconds between messages of a rank in the earlier design."""
    return min(max(0.1, num_ranks / 1000), SILENCE_S / 4)


async def measure_before(num_ranks: int, window_s: float) -> tuple[float, float, float, float]:
    """Returns share of a core, MiB, messages and bytes a second of the earlier design."""
    beat_s = before_beat_s(num_ranks)
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.watch_load.before", str(beat_s)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    port, sent = int(process.stdout.readline()), [0, 0]
    tasks = [
        asyncio.ensure_future(speak_before(port, rank, beat_s, rank / num_ranks, sent))
        for rank in range(num_ranks)
    ]
    await asyncio.sleep(2 * beat_s)
    began, before, count = time.monotonic(), processor_s(process.pid), list(sent)
    await asyncio.sleep(window_s)
    took = time.monotonic() - began
    share = (processor_s(process.pid) - before) / took
    memory = resident_mib(process.pid)
    rates = [(now - then) / took for now, then in zip(sent, count, strict=True)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    process.kill()
    process.wait()
    process.stdout.close()
    return share, memory, rates[0], rates[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="80 ranks for 10 s, no silent rank, write nothing"
    )
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sizes, window_s = ((80,), 10.0) if options.quick else ((1000, 10_000), 40.0)
    loads: list[list[Any]] = []
    times: list[list[Any]] = []
    for size in sizes:
        share, mib, messages, sent = asyncio.run(measure_before(size, window_s))
        due = size / before_beat_s(size)
        rates = due, messages, sent / 1e3, 1e6 * share / messages, 100 * share / messages * due
        loads.append([size, "before: thread of rank 0", *rates, mib])
        for dies in (True,) if options.quick else (True, False):
            with tempfile.TemporaryDirectory(prefix="watch-load-") as name:
                got = asyncio.run(measure(size // EACH, window_s, Path(name), dies=dies))
            if dies:
                due = size / EACH / got.beat_s
                each = got.root_share / got.messages_per_s
                rates = got.messages_per_s, got.bytes_per_s / 1e3, 1e6 * each, 100 * each * due
                loads.append([size, "root", due, *rates, got.root_mib])
                share = 100 * got.node_share
                loads.append([size, "node of 8", None, None, None, None, share, got.node_mib])
            what = "dies" if dies else "falls silent"
            seconds = got.asked_s, got.reported_s, got.ended_s, got.end_processor_s
            times.append([size, what, *seconds])
    tables = [
        Table(
            name="load",
            title="Load of the process that listens",
            columns=(
                *("ranks", "where", "messages/s due", "messages/s", "kB/s"),
                *("us a message", "% of a core, all due", "MiB"),
            ),
            rows=loads,
            formats={"ranks": ",d", "messages/s due": ",.0f", "messages/s": ",.0f"}
            | {"kB/s": ",.0f", "us a message": ".0f"}
            | {"% of a core, all due": ".2f", "MiB": ".0f"},
            note=(
                "Simulated ranks share the cores with other work and may come late, so less was "
                "sent than is due; processor time per message is scaled to what is due. Before, it "
                "was taken from rank 0's training, with its interpreter's lock."
            ),
        ),
        Table(
            name="end",
            title="Seconds from the loss of a rank",
            columns=(
                *("ranks", "a rank", "until all are asked for stacks", "report", "all told"),
                "processor s",
            ),
            rows=times,
            formats={"ranks": ",d", "until all are asked for stacks": ".1f"}
            | {"report": ".1f", "all told": ".1f", "processor s": ".2f"},
            note=(
                "A silent rank is lost after 60 s; 2 s more are given to ranks that die with it. "
                "`processor s`: of both real aggregators from the loss to their end. The rest is "
                "waiting, and one process that speaks for all nodes and writes all stacks."
            ),
        ),
    ]
    for table in tables:
        show(table)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Load of the watch",
        how=How.MEASURED,
        profile=f"processor time on {this_machine()}.",
        text=(
            "Real aggregators of two nodes, all other nodes simulated over loopback, 8 ranks a "
            f"node, `training.heartbeat_s` {SILENCE_S:g}, positions of all ranks new at each beat, "
            f"{window_s:g} s a row. Other work shared the machine's cores, so seconds from a loss "
            "are upper bounds."
        ),
        tables=tables,
    )


if __name__ == "__main__":
    main()
