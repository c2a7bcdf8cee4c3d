"""Runs the planner in a separate process on each node, some steps ahead of training.

    rank 0 --starts--> planner process          ranks 0, 1, ... --"next"--> planner process
                                                                <-- StepPlan, PipelinePlan --

The process imports no torch. It listens on a local socket. Each rank of the node requests one step
after the other, and receives the plan of the step and the plan of its pipeline. Every node plans
the whole step, so nodes send each other no plans. They only compare a hash of the plan.

A thread instead of a process would slow down training: in a test it raised the time to launch an
operation from 3 us to 4 ms, because both threads need Python's interpreter lock.

`PlannerProcess` starts `python -m wlb.planner.service`, which reads its job as a pickle from
standard input. Only its parent process can write to this pipe, so the pickle can be trusted.
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
"""Signals that stop a run. The planner process ignores them, because ranks still need plans until
they have written a checkpoint. Ranks end the process afterwards."""
_BEAT_S = 0.25
"""Seconds after which a planner process touches its file again, to show that it is alive."""
_DIED = (
    "the planner process of this node has died; see its error above, if it printed one, and resume "
    "from the last checkpoint with --resume"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningJob:
    """The job that a planner process receives when it starts."""

    make: Callable[..., Planner]  # make(*args) is called in the process and returns the planner
    args: tuple[Any, ...]  # arguments of `make`
    state: PlannerState | None  # the state at which planning begins; None = start of the run
    address: Address  # where the process listens
    ahead: int  # steps that are planned before a rank requests them
    num_clients: int  # number of ranks that will connect


class PlannerProcess:
    """Starts a planner process, which ends at `close` or when its last client disconnects."""

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
        """Start the process, and wait until it listens.

        Args:
            make: A function that returns the planner. It is called in the new process.
            args: Arguments of `make`.
            state: The state at which planning begins. None = start of the run.
            ahead: Steps that are planned before a rank requests them.
            num_clients: Number of ranks that will connect.
            address: Where the process listens. Defaults to a new address.
            silence_s: Seconds without a sign of life after which the process is considered stopped.

        Raises:
            PlannerLost: If the process is stopped before it listens.
        """
        self.address = address or Address.new()
        self._folder = self.address.folder
        sweep()
        self._lock = make_and_lock(self._folder)
        job = PlanningJob(
            make=make,
            args=args,
            state=state,
            address=self.address,
            ahead=ahead,
            num_clients=num_clients,
        )
        with _stop_signals_blocked():
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
        """Send the job to the process, and wait until the process accepts connections.

        Args:
            job: The pickled `PlanningJob`.
            signs: Detects that the process was stopped.

        Raises:
            PlannerLost: If the process shows no sign of life.
            PlanningError: If the process ends before it accepts connections.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        signs.begin()
        # Write without blocking. If the process was stopped, it does not read, and a blocking write
        # to the full pipe would wait for ever.
        os.set_blocking(stdin.fileno(), False)
        rest = memoryview(job)
        # If the process has ended, writing fails with BrokenPipeError. The read below then finds no
        # line and raises an error.
        with contextlib.suppress(BrokenPipeError):
            while rest:
                signs.await_file(stdin.fileno(), select.POLLOUT)
                rest = rest[os.write(stdin.fileno(), rest) :]
        stdin.close()
        signs.await_file(stdout.fileno(), select.POLLIN)
        if stdout.readline() != b"listening\n":
            raise PlanningError(
                f"the planner process ended with exit status {self._process.wait()} before it "
                "accepted connections; the cause is printed above"
            )

    def close(self) -> None:
        """End the process and remove its folder."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _connected(address: Address, signs: SignsOfLife) -> "Connection[Any, Any]":
    """Connect to a planner process as multiprocessing's Client does, but with a time limit.

    Reads and writes of the connection fail if they take longer than `signs.silence_s` seconds.

    Args:
        address: Where the process listens.
        signs: Detects that the process was stopped.

    Raises:
        PlannerLost: If the process does not answer.
    """
    with socket.socket(socket.AF_UNIX) as opened:
        whole_s, part_s = divmod(signs.silence_s, 1)
        limit = struct.pack("ll", int(whole_s), int(part_s * 1e6))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            opened.connect(address.path)
        except BlockingIOError:  # The process accepts no connection, and its queue is full.
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
    """One rank's connection to the planner process, which returns the steps in order.

    The client requests a step only when it is about to read the answer. So the server, which has a
    single thread, never waits for a rank that does not read. The server plans ahead without
    requests.
    """

    def __init__(
        self,
        address: Address,
        pipeline: int,
        *,
        needs_state: bool = True,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Connect to a planner process.

        Args:
            address: Where the process listens.
            pipeline: Pipeline of this rank.
            needs_state: Whether plans include the planner's state, which has every waiting document
                and is only needed for checkpoints.
            silence_s: Seconds without a sign of life after which the process is considered stopped.
        """
        self._signs = SignsOfLife(address, silence_s)
        self._connection = _connected(address, self._signs)
        self._received: list[tuple[StepPlan, PipelinePlan]] = []
        self._ended = False
        self._error: PlanningError | None = None
        self._connection.send((pipeline, needs_state))

    def next(self) -> tuple[StepPlan, PipelinePlan] | None:
        """Return the plans of the next step and of this rank's pipeline; None after the last step.

        Raises:
            PlanningError: If the step could not be planned.
        """
        self._fill(1)
        if self._error is not None and not self._received:
            raise self._error
        return self._received.pop(0) if self._received else None

    def peek(self, steps_ahead: int) -> tuple[StepPlan, PipelinePlan] | None:
        """Return a later step without consuming it.

        Args:
            steps_ahead: 1 for the step that `next` will return, 2 for the one after it, and so on.

        Returns:
            The plan of the step, and the plan of this rank's pipeline. None if there is no such
            step, or if it could not be planned. In that case `next` raises the error when the step
            is due, so that the steps before it still run.
        """
        self._fill(steps_ahead)
        return self._received[steps_ahead - 1] if len(self._received) >= steps_ahead else None

    def close(self) -> None:
        """Disconnect from the planner process."""
        self._connection.close()

    def _fill(self, count: int) -> None:
        """Request steps until `count` of them are ready to be returned, or there are no more."""
        while len(self._received) < count and not self._ended:
            item = self._request()
            if isinstance(item, str):
                self._error = PlanningError.of(item)
            if item is None or isinstance(item, str):
                self._ended = True
            else:
                self._received.append(item)

    def _request(self) -> Any:
        """Request a step and return the answer; raise PlannerLost if the process is gone."""
        self._signs.begin()
        try:
            self._connection.send("next")
            while not self._connection.poll(self._signs.look_s):
                self._signs.look()
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise PlannerLost(_DIED) from None
        except BlockingIOError:  # The process was stopped while it sent the answer.
            raise self._signs.lost() from None


class PlanServer:
    """Answers the clients of a planner process, and plans ahead while there are no requests."""

    def __init__(self, job: PlanningJob, listener: Listener) -> None:
        """Wait until all clients, the ranks of this node, have connected.

        Args:
            job: The job of the process, including the number of clients.
            listener: The socket at which the process listens.
        """
        self.job = job
        self.planner: Planner | None = None
        self.state: PlannerState | None = job.state
        # The plans that some client has not received yet, of steps `dropped`, `dropped` + 1, ...
        # The last entry is None if the data has ended, or a traceback if planning has failed.
        self.plans: list[StepPlan | str | None] = []
        self.dropped = 0  # number of plans that all clients have received
        # The plan of each (step, pipeline).
        self.shards: dict[tuple[int, int], PipelinePlan] = {}
        # For each client: its pipeline, and whether it needs the planner's state.
        self.clients: dict[Connection[Any, Any], tuple[int, bool]] = {}
        # Index of the plan that each connected client gets next.
        self.cursor: dict[Connection[Any, Any], int] = {}
        for _ in range(job.num_clients):
            try:
                connection = listener.accept()
                self.clients[connection] = connection.recv()
                self.cursor[connection] = 0
            except (EOFError, ConnectionError, AuthenticationError):
                # This rank has died before it connected. Its launcher will end the other ranks.
                continue

    def serve(self) -> None:
        """Answer requests until all clients have disconnected."""
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
            connection.recv()  # A client can only request its next step.
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
        """Plan one more step, and shard it for the pipelines of all clients."""
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
            # Send the error to the clients, which raise it when they reach this step.
            self.plans.append(traceback.format_exc())

    def _has_ended(self) -> bool:
        return bool(self.plans) and not isinstance(self.plans[-1], StepPlan)

    def _forget(self) -> None:
        """Drop plans that all clients have received."""
        while self.cursor and len(self.plans) > 1 and min(self.cursor.values()) > self.dropped:
            plan = self.plans.pop(0)
            self.dropped += 1
            assert isinstance(plan, StepPlan)
            self.shards = {k: v for k, v in self.shards.items() if k[0] != plan.step}


@contextlib.contextmanager
def _stop_signals_blocked() -> Generator[None]:
    """Block STOP_SIGNALS in processes that are started inside this context.

    Slurm and terminals send such a signal to all processes of a job. The planner process must not
    end then: ranks still need it to write a checkpoint, and end it afterwards. It ignores the
    signals as soon as its code runs. Until then they are blocked.
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
    watch = threading.Thread(
        target=_beat_while_alive, args=(os.getppid(), job.address), daemon=True
    )
    watch.start()
    with Listener(job.address.path, authkey=job.address.key) as listener:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        PlanServer(job, listener).serve()
    shutil.rmtree(job.address.folder, ignore_errors=True)


def _beat_while_alive(parent: int, address: Address) -> None:
    """Show ranks that this process works, until its parent dies; then end this process.

    The process touches a file every `_BEAT_S` seconds, and ranks look at the file's time. The
    parent is the rank that started this process. If the parent has died, other ranks may never
    connect, and this process would wait for them for ever.

    Args:
        parent: Process id of the parent.
        address: Address of this process, which names the file (`Address.alive`).
    """
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            os.utime(address.alive)
        time.sleep(_BEAT_S)
    shutil.rmtree(address.folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    _main()
