"""The planner in its own torch-free process, some steps ahead of training; one process a node.

It listens on a local socket; each local rank asks for step after step and gets `(StepPlan,
PipelinePlan of its pipeline)`. Every node plans the whole step, so only the digest is exchanged.
A planning thread instead raised the training thread's launch cost per operation from 3 us to 4 ms.
`PlannerProcess` runs `python -m wlb.planner.service`, which reads its job as a pickle from standard
input, from the parent process only.
"""

import contextlib
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from wlb.plan import NO_CHANGES, PipelinePlan, PlannerState, PriceSchedule, StepPlan, UserError
from wlb.planner.compose import Planner

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_WATCH_S = 1.0
_LONGEST = 100
_BAD_INPUT = f"{UserError.__module__}.{UserError.__qualname__}: "
"""Beginning of the last line of a UserError's traceback."""
_DIED = "the planner process of this node has died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a planner process listens: a socket path and the key that clients must know."""

    path: str
    key: bytes

    @classmethod
    def new(cls, token: str = "", node: int = 0, folder: str = "") -> "Address":
        """The address for a node of the run that drew `token` (empty = draw one here).

        folder: its owner removes it when the run is over, however the run ends.
        """
        token = token or secrets.token_hex(16)
        if folder and len(folder) < _LONGEST - len("/planner-9999/socket"):
            return cls(path=f"{folder}/planner-{node}/socket", key=token.encode())
        name = f"wlb-planner-{token[:16]}-{node}"
        # A socket's path has at most 107 bytes; a batch job's TMPDIR can be longer.
        roots = (tempfile.gettempdir(), "/tmp")
        path = min((f"{root}/{name}/socket" for root in roots), key=lambda p: len(p) > _LONGEST)
        return cls(path=path, key=token.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningJob:
    """Job of a planner process: make(*args) builds the planner inside the process."""

    make: Callable[..., Planner]
    args: tuple[Any, ...]
    state: PlannerState | None
    address: Address
    ahead: int
    num_clients: int


class PlanningError(RuntimeError):
    """A step could not be planned, or the process that plans is gone."""

    @classmethod
    def of(cls, trace: str) -> "PlanningError":
        """Return one line for bad input, with its traceback as a note; else the traceback."""
        last = trace.rstrip().rpartition("\n")[2]
        if not last.startswith(_BAD_INPUT):
            return cls(f"planning failed:\n{trace}")
        error = cls(f"planning failed: {last.removeprefix(_BAD_INPUT)}")
        error.add_note(trace)
        return error


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
        job = PlanningJob(
            make=make,
            args=args,
            state=state,
            address=self.address,
            ahead=ahead,
            num_clients=num_clients,
        )
        with _held_back():
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
            shutil.rmtree(self._folder, ignore_errors=True)
            raise PlanningError(
                f"the planner process ended with {self._process.wait()} at its start"
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class PlanClient:
    """One rank's connection: steps in order, with a look at those that follow.

    A step is asked for when it is about to be received, never earlier: the single server then never
    blocks on a rank that is not reading. It plans ahead by itself. needs_state: whether plans come
    with the planner's state, which holds every waiting document.
    """

    def __init__(self, address: Address, pipeline: int, *, needs_state: bool = True) -> None:
        self._connection: Connection[Any, Any] = Client(address.path, authkey=address.key)
        self._received: list[tuple[StepPlan, PipelinePlan]] = []
        self._ended = False
        self._error: PlanningError | None = None
        self._connection.send((pipeline, needs_state))

    def next(self) -> tuple[StepPlan, PipelinePlan] | None:
        """The next step, or None after the last one. PlanningError if it could not be planned."""
        self._fill(1)
        if self._error is not None and not self._received:
            raise self._error
        return self._received.pop(0) if self._received else None

    def peek(self, steps_ahead: int) -> tuple[StepPlan, PipelinePlan] | None:
        """The step `steps_ahead` after the last one `next` gave; None past the end, and where it
        could not be planned: steps before that one still run."""
        self._fill(steps_ahead)
        return self._received[steps_ahead - 1] if len(self._received) >= steps_ahead else None

    def announce(self, prices: PriceSchedule) -> None:
        """Have the last change of `prices` planned with, from its step on. Does not wait.

        Every client of the process announces the same, before it asks for a step that the change
        holds for: connections are read in any order, but each in its own.
        """
        if self._received and self._received[-1][0].step >= prices.last_step:
            raise ValueError(f"prices for step {prices.last_step} come after its plan was received")
        try:
            self._connection.send(prices)
        except ConnectionError:
            raise PlanningError(_DIED) from None

    def close(self) -> None:
        self._connection.close()

    def _fill(self, count: int) -> None:
        while len(self._received) < count and not self._ended:
            try:
                self._connection.send("next")
                item = self._connection.recv()
            except (EOFError, ConnectionError):
                raise PlanningError(_DIED) from None
            if isinstance(item, str):
                self._error = PlanningError.of(item)
            if item is None or isinstance(item, str):
                self._ended = True
            else:
                self._received.append(item)


class PlanServer:
    """Answers clients; plans one more step whenever nobody asks.

    plans: steps that some client does not have yet, from step index `dropped` on. The last one is
    None at the end of data, or the text of an error; steps planned before it still run. before: the
    state that they were planned from.
    """

    def __init__(self, job: PlanningJob, listener: Listener) -> None:
        self.job = job
        self.planner: Planner | None = None
        self.state: PlannerState | None = job.state
        self.before: PlannerState | None = job.state
        self.prices = NO_CHANGES if job.state is None else job.state.prices
        self.plans: list[StepPlan | str | None] = []
        self.dropped = 0
        self.shards: dict[tuple[int, int], PipelinePlan] = {}
        self.clients: dict[Connection[Any, Any], tuple[int, bool]] = {}
        self.cursor: dict[Connection[Any, Any], int] = {}
        for _ in range(job.num_clients):
            try:
                connection = listener.accept()
                self.clients[connection] = connection.recv()
                self.cursor[connection] = 0
            except (EOFError, ConnectionError, AuthenticationError):
                # That rank is gone; its launcher ends the others.
                continue

    def serve(self) -> None:
        while self.cursor:
            made = self.dropped + len(self.plans)
            idle = self._has_ended() or made >= max(self.cursor.values()) + self.job.ahead
            ready = wait(list(self.cursor), timeout=None if idle else 0)
            if not ready:
                self._plan_one()
            for connection in ready:
                self._answer(connection)  # pyright: ignore[reportArgumentType]

    def _answer(self, connection: "Connection[Any, Any]") -> None:
        try:
            asked = connection.recv()
            if isinstance(asked, PriceSchedule):
                self._change_prices(asked)
                return
            index = self.cursor[connection]
            while self.dropped + len(self.plans) <= index and not self._has_ended():
                self._plan_one()
            plan = self.plans[min(index - self.dropped, len(self.plans) - 1)]
            if isinstance(plan, StepPlan):
                pipeline, needs_state = self.clients[connection]
                sent = plan if needs_state else plan.without_state()
                connection.send((sent, self.shards[plan.step, pipeline]))
            else:
                connection.send(plan)
            self.cursor[connection] = index + 1
        except (EOFError, ConnectionError):
            del self.cursor[connection]
        self._forget()

    def _plan_one(self) -> None:
        try:
            if self.planner is None:
                self.planner = self.job.make(*self.job.args)
            state = self.state or self.planner.start().with_prices(self.prices)
            plan = self.planner.next(state)
            if plan is not None:
                self.state = plan.state
                for pipeline in sorted({pipeline for pipeline, _ in self.clients.values()}):
                    self.shards[plan.step, pipeline] = self.planner.shard(plan, pipeline)
            self.plans.append(plan)
        except Exception:
            self.plans.append(traceback.format_exc())

    def _change_prices(self, prices: PriceSchedule) -> None:
        """Drop plans of steps that a change holds for; they are planned again when asked for."""
        if prices == self.prices:  # another rank said so already
            return
        self.prices = prices
        kept = [p for p in self.plans if isinstance(p, StepPlan) and p.step < prices.last_step]
        state = kept[-1].state if kept else self.before
        made = self.dropped + len(kept)
        if self._has_ended() and self.state and self.state.next_step < prices.last_step:
            return  # what ended before the change stays ended
        if max(self.cursor.values(), default=0) > made:
            self.plans = [*kept, f"a rank has a plan of step {prices.last_step} at other prices"]
            return
        self._keep(kept)
        self.state = None if state is None else state.with_prices(prices)

    def _keep(self, kept: list[StepPlan]) -> None:
        steps = {plan.step for plan in kept}
        self.plans = list(kept)
        self.shards = {k: v for k, v in self.shards.items() if k[0] in steps}

    def _has_ended(self) -> bool:
        return bool(self.plans) and not isinstance(self.plans[-1], StepPlan)

    def _forget(self) -> None:
        """Drop plans that every client has."""
        while self.cursor and len(self.plans) > 1 and min(self.cursor.values()) > self.dropped:
            plan = self.plans.pop(0)
            self.dropped += 1
            assert isinstance(plan, StepPlan)
            self.before = plan.state
            self.shards = {k: v for k, v in self.shards.items() if k[0] != plan.step}


@contextlib.contextmanager
def _held_back() -> Generator[None]:
    """Block stop signals in processes started inside this context, until they ignore them. Slurm
    signals all processes of a step, and a terminal all of a job, but ranks save first and then end
    the planner themselves.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    job: PlanningJob = pickle.load(sys.stdin.buffer)
    watch = threading.Thread(target=_end_with, args=(os.getppid(), job.address), daemon=True)
    watch.start()
    with Listener(job.address.path, authkey=job.address.key) as listener:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        PlanServer(job, listener).serve()
    shutil.rmtree(Path(job.address.path).parent, ignore_errors=True)


def _end_with(parent: int, address: Address) -> None:
    """End this process when the rank that started it is gone, because no other rank may connect
    then."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    shutil.rmtree(Path(address.path).parent, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    _main()
