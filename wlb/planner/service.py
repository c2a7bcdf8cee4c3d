"""The planner in its own torch-free process, some steps ahead of training.

One process a node. It listens on a local socket; each local rank asks for step after step and gets
`(StepPlan, PipelinePlan of its pipeline)`. Every node plans the whole step itself (plans are
deterministic), so nothing is exchanged between nodes but the digest.

A thread instead of a process was measured and rejected: under the GIL a planning thread raised the
training thread's launch cost per operation from 3 us to 4 ms.

Run by `start` as `python -m wlb.planner.service`; what it is told comes as a pickle on its standard
input, from the parent process only.
"""

import os
import pickle
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from wlb.plan import PipelinePlan, PlannerState, StepPlan
from wlb.planner.compose import Planner

_WATCH_S = 1.0
_DIED = "the planner process of this node has died; its own output, above, says why"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a planner process listens: a socket path and the key that clients must know."""

    path: str
    key: bytes

    @classmethod
    def new(cls, token: str = "", node: int = 0) -> "Address":
        """The address for a node of the run that drew `token` (empty = draw one here)."""
        token = token or secrets.token_hex(16)
        folder = Path(tempfile.gettempdir(), f"wlb-planner-{token[:16]}-{node}")
        return cls(path=str(folder / "socket"), key=token.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a planner process is told. make(*args) builds the planner inside the process."""

    make: Callable[..., Planner]
    args: tuple[Any, ...]
    state: PlannerState | None
    address: Address
    ahead: int
    num_clients: int


class PlannerProcess:
    """A running planner process; `close` ends it. It also ends when its last client leaves."""

    def __init__(
        self,
        make: Callable[..., Planner],
        args: tuple[Any, ...],
        *,
        state: PlannerState | None,
        ahead: int,
        num_clients: int,
        address: Address | None = None,
    ) -> None:
        self.address = address or Address.new()
        self._folder = Path(self.address.path).parent
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        job = Job(
            make=make,
            args=args,
            state=state,
            address=self.address,
            ahead=ahead,
            num_clients=num_clients,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wlb.planner.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(pickle.dumps(job))
        self._process.stdin.close()
        if self._process.stdout.readline() != b"listening\n":
            raise RuntimeError(
                f"the planner process ended with {self._process.wait()} at its start"
            )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class PlanClient:
    """One rank's connection: asks for steps in order, up to `ahead` of them at a time.

    `next()` returns the next step, or None after the last one; `peek(n)` the digest pair of the
    step n ahead of the last returned one, if there is one.
    """

    def __init__(self, address: Address, pipeline: int, *, ahead: int) -> None:
        self._connection: Connection[Any, Any] = Client(address.path, authkey=address.key)
        self._pipeline = pipeline
        self._received: list[tuple[StepPlan, PipelinePlan]] = []
        self._pending = 0
        self._ahead = ahead
        self._ended = False
        self._connection.send(pipeline)
        self._ask()

    def next(self) -> tuple[StepPlan, PipelinePlan] | None:
        self._fill(1)
        if not self._received:
            return None
        out = self._received.pop(0)
        self._ask()
        return out

    def peek(self, steps_ahead: int) -> tuple[StepPlan, PipelinePlan] | None:
        self._fill(steps_ahead)
        return self._received[steps_ahead - 1] if len(self._received) >= steps_ahead else None

    def close(self) -> None:
        self._connection.close()

    def _ask(self) -> None:
        while not self._ended and len(self._received) + self._pending < self._ahead:
            try:
                self._connection.send("next")
            except ConnectionError:
                raise RuntimeError(_DIED) from None
            self._pending += 1

    def _fill(self, count: int) -> None:
        while len(self._received) < count and self._pending:
            try:
                item = self._connection.recv()
            except (EOFError, ConnectionError):
                raise RuntimeError(_DIED) from None
            self._pending -= 1
            if isinstance(item, str):
                raise RuntimeError(f"planning failed:\n{item}")
            if item is None:
                self._ended = True
            else:
                self._received.append(item)


class _Server:
    """Answers clients in order; plans one more step whenever nobody is waiting."""

    def __init__(self, job: Job, planner: Planner, listener: Listener) -> None:
        self.planner, self.ahead = planner, job.ahead
        self.state = job.state or planner.start()
        self.plans: list[StepPlan | None] = []
        self.dropped = 0
        self.shards: dict[tuple[int, int], PipelinePlan] = {}
        self.clients: dict[Connection[Any, Any], int] = {}
        self.cursor: dict[Connection[Any, Any], int] = {}
        for _ in range(job.num_clients):
            connection = listener.accept()
            self.clients[connection] = connection.recv()
            self.cursor[connection] = 0

    def serve(self) -> None:
        while self.cursor:
            idle = self._is_far_enough()
            ready = wait(list(self.cursor), timeout=None if idle else 0)
            if not ready:
                self._plan_one()
            for connection in ready:
                self._answer(connection)  # pyright: ignore[reportArgumentType]

    def _answer(self, connection: "Connection[Any, Any]") -> None:
        try:
            connection.recv()
            index = self.cursor[connection]
            while self.dropped + len(self.plans) <= index and not self._has_ended():
                self._plan_one()
            plan = self.plans[index - self.dropped] if not self._past_end(index) else None
            connection.send(None if plan is None else (plan, self._shard(plan, connection)))
            self.cursor[connection] = index + 1
        except (EOFError, ConnectionError):
            del self.cursor[connection]
        self._forget()

    def _shard(self, plan: StepPlan, connection: "Connection[Any, Any]") -> PipelinePlan:
        place = (plan.step, self.clients[connection])
        if place not in self.shards:
            self.shards[place] = self.planner.shard(plan, place[1])
        return self.shards[place]

    def _plan_one(self) -> None:
        plan = self.planner.next(self.state)
        self.plans.append(plan)
        if plan is not None:
            self.state = plan.state
            for pipeline in sorted(set(self.clients.values())):
                self.shards[plan.step, pipeline] = self.planner.shard(plan, pipeline)

    def _has_ended(self) -> bool:
        return bool(self.plans) and self.plans[-1] is None

    def _past_end(self, index: int) -> bool:
        return index - self.dropped >= len(self.plans)

    def _is_far_enough(self) -> bool:
        made = self.dropped + len(self.plans)
        return self._has_ended() or made >= max(self.cursor.values()) + self.ahead

    def _forget(self) -> None:
        """Drop plans that every client has."""
        while self.cursor and self.plans and min(self.cursor.values()) > self.dropped:
            plan = self.plans[0]
            if plan is None:
                return
            self.plans.pop(0)
            self.dropped += 1
            self.shards = {k: v for k, v in self.shards.items() if k[0] != plan.step}


def _main() -> None:
    job: Job = pickle.load(sys.stdin.buffer)
    watch = threading.Thread(target=_end_with, args=(os.getppid(), job.address), daemon=True)
    watch.start()
    with Listener(job.address.path, authkey=job.address.key) as listener:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        server: _Server | None = None
        try:
            planner = job.make(*job.args)
            server = _Server(job, planner, listener)
            server.serve()
        except Exception:
            _report(job, listener, server, traceback.format_exc())
    shutil.rmtree(Path(job.address.path).parent, ignore_errors=True)


def _end_with(parent: int, address: Address) -> None:
    """End when the rank that started this process is gone: nobody may connect any more."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    shutil.rmtree(Path(address.path).parent, ignore_errors=True)
    os._exit(1)


def _report(job: Job, listener: Listener, server: _Server | None, text: str) -> None:
    """Every client gets the traceback as its next answer."""
    connections = list(server.cursor) if server else []
    if server is None:
        for _ in range(job.num_clients):
            connection = listener.accept()
            connection.recv()
            connections.append(connection)
    for connection in connections:
        connection.send(text)


if __name__ == "__main__":
    _main()
