"""Run a function on local ranks and return their results, or raise the first failure.

A forkserver that has imported torch forks one process per rank (8 ranks start in about 0.3 s
instead of 10 s). No process outlives the call or the launching process: every rank leads a process
group, which is killed with it. Ranks rendezvous through a file, inherit stdout, stderr and the
current environment, and import `fn` by name.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

from wlb.data.leftovers import process_folder, temporary_folder
from wlb.launch.told import in_words
from wlb.parallel import world as worlds
from wlb.parallel.host import host_group
from wlb.plan import UserError, check_at_least

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

DUMP_SIGNAL = signal.SIGUSR2
_STACK_WAIT_S = 2.0
_PEER_WAIT_S = 0.2
_REPORT_WAIT_S = 10.0
_LAST_WORD_S = 0.5
"""Time to wait for the end of a rank that others reported, whose exit code tells how it died."""
_JOIN_S = 10.0


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
    stack_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """at_s: time of the failure by the monotonic clock, 0 for a rank that died silently. is_report:
    `details` is the report of all ranks by their watch."""

    rank: int
    error: str
    details: str
    at_s: float = 0.0
    is_report: bool = False


def run_local(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float | None = None,
    device: str = "cpu",
    start_group: bool = False,
    preload: Sequence[str] = (),
    awaits_report: bool = False,
) -> list[Any]:
    """Return the results of fn(world, *args) on `world_size` local ranks, in rank order.

    device: "cpu" or "cuda", already chosen. start_group: start and end the process group around
    `fn`. preload: more modules that the forkserver imports, in the first call of a process.
    awaits_report: ranks watch each other, so a failure is followed by a report of all ranks.
    SIGTERM and SIGHUP end this process and the ranks, unless the caller handles them. Raises
    RankFailure.
    """
    check_at_least("world_size", world_size, 1)
    task = _pickled_task(fn, args)
    environment = worlds.environment(OMP_NUM_THREADS=str(worlds.threads_per_rank(world_size)))
    with _signals_exit(), temporary_folder("ranks") as folder:
        ranks = _LocalRanks(
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
                stack_file=str(Path(folder, f"stack-{rank}")),
            )
            for rank in range(world_size)
        )
        try:
            ranks.start(preload)
            return ranks.collect(timeout_s, awaits_report=awaits_report)
        except BaseException:
            ranks.kill()
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
    start of wlb removes if this process is killed."""
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

    def __init__(self, jobs: Iterable[_RankJob]) -> None:
        self.jobs = list(jobs)
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

    def collect(self, timeout_s: float | None, *, awaits_report: bool = False) -> list[Any]:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.pending:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = wait(list(self.pending), timeout=left)
            if not ready:
                raise self._out_of_time(timeout_s)
            failures = self._take(ready)
            if failures:
                raise self._failed(failures + self._peers(failures, awaits_report))
        return [self.results[rank] for rank in range(len(self.jobs))]

    def _peers(self, first: list[_Failure], awaits_report: bool) -> list[_Failure]:
        """Collect failures that may have caused the first one, until the ranks' report comes."""
        failures: list[_Failure] = []
        end = time.monotonic() + (_REPORT_WAIT_S if awaits_report else _PEER_WAIT_S)
        while self.pending and (left := end - time.monotonic()) > 0:
            if any(failure.is_report for failure in first + failures):
                break
            failures += self._take(wait(list(self.pending), timeout=left))
        reported = {failure.rank for failure in first + failures if failure.is_report}
        # A peer may report a rank's death before the end of that rank's own pipe is read.
        lines = [line for line, rank in self.pending.items() if rank in reported]
        return failures + self._take(wait(lines, timeout=_LAST_WORD_S) if lines else [])

    def _take(self, ready: Sequence[Any]) -> list[_Failure]:
        failures: list[_Failure] = []
        for receiver in ready:
            rank = self.pending.pop(receiver)
            try:
                message = pickle.loads(receiver.recv_bytes())
            except (EOFError, OSError):
                message = self._died(rank)
            finally:
                receiver.close()
            if isinstance(message, _Failure):
                failures.append(message)
            else:
                (self.results[rank],) = message
        return failures

    def _died(self, rank: int) -> _Failure:
        process = self.processes[rank]
        process.join(_JOIN_S)
        code = process.exitcode
        error = f"died with exit code {code}"
        if code is not None and code < 0:
            error = f"died from {signal.Signals(-code).name} (exit code {code})"
        return _Failure(rank=rank, error=error, details=self._stack(rank))

    def _failed(self, failures: list[_Failure]) -> RankFailure:
        """Return the failure that all ranks report, else the first one; deaths come first."""
        for report in failures:
            if report.is_report:
                died = [
                    f for f in failures if f.rank == report.rank and not (f.at_s or f.is_report)
                ]
                lines = [f"rank {f.rank} {f.error}\n{f.details}".rstrip() for f in died]
                message = "\n".join([*lines, report.details])
                error = died[0].error if died else report.error
                return RankFailure(message, rank=report.rank, error=error)
        first, *others = sorted(failures, key=lambda failure: failure.at_s)
        lines = [f"rank {first.rank} of {len(self.jobs)} failed: {first.error}", first.details]
        alike = [str(other.rank) for other in others if other.error == first.error]
        if alike:
            lines.append(f"the same on rank {', '.join(alike)}")
        lines += [f"then rank {o.rank}: {o.error}" for o in others if o.error != first.error]
        message = "\n".join(line.rstrip() for line in lines if line)
        return RankFailure(message, rank=first.rank, error=first.error)

    def _out_of_time(self, timeout_s: float | None) -> RankFailure:
        running = sorted(self.pending.values())
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(_pid(self.processes[rank]), DUMP_SIGNAL)
        end = time.monotonic() + _STACK_WAIT_S
        while time.monotonic() < end and not all(self._stack(rank) for rank in running):
            time.sleep(0.02)
        # The last stack may still be being written.
        time.sleep(0.05)
        error = f"ranks {running} of {len(self.jobs)} still ran after {timeout_s} s"
        stacks = [f"--- rank {rank}\n{self._stack(rank) or 'no stack'}" for rank in running]
        return RankFailure("\n".join([error, *stacks]), rank=-1, error=error)

    def _stack(self, rank: int) -> str:
        """The stack that faulthandler wrote, without the thread that watches the launcher."""
        path = Path(self.jobs[rank].stack_file)
        text = path.read_text(errors="replace") if path.exists() else ""
        threads = text.strip().split("\n\n")
        return "\n\n".join(thread for thread in threads if _end_with_parent.__name__ not in thread)

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


class _ResultPipe:
    """The pipe of a rank to its launcher, which reads one message."""

    def __init__(self, sender: Connection) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._is_used = False

    def send(self, message: bytes) -> None:
        """Send the first message and drop later ones."""
        with self._lock:
            if not self._is_used:
                self._is_used = True
                self._sender.send_bytes(message)


_result_pipe: _ResultPipe | None = None


def report_failure(rank: int, error: str, text: str) -> bool:
    """Make `run_local` fail because of `rank`, with a report of all ranks, from any thread. Returns
    False, without effect, in a process that `run_local` did not start."""
    if _result_pipe is None:
        return False
    _result_pipe.send(pickle.dumps(_Failure(rank=rank, error=error, details=text, is_report=True)))
    return True


def is_launched() -> bool:
    """Whether this process is a rank that `run_local` started."""
    return _result_pipe is not None


def _rank_main(job: _RankJob, sender: Connection) -> None:
    """Main function of a rank: send its result or its failure as one message."""
    global _result_pipe
    _result_pipe = _ResultPipe(sender)
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worlds.adopt_environment(job.environment)
    with open(job.stack_file, "w") as stack:
        faulthandler.enable(file=stack)
        faulthandler.register(DUMP_SIGNAL, file=stack, all_threads=True)
        try:
            message = pickle.dumps((_run_task(job),))
        except BaseException as error:
            summary, details = in_words(error)
            failure = _Failure(
                rank=job.world.rank, error=summary, details=details, at_s=time.monotonic()
            )
            _result_pipe.send(pickle.dumps(failure))
            sys.stdout.flush()
            sys.stderr.flush()
            # The launcher kills this process; leaving earlier would make peers fail.
            time.sleep(_JOIN_S)
        else:
            _result_pipe.send(message)
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
            faulthandler.disable()


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
