"""Run a function in one process per rank on this machine; return the results of all ranks.

If a rank fails, the error says which rank failed first and why (`wlb.launch.report`). The processes
are forked from a forkserver that has imported torch, so 8 ranks start in about 0.3 s instead of
10 s. No process outlives the call or the launching process: every rank leads a process group, which
is killed with everything that the rank has started. Ranks find each other through a file, inherit
stdout, stderr and the environment variables, and import the function by its name.

torch's launchers are not used, for three reasons. If a launcher of torch is killed, processes that
a rank has started, such as a planner, keep running. The ranks themselves get SIGINT in this case,
which in wlb means to save a checkpoint before they end. And torch's elastic agent needs a store
that listens on a port.
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

# Modules that the forkserver imports before it forks, so that ranks need not import them.
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

# If this process has imported one of these modules, the forkserver also imports it before it forks.
PRELOAD_IF_LOADED = ("pytest", "hypothesis")

_STACK_WAIT_S = 2.0
"""Seconds to wait for ranks to write their stacks. Running ranks get up to `_JOIN_S`."""
_SILENT_STATES = {
    ProcessState.STOPPED: "its process is stopped",
    ProcessState.AWAITS_DISK: "it waits for a disk or a file server",
}
"""States in which a process does not react to signals, and words for them in a report."""
_PEER_WAIT_S = 0.2
"""Seconds to collect failures of other ranks, if a failure so far has a cause of its own."""
_CAUSE_WAIT_S = 2.0
"""Seconds to wait for the original failure, if all failures so far are consequences of it."""
_JOIN_S = 10.0
"""Most seconds to wait for a process to end, and for running ranks to write their stacks.

A failed rank waits as long to be killed by the launcher."""


class RankFailure(RuntimeError):
    """Raised if a rank raised an exception, died, or did not finish in time.

    Args:
        message: The whole failure report, of several lines.
        rank: The rank that failed first; -1 if the run exceeded its time limit.
        error: The failure in one line.
    """

    def __init__(self, message: str, *, rank: int, error: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankJob:
    """What a rank's process gets from the launcher."""

    world: worlds.World  # the process's rank, and how ranks find each other
    task: bytes  # pickled (fn, args)
    device: str  # "cpu" or "cuda", for which the torch process group is created
    start_group: bool  # whether to create a torch process group before calling `fn`
    group_timeout_s: float  # time limit of the process group's collectives
    environment: dict[str, str]  # environment variables to set
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
    """Call fn(world, *args) in one process per rank; return the results in rank order.

    If the caller does not handle SIGTERM and SIGHUP, they end this process and all ranks.

    Args:
        fn: Function at the top of a module. Its first argument is the rank's `World`.
        world_size: Number of ranks.
        *args: Picklable arguments of `fn`.
        timeout_s: Most seconds that the ranks may take; None means no limit.
        device: "cpu" or "cuda", for which the torch process group is created.
        start_group: Whether to create a torch process group before `fn` and destroy it afterwards.
        preload: More modules for the forkserver to import. They have an effect only in the first
            call of a process.
        records: Folder for stacks and failures of ranks (`new_records`), inside the run's folder;
            the failure report is written to the run's folder as well. None means a temporary
            folder.

    Raises:
        RankFailure: A rank raised an exception, died, or did not finish in time.
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
                # The launcher must time out before a collective does: a launcher's report of what
                # each rank did says more than the collective's error.
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
            # This process was interrupted by a signal. No rank has failed, so leave no report.
            ranks.kill()
            forget_records(records)
            raise
        finally:
            ranks.join()


def _pickled_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle the function and its arguments without torch's reducers.

    With torch's reducers, tensors would be in memory shared with this process, which may end before
    the ranks do.
    """
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be pickled to send them "
            f"to the ranks: {error}; give a function defined at the top of a module and plain "
            "arguments"
        ) from error


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """Within this context, SIGTERM and SIGHUP raise SystemExit, so that cleanup code runs.

    Signals that already have a handler are not changed.
    """
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
    """Within this context, ignore SIGINT, also in processes that are started in it.

    On Ctrl-C, a terminal sends SIGINT to all of its processes, also to the forkserver and to ranks
    that do not lead their process group yet. Only the launching process should react to it, by
    ending the other processes.
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
def _temporary_files_in_our_folder() -> Iterator[None]:
    """Within this context, multiprocessing creates its temporary folder in a folder of wlb.

    The temporary folder contains the forkserver's socket. If this process is killed, the next start
    of wlb removes wlb's folder with everything in it.
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
    """The processes of all ranks, and the pipes through which they send their results.

    Args:
        jobs: What each rank gets from the launcher, in rank order.
        records: Folder for stacks and failures of ranks.
    """

    def __init__(self, jobs: Sequence[_RankJob], records: Path) -> None:
        self.jobs, self.records = jobs, records
        self.processes: list[ForkServerProcess] = []
        # The rank at the other end of each pipe through which no message has come yet.
        self.pending: dict[Connection, int] = {}
        self.results: dict[int, Any] = {}  # results of the function, by rank

    def start(self, preload: Sequence[str]) -> None:
        """Start the forkserver if necessary, and fork all ranks.

        Args:
            preload: More modules for the forkserver to import before it forks.
        """
        context = multiprocessing.get_context("forkserver")
        loaded = [name for name in PRELOAD_IF_LOADED if name in sys.modules]
        context.set_forkserver_preload([*PRELOAD, *loaded, *preload])
        with (
            worlds.temporary_environment(OMP_NUM_THREADS="1"),
            _ignoring_interrupts(),
            _temporary_files_in_our_folder(),
        ):
            forkserver.ensure_running()
        for job in self.jobs:
            receiver, sender = context.Pipe(duplex=False)
            self.pending[receiver] = job.world.rank
            # A daemon process could not start processes itself, but a rank may.
            process = context.Process(target=_rank_main, args=(job, sender), daemon=False)
            process.start()
            self.processes.append(process)
            # Close this process's copy of the sending end, so the pipe closes when the rank dies.
            sender.close()

    def collect(self, timeout_s: float | None) -> list[Any]:
        """Wait for all ranks and return their results.

        Args:
            timeout_s: Most seconds to wait; None means no limit.

        Raises:
            RankFailure: A rank raised an exception, died, or did not finish in time.
        """
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
        """Wait a short time for failures of other ranks, and return them.

        One of them may have caused the failures so far.

        Args:
            first: The failures so far.
        """
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
        """Receive a message from each pipe that is ready; store results and return failures."""
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
        """Return the failure of a rank whose process ended without a message."""
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
        """Collect stacks, kill all ranks, write the failure report, and return it as an error."""
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
        """Make running ranks write their stacks; return the failures of ranks that cannot react.

        A rank cannot react to signals if its process is stopped or waits for a disk.
        """
        return [
            self._failure(rank, FailureKind.SILENT, f"gave no sign of life ({why})")
            for rank in self._dump_stacks()
            if (why := _SILENT_STATES.get(process_state(_pid(self.processes[rank]))))
        ]

    def _dump_stacks(self) -> list[int]:
        """Send running ranks a signal to write their stacks; return the ranks that wrote none."""
        before = {rank: self._stack_bytes(rank) for rank in self.pending.values()}
        for rank in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(_pid(self.processes[rank]), DUMP_SIGNAL)
        begin, left = time.monotonic(), sorted(before)
        # Also stop waiting if the run's folder was moved or deleted.
        while left and self.records.exists() and time.monotonic() < begin + _JOIN_S:
            time.sleep(0.02)
            left = [rank for rank in left if self._stack_bytes(rank) == before[rank]]
            # Wait longer for processes that run, because they may be slow on a busy machine. A
            # stopped process never writes its stack.
            if time.monotonic() > begin + _STACK_WAIT_S and all(
                process_state(_pid(self.processes[rank])) != ProcessState.RUNS for rank in left
            ):
                break
        # Give the last rank time to finish writing.
        time.sleep(0.05)
        return left

    def _stack_bytes(self, rank: int) -> int:
        """Return the size in bytes of the file to which a rank writes its stacks."""
        path = stack_path(self.records, rank)
        return path.stat().st_size if path.exists() else 0

    def _out_of_time(self, timeout_s: float | None) -> RankFailure:
        """Return the error for ranks that did not finish in time, with their stacks.

        Args:
            timeout_s: The time limit.
        """
        running = sorted(self.pending.values())
        self._dump_stacks()
        error = f"ranks {running} of {len(self.jobs)} still ran after {timeout_s} s"
        stacks = [
            f"--- rank {rank}\n{read_stack(self.records, rank) or 'no stack'}" for rank in running
        ]
        return RankFailure("\n".join([error, *stacks]), rank=-1, error=error)

    def kill(self) -> None:
        """Kill all ranks and the processes that they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(_pid(process), signal.SIGKILL)
            # `killpg` does not reach a rank that has not created its process group yet.
            process.kill()

    def join(self) -> None:
        """Wait until all processes have ended, and release their resources."""
        for receiver in self.pending:
            receiver.close()
        for process in self.processes:
            process.join(_JOIN_S)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()


def _pid(process: ForkServerProcess) -> int:
    # If the id were 0, `killpg` would kill the launcher's own process group.
    assert process.pid is not None
    return process.pid


def _rank_main(job: _RankJob, sender: Connection) -> None:
    """Entry point of a rank's process: call the function, and send its result or failure."""
    # Create a process group, so that everything that this rank starts can be killed with it.
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
            # Wait for the launcher to kill this process. Exiting now would close connections and
            # make other ranks fail as well.
            time.sleep(_JOIN_S)
        else:
            sender.send_bytes(message)


def _run_task(job: _RankJob) -> Any:
    """Call the job's function, with a torch process group if the job requests it."""
    import torch

    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the stream cannot encode instead of raising an error.
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
        # Wait for all ranks, because a rank that leaves early breaks the connections of the others.
        torch.distributed.all_reduce(torch.zeros(1), group=host_group())
    worlds.shutdown()
    return result


def _end_with_parent() -> None:
    """Wait until the launching process ends, then kill this rank's process group."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
