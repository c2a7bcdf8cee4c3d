"""Run a function on local ranks and return their results, or raise the first failure.

A forkserver that has imported torch forks one process per rank (8 ranks start in about 0.3 s
instead of 10 s). No process outlives the call or the launching process: every rank leads a process
group, which is killed with it. Ranks rendezvous through a file, inherit stdout, stderr and the
current environment, and import `fn` by name. How a failure is told: `wlb.launch.report`.

torch's launchers are not used: when the launching process is killed, theirs leave what a rank has
started (a planner) behind, and send the ranks SIGINT, which asks ours to save and go on. Elastic's
agent needs a store with a port besides.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

from wlb.data.leftovers import process_folder, temporary_folder
from wlb.launch.failure import (
    DUMP_SIGNAL,
    FailedRank,
    FailureKind,
    forget_records,
    new_records,
    read_stack,
    stack_path,
    stacks_to,
    unless_unwritable,
    write_failure,
)
from wlb.launch.report import compose_report, is_consequence, keep_report
from wlb.parallel import world as worlds
from wlb.parallel.host import host_group
from wlb.plan import UserError, check_at_least
from wlb.plan.processes import ProcessState, process_state

PRELOAD = (
    "__main__",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "wlb.launch.local",
)

# Modules whose import is slow are imported once in the server instead of once per rank.
PRELOAD_IF_LOADED = ("pytest", "hypothesis")

_STACK_WAIT_S = 2.0
_SILENT_STATES = {
    ProcessState.STOPPED: "its process is stopped",
    ProcessState.AWAITS_DISK: "it waits for a disk or a file server",
}
"""States in which a process does not answer a signal, in words."""
_PEER_WAIT_S = 0.2
_CAUSE_WAIT_S = 2.0
"""Time that a rank has to fail by itself after others failed as its peers do."""
_JOIN_S = 10.0
"""Longest wait for a process to end, for stacks, and of a failed rank until it is killed."""


class RankFailure(RuntimeError):
    """A rank failed, died or hung. `rank` failed first; -1 if the run exceeded its time limit."""

    def __init__(self, message: str, *, rank: int, error: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankJob:
    """Arguments of a rank's process. task: pickled (fn, args)."""

    world: worlds.World
    task: bytes
    device: str
    start_group: bool
    group_timeout_s: float
    environment: dict[str, str]
    records: Path  # folder of the ranks' stacks and failures


def run_local(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float | None = None,
    device: str = "cpu",
    start_group: bool = False,
    preload: Sequence[str] = (),
    records: Path | None = None,
) -> list[Any]:
    """Return the results of fn(world, *args) on `world_size` local ranks, in rank order. SIGTERM
    and SIGHUP end this process and the ranks, unless the caller handles them.

    Args:
        device: "cpu" or "cuda", already chosen.
        start_group: Start and end the process group around `fn`.
        preload: More modules that the forkserver imports, in the first call of a process.
        records: Folder for what ranks leave behind (`new_records`), in that of the run, where the
            report of a failure is kept. By default a temporary one.

    Raises:
        RankFailure: A rank failed, died, or ran for too long.
    """
    check_at_least("world_size", world_size, 1)
    task = _pickled_task(fn, args)
    environment = worlds.environment(OMP_NUM_THREADS=str(worlds.threads_per_rank(world_size)))
    with _signals_exit(), temporary_folder("ranks") as folder:
        records = records or new_records(folder, time.time())
        jobs = [
            _RankJob(
                world=worlds.World(
                    rank=rank,
                    world_size=world_size,
                    local_rank=rank,
                    local_world_size=world_size,
                    origin=worlds.Origin.SPAWNED,
                    rendezvous_file=str(Path(folder, "rendezvous")),
                ),
                task=task,
                device=device,
                start_group=start_group,
                # Collectives time out later than the launcher, whose report is more informative.
                group_timeout_s=600.0 if timeout_s is None else 2 * timeout_s + 30,
                environment=environment,
                records=records,
            )
            for rank in range(world_size)
        ]
        ranks = _LocalRanks(jobs, records)
        try:
            ranks.start(preload)
            return ranks.collect(timeout_s)
        except RankFailure:
            ranks.kill()
            raise
        except BaseException:
            # A signal ended this process, as somebody asked: no failure of a rank is to be told.
            ranks.kill()
            forget_records(records)
            raise
        finally:
            ranks.join()


def _pickled_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle without torch's reducers, which would share memory with a process that may be gone."""
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to ranks: "
            f"{error}; use a function at the top of a module and plain arguments"
        ) from error


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind this process, so that ranks and temporary files are removed."""
    is_main = threading.current_thread() is threading.main_thread()
    kinds = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) == signal.SIG_DFL]

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    for kind in kinds if is_main else ():
        signal.signal(kind, leave)
    try:
        yield
    finally:
        for kind in kinds if is_main else ():
            signal.signal(kind, signal.SIG_DFL)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore SIGINT, as processes started in this context then do from their first instruction on.

    A terminal sends Ctrl-C to the forkserver while it imports torch, and to a rank that does not
    lead its process group yet; both are ended by this process, which decides what Ctrl-C means.
    """
    before = signal.getsignal(signal.SIGINT)
    is_changed = threading.current_thread() is threading.main_thread() and before is not None
    if is_changed:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if is_changed:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _own_temporary_files() -> Iterator[None]:
    """Let multiprocessing make its folder, which the server's socket is in, in one that the next
    start of wlb removes if this process is killed.
    """
    before = tempfile.tempdir
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore
    if config.get("tempdir") is None:
        tempfile.tempdir = str(process_folder(os.getpid()))
    try:
        yield
    finally:
        tempfile.tempdir = before


class _LocalRanks:
    """Processes of a run in rank order, and the pipes that carry their results."""

    def __init__(self, jobs: Sequence[_RankJob], records: Path) -> None:
        self.jobs, self.records = jobs, records
        self.processes: list[ForkServerProcess] = []
        self.pending: dict[Connection, int] = {}
        self.results: dict[int, Any] = {}

    def start(self, preload: Sequence[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        loaded = [name for name in PRELOAD_IF_LOADED if name in sys.modules]
        context.set_forkserver_preload([*PRELOAD, *loaded, *preload])
        with (
            worlds.temporary_environment(OMP_NUM_THREADS="1"),
            _ignoring_interrupts(),
            _own_temporary_files(),
        ):
            forkserver.ensure_running()
        for job in self.jobs:
            receiver, sender = context.Pipe(duplex=False)
            self.pending[receiver] = job.world.rank
            # Not a daemon, because a rank may start processes.
            process = context.Process(target=_rank_main, args=(job, sender), daemon=False)
            process.start()
            self.processes.append(process)
            sender.close()

    def collect(self, timeout_s: float | None) -> list[Any]:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.pending:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = wait(list(self.pending), timeout=left)
            if not ready:
                raise self._out_of_time(timeout_s)
            if failures := self._take(ready):
                raise self._failed(failures + self._peers(failures))
        return [self.results[rank] for rank in range(len(self.jobs))]

    def _peers(self, first: list[FailedRank]) -> list[FailedRank]:
        """Collect failures that may have caused the first ones."""
        failures: list[FailedRank] = []
        begin = time.monotonic()
        while self.pending:
            is_explained = any(not is_consequence(f.error) for f in first + failures)
            most_s = _PEER_WAIT_S if is_explained else _CAUSE_WAIT_S
            if (left := begin + most_s - time.monotonic()) <= 0:
                break
            failures += self._take(wait(list(self.pending), timeout=left))
        return failures

    def _take(self, ready: Sequence[Any]) -> list[FailedRank]:
        failures: list[FailedRank] = []
        for receiver in ready:
            rank = self.pending.pop(receiver)
            try:
                message = pickle.loads(receiver.recv_bytes())
            except (EOFError, OSError):
                message = self._died(rank)
            finally:
                receiver.close()
            if isinstance(message, FailedRank):
                failures.append(message)
            else:
                (self.results[rank],) = message
        return failures

    def _died(self, rank: int) -> FailedRank:
        process = self.processes[rank]
        process.join(_JOIN_S)
        code = process.exitcode
        error = f"died with exit code {code}"
        if code is not None and code < 0:
            names = {int(known): known.name for known in signal.Signals}
            error = f"died from {names.get(-code, f'signal {-code}')} (exit code {code})"
        return self._failure(rank, FailureKind.DIED, error)

    def _failure(self, rank: int, kind: FailureKind, error: str) -> FailedRank:
        return FailedRank(
            rank=rank, world_size=len(self.jobs), kind=kind, error=error, time_s=time.time()
        )

    def _failed(self, failures: list[FailedRank]) -> RankFailure:
        """End all ranks, and report what their files and `failures` say."""
        failures += self._silent()
        self.kill()
        for failure in failures:
            write_failure(self.records, failure)
        directory = self.records.parents[1]
        report = compose_report(directory, known=failures, records=self.records)
        assert report is not None
        keep_report(directory, report)
        return RankFailure(report.text, rank=report.rank, error=report.error)

    def _silent(self) -> list[FailedRank]:
        """Let the ranks that work write their stacks; failures of those that do not answer."""
        return [
            self._failure(rank, FailureKind.SILENT, f"gave no sign of life ({why})")
            for rank in self._dump_stacks()
            if (why := _SILENT_STATES.get(process_state(_pid(self.processes[rank]))))
        ]

    def _dump_stacks(self) -> list[int]:
        """Ask the ranks that work for their stacks; returns those that do not answer."""
        before = {rank: self._stack_bytes(rank) for rank in self.pending.values()}
        for rank in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(_pid(self.processes[rank]), DUMP_SIGNAL)
        begin, left = time.monotonic(), sorted(before)
        # The run's folder may have been moved away, and with it the stacks.
        while left and self.records.exists() and time.monotonic() < begin + _JOIN_S:
            time.sleep(0.02)
            left = [rank for rank in left if self._stack_bytes(rank) == before[rank]]
            # A machine with much to do may be slow, but a process that is stopped never answers.
            if time.monotonic() > begin + _STACK_WAIT_S and all(
                process_state(_pid(self.processes[rank])) != ProcessState.RUNS for rank in left
            ):
                break
        # The last stack may still be being written.
        time.sleep(0.05)
        return left

    def _stack_bytes(self, rank: int) -> int:
        path = stack_path(self.records, rank)
        return path.stat().st_size if path.exists() else 0

    def _out_of_time(self, timeout_s: float | None) -> RankFailure:
        running = sorted(self.pending.values())
        self._dump_stacks()
        error = f"ranks {running} of {len(self.jobs)} still ran after {timeout_s} s"
        stacks = [
            f"--- rank {rank}\n{read_stack(self.records, rank) or 'no stack'}" for rank in running
        ]
        return RankFailure("\n".join([error, *stacks]), rank=-1, error=error)

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(_pid(process), signal.SIGKILL)
            # This also ends a rank that does not lead its process group yet.
            process.kill()

    def join(self) -> None:
        for receiver in self.pending:
            receiver.close()
        for process in self.processes:
            process.join(_JOIN_S)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()


def _pid(process: ForkServerProcess) -> int:
    # A pid of 0 would mean this process's own group.
    assert process.pid is not None
    return process.pid


def _rank_main(job: _RankJob, sender: Connection) -> None:
    """Main function of a rank: send its result or its failure as one message."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worlds.adopt_environment(job.environment)
    with contextlib.ExitStack() as opened:
        path = stack_path(job.records, job.world.rank)
        with unless_unwritable(path):
            opened.enter_context(stacks_to(path, DUMP_SIGNAL))
        try:
            message = pickle.dumps((_run_task(job),))
        except BaseException as error:
            failure = FailedRank.of(error, job.world.rank, job.world.world_size)
            write_failure(job.records, failure)
            sender.send_bytes(pickle.dumps(failure))
            sys.stdout.flush()
            sys.stderr.flush()
            # The launcher kills this process; leaving earlier would make peers fail.
            time.sleep(_JOIN_S)
        else:
            sender.send_bytes(message)


def _run_task(job: _RankJob) -> Any:
    import torch

    for stream in (sys.stdout, sys.stderr):
        # A character that the stream cannot encode must not end a rank.
        stream.reconfigure(  # pyright: ignore[reportAttributeAccessIssue]
            line_buffering=True, errors="backslashreplace"
        )
    torch.set_num_threads(int(job.environment["OMP_NUM_THREADS"]))
    fn, args = pickle.loads(job.task)
    if job.start_group:
        device = worlds.rank_device(job.world, job.device)
        worlds.init(job.world, device, timeout_s=job.group_timeout_s)
    result = fn(job.world, *args)
    if job.start_group and torch.distributed.is_initialized():
        # Ranks wait for each other, because leaving early would break connections of peers.
        torch.distributed.all_reduce(torch.zeros(1), group=host_group())
    worlds.shutdown()
    return result


def _end_with_parent() -> None:
    """Kill this rank's process group when the launching process ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
