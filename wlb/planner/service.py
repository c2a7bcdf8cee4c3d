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
import select
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
from typing import Any

from wlb.data.leftovers import make_and_lock, sweep
from wlb.plan import PipelinePlan, PlannerState, StepPlan
from wlb.planner.compose import Planner
from wlb.planner.liveness import SILENCE_S, Address, PlannerLost, PlanningError, SignsOfLife

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_BEAT_S = 0.25
"""Seconds between a planner process's signs of life."""
_DIED = "the planner process of this node has died"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningJob:
    """Job of a planner process: make(*args) builds the planner inside the process."""

    make: Callable[..., Planner]
    args: tuple[Any, ...]
    state: PlannerState | None
    address: Address
    ahead: int
    num_clients: int


class PlannerProcess:
    """A running planner process; `close` ends it. It also ends when its last client leaves.

    silence_s: see `SignsOfLife`; PlannerLost if it is stopped before it listens.
    """

    def __init__(
        self,
        make: Callable[..., Planner],
        args: tuple[Any, ...],
        *,
        state: PlannerState | None,
        ahead: int,
        num_clients: int,
        address: Address | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.address = address or Address.new()
        self._folder = self.address.folder
        sweep()
        self._held = make_and_lock(self._folder)
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
                bufsize=0,
            )
        try:
            self._hand_over(
                pickle.dumps(job), SignsOfLife(self.address, silence_s, pid=self._process.pid)
            )
        except BaseException:
            self.close()
            raise

    def _hand_over(self, job: bytes, signs: SignsOfLife) -> None:
        """Give the process its job and wait until it listens. A stopped one reads no more than the
        pipe holds.
        """
        given, said = self._process.stdin, self._process.stdout
        assert given is not None
        assert said is not None
        signs.begin()
        os.set_blocking(given.fileno(), False)
        rest = memoryview(job)
        # A process that ended at its start reads nothing; what it said is read below.
        with contextlib.suppress(BrokenPipeError):
            while rest:
                signs.await_file(given.fileno(), select.POLLOUT)
                rest = rest[os.write(given.fileno(), rest) :]
        given.close()
        signs.await_file(said.fileno(), select.POLLIN)
        if said.readline() != b"listening\n":
            raise PlanningError(
                f"the planner process ended with {self._process.wait()} at its start"
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)


def _connected(address: Address, signs: SignsOfLife) -> "Connection[Any, Any]":
    """As multiprocessing's Client, but no read waits longer than `signs.silence_s`."""
    with socket.socket(socket.AF_UNIX) as opened:
        whole_s, part_s = divmod(signs.silence_s, 1)
        limit = struct.pack("ll", int(whole_s), int(part_s * 1e6))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            opened.connect(address.path)
        except BlockingIOError:  # Nobody accepts, and no more may queue.
            raise signs.lost() from None
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
        self,
        address: Address,
        pipeline: int,
        *,
        needs_state: bool = True,
        silence_s: float = SILENCE_S,
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
        could not be planned: steps before that one still run.
        """
        self._fill(steps_ahead)
        return self._received[steps_ahead - 1] if len(self._received) >= steps_ahead else None

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
    None at the end of data, or the text of an error; steps planned before it still run.
    """

    def __init__(self, job: PlanningJob, listener: Listener) -> None:
        self.job = job
        self.planner: Planner | None = None
        self.state: PlannerState | None = job.state
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
            connection.recv()  # It asks for its next step.
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
            state = self.state or self.planner.start()
            plan = self.planner.next(state)
            if plan is not None:
                self.state = plan.state
                for pipeline in sorted({pipeline for pipeline, _ in self.clients.values()}):
                    self.shards[plan.step, pipeline] = self.planner.shard(plan, pipeline)
            self.plans.append(plan)
        except Exception:
            self.plans.append(traceback.format_exc())

    def _has_ended(self) -> bool:
        return bool(self.plans) and not isinstance(self.plans[-1], StepPlan)

    def _forget(self) -> None:
        """Drop plans that every client has."""
        while self.cursor and len(self.plans) > 1 and min(self.cursor.values()) > self.dropped:
            plan = self.plans.pop(0)
            self.dropped += 1
            assert isinstance(plan, StepPlan)
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
    other rank may connect then.
    """
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            os.utime(address.alive)
        time.sleep(_BEAT_S)
    shutil.rmtree(address.folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    _main()
