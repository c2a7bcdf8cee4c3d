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
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from typing import Any

from wlb.data.leftovers import made_and_held, own_name, sweep
from wlb.plan import (
    NO_CHANGES,
    PipelinePlan,
    PlannerState,
    PriceSchedule,
    RunError,
    StepPlan,
    UserError,
)
from wlb.planner.compose import Planner

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_BEAT_S = 0.25
"""Seconds between a planner process's signs of life."""
_LONGEST = 100
_BAD_INPUT = f"{UserError.__module__}.{UserError.__qualname__}: "
"""Beginning of the last line of a UserError's traceback."""
_DIED = "the planner process of this node has died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a planner process listens: a socket path and the key that clients must know."""

    path: str
    key: bytes

    @property
    def folder(self) -> Path:
        """Of the socket; nobody else can read it."""
        return Path(self.path).parent

    @property
    def alive(self) -> Path:
        """A file that has the number of the process, which touches it as long as it runs."""
        return self.folder / "alive"

    @classmethod
    def new(cls, token: str = "", node: int = 0, folder: str = "") -> "Address":
        """The address for a node of the run that drew `token` (empty = draw one here).

        folder: its owner removes it when the run is over, however the run ends.
        """
        token = token or secrets.token_hex(16)
        if folder and len(folder) < _LONGEST - len("/planner-9999/socket"):
            return cls(path=f"{folder}/planner-{node}/socket", key=token.encode())
        own = own_name(f"planner.{token[:16]}.{node}")
        return cls(path=str(own / "socket"), key=token.encode())


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
        self._folder = self.address.folder
        sweep()
        self._held = made_and_held(self._folder)
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
            self._remove_folder()
            raise PlanningError(
                f"the planner process ended with {self._process.wait()} at its start"
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)


class PlannerLost(PlanningError, RunError):
    """The process that plans has died or is stopped."""


class SignsOfLife:
    """Tells a planner process that computes for long from one that is stopped.

    Its thread touches a file; code outside of Python may hold that thread up, but takes processor
    time. silence_s: without a sign for so long it counts as stopped; 0 = never.
    """

    def __init__(self, address: Address, silence_s: float) -> None:
        self._file, self.silence_s = address.alive, silence_s
        self._last: tuple[int, int] | None = None
        self._sign_s = self._looked_s = 0.0

    @property
    def look_s(self) -> float | None:
        """Seconds between two looks of one who waits; None = no look."""
        return min(1.0, self.silence_s / 10) if self.silence_s else None

    def begin(self) -> None:
        """Begin to wait for an answer."""
        self._sign_s = self._looked_s = time.monotonic()
        self._last = None

    def look(self) -> None:
        """PlannerLost if there was no sign for `silence_s`."""
        now_s, sign = time.monotonic(), self._sign()
        # A late look means that this process was suspended itself.
        if sign != self._last or now_s - self._looked_s > self.silence_s / 2:
            self._sign_s, self._last = now_s, sign
        self._looked_s = now_s
        if now_s - self._sign_s > self.silence_s:
            raise self.lost()

    def lost(self) -> PlannerLost:
        """The error of a planner process that is stopped."""
        pid, state = self._pid(), ""
        with contextlib.suppress(OSError, IndexError):
            state = f", state {_process_status(pid)[0]}"
        return PlannerLost(
            f"the planner process of this node (process {pid} on {socket.gethostname()}{state}) "
            f"gave no sign of life for {self.silence_s:g} s: it is stopped; go on from the last "
            f"checkpoint with --resume"
        )

    def _sign(self) -> tuple[int, int]:
        """When the file was touched, and the processor time so far; 0 where it cannot be told."""
        touched_ns = ticks = 0
        with contextlib.suppress(OSError):
            touched_ns = self._file.stat().st_mtime_ns
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = sum(map(int, _process_status(self._pid())[11:13]))
        return touched_ns, ticks

    def _pid(self) -> str:
        try:
            return self._file.read_text() or "?"
        except OSError:
            return "?"


def _process_status(pid: str) -> list[str]:
    """Fields of Linux's /proc/PID/stat from the state (one letter) on: 11 and 12 are user and
    system time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _connected(address: Address, signs: SignsOfLife) -> "Connection[Any, Any]":
    """As multiprocessing's Client, but no read waits longer than `signs.silence_s`."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(address.path)
        if signs.silence_s:
            whole_s, part_s = divmod(signs.silence_s, 1)
            limit = struct.pack("ll", int(whole_s), int(part_s * 1e6))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection: Connection[Any, Any] = Connection(opened.detach())
    try:
        answer_challenge(connection, address.key)
        deliver_challenge(connection, address.key)
    except BlockingIOError:
        connection.close()
        raise signs.lost() from None
    except BaseException:
        connection.close()
        raise
    return connection


class PlanClient:
    """One rank's connection: steps in order, with a look at those that follow.

    A step is asked for when it is about to be received, never earlier: the single server then never
    blocks on a rank that is not reading. It plans ahead by itself. needs_state: whether plans come
    with the planner's state, which holds every waiting document. silence_s: see `SignsOfLife`.
    """

    def __init__(
        self, address: Address, pipeline: int, *, needs_state: bool = True, silence_s: float = 0.0
    ) -> None:
        self._signs = SignsOfLife(address, silence_s)
        self._connection = _connected(address, self._signs)
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
            raise PlannerLost(_DIED) from None

    def close(self) -> None:
        self._connection.close()

    def _fill(self, count: int) -> None:
        while len(self._received) < count and not self._ended:
            item = self._ask()
            if isinstance(item, str):
                self._error = PlanningError.of(item)
            if item is None or isinstance(item, str):
                self._ended = True
            else:
                self._received.append(item)

    def _ask(self) -> Any:
        """The next answer; PlannerLost if the process has died or is stopped."""
        self._signs.begin()
        try:
            self._connection.send("next")
            while not self._connection.poll(self._signs.look_s):
                self._signs.look()
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise PlannerLost(_DIED) from None
        except BlockingIOError:  # It was stopped within an answer.
            raise self._signs.lost() from None


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
    job.address.alive.write_text(str(os.getpid()))
    watch = threading.Thread(target=_live_with, args=(os.getppid(), job.address), daemon=True)
    watch.start()
    with Listener(job.address.path, authkey=job.address.key) as listener:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        PlanServer(job, listener).serve()
    shutil.rmtree(job.address.folder, ignore_errors=True)


def _live_with(parent: int, address: Address) -> None:
    """Give signs of life, and end this process when the rank that started it is gone, because no
    other rank may connect then."""
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            os.utime(address.alive)
        time.sleep(_BEAT_S)
    shutil.rmtree(address.folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    _main()
