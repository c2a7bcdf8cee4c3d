"""Compose the report of a failed run from the files that its ranks wrote into the run's folder.

The report names the rank that failed first, and says what each rank was doing. It is composed by
the local launcher, by the script of a Slurm job, by the next start of the run, or by `wlb report`.

When a rank fails, other ranks fail as well: their collectives time out or lose a connection. Such
errors are called consequences. The cause is the first in this list that exists:

1. a rank that died, unless another rank raised an error more than a second earlier;
2. a rank that raised an error that is no consequence;
3. a rank whose process is gone or stopped without an error message;
4. a running rank that does not wait for other ranks;
5. the rank that failed first.
"""

import contextlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from pathlib import Path

from wlb.launch.failure import (
    FailedRank,
    FailureKind,
    began_s,
    fatal_error,
    main_stack,
    newest_records,
    read_failures,
    read_stack,
    stack_path,
)
from wlb.launch.position import SeenPosition, read_positions
from wlb.plan.processes import ProcessState, process_start, process_state

LOGS = "logs"  # folder of the ranks' logs, in the run's folder
FAILURE = "failure.txt"  # file in the run's folder that contains all failure reports
FLIGHT_RECORDS = "nccl-rank-"
"""Prefix of the names of the files in `logs` to which NCCL's flight recorder writes."""
_LAST_LINES = 20  # how many lines of a traceback, stack or log a report shows
_MOST_OTHERS = 16  # most ranks that a report lists in one place
_CONSEQUENCES = (
    "timed out",
    "timeout",
    "Timed out",
    "Timeout",
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "DistNetworkError",
)
"""Texts in the errors that a rank gets if another rank is gone or does not join a collective."""
_WAITS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/checkpoint/",
    "torch/distributed/fsdp/",
    "in _wait_batch_p2p",
    "wlb/parallel/expert_exchange.py",
    "wlb/parallel/collectives.py",
    "wlb/parallel/context/op.py",
    "wlb/parallel/tied.py",
    "wlb/train/reduce.py",
    "wlb/train/evaluate.py",
    "wlb/train/telemetry/ranks.py",
    "wlb/parallel/connect.py",
)
"""Texts in the innermost stack frames of a rank that waits for other ranks.

They are parts of file paths or, for torch's pipeline schedules, the function that waits, because
other functions of that file compute. Collectives on CUDA are asynchronous, so wlb's files in which
their results are read are listed as well."""
_INNERMOST = 8  # how many of the innermost stack frames are searched for the texts in `_WAITS`
_NOTICED_S = 1.0
"""Most seconds until a launcher notices that a rank has died."""


class _Life(Enum):
    """Whether a rank still works."""

    RUNS = auto()
    ENDED = auto()  # the rank has finished its work; its process may still exist
    STOPPED = auto()  # suspended, for example by SIGSTOP
    GONE = auto()  # the process has ended, but the rank has not finished its work


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """All that is known about a rank of a failed run, from its files and its process."""

    rank: int
    world_size: int  # number of ranks of the run
    at: SeenPosition | None  # what the rank was doing; None if the rank did not record it
    failure: FailedRank | None  # None if no failure of the rank was reported
    life: _Life  # whether the rank still works
    # Stack of the rank's main thread, or of all threads at a fatal signal; "" if it wrote none.
    stacks: str

    @property
    def stack(self) -> list[str]:
        """Return the stack of the main thread, most recent call first."""
        return main_stack(self.stacks)

    @property
    def waits(self) -> bool:
        """Return whether the main thread was waiting for other ranks, judged by its stack."""
        return any(part in line for line in self.stack[:_INNERMOST] for part in _WAITS)

    @property
    def is_consequence(self) -> bool:
        """Return whether the rank failed only because another rank failed.

        NCCL's watchdog aborts ranks that wait for a failed rank. So SIGABRT counts as a consequence
        if the rank was waiting.
        """
        failure = self.failure
        if failure is None:
            return False
        if failure.kind == FailureKind.DIED:
            return ("SIGABRT" in failure.error or "Aborted" in failure.error) and self.waits
        return failure.kind == FailureKind.RAISED and is_consequence(failure.error)

    @property
    def is_wordless(self) -> bool:
        """Return whether the rank's process is gone or stopped and left no error and no stack."""
        if self.failure is not None:
            return self.failure.kind == FailureKind.SILENT
        return self.life in (_Life.GONE, _Life.STOPPED) and not self.stacks

    @property
    def where(self) -> str:
        """Return in words what the rank was doing."""
        if self.at:
            return self.at.describe()
        reported = self.failure.position if self.failure else ""
        return reported or "an unknown place"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Why a run failed."""

    rank: int  # the rank that failed first
    error: str  # its failure in one line
    text: str  # the whole report, of several lines


def is_consequence(error: str) -> bool:
    """Return whether an error message is one that a rank gets because another rank failed."""
    return any(part in error for part in _CONSEQUENCES)


def compose_report(
    directory: Path,
    *,
    is_over: bool = True,
    known: Iterable[FailedRank] = (),
    records: Path | None = None,
) -> FailureReport | None:
    """Find out why a run failed.

    Args:
        directory: The run's folder.
        is_over: Whether all processes of the run have ended. If False, processes on other machines
            count as running.
        known: Failures that the caller knows; the folder may lack them if the disk was full.
        records: Folder of failure records (`wlb.launch.failure`); None means the folder of the
            run's most recent start.

    Returns:
        The report, or None if no rank has failed.
    """
    records = newest_records(directory) if records is None else records
    ranks = _read_ranks(records, known, is_over=is_over)
    size = max((seen.world_size for seen in ranks), default=0)
    if not any(seen.failure or seen.is_wordless for seen in ranks):
        return None
    # First report the ranks that caused the failure, with all details.
    first, what = _cause(ranks)
    cause = first[0]
    lines = [f"rank {cause.rank} of {size} {what}", *_about(cause, directory)]
    for other in first[1:_MOST_OTHERS]:
        lines += [f"rank {other.rank} as well", *_about(other, directory)]
    lines += _more(first)
    # Then list ranks with the same error in one line, and all other ranks in a line each.
    named = {seen.rank for seen in first}
    error = cause.failure.error if cause.failure else what
    same_error = [
        s for s in ranks if s.failure and s.failure.error == error and s.rank not in named
    ]
    if same_error:
        lines.append(f"the same error on rank {_listed([seen.rank for seen in same_error])}")
    named |= {seen.rank for seen in same_error}
    rest = [s for s in ranks if s.rank not in named and (s.at or s.failure)]
    rest.sort(key=_failed_first)
    lines += [*(_line(seen) for seen in rest[:_MOST_OTHERS]), *_more(rest)]
    with_position = {seen.rank for seen in ranks if seen.at}
    if with_position and (
        without_position := sorted(set(range(size)) - {seen.rank for seen in ranks})
    ):
        lines.append(f"not known what these ranks were doing: {_listed(without_position)}")
    lines += _flight(directory, records)
    return FailureReport(rank=cause.rank, error=error, text="\n".join(lines))


def keep_report(directory: Path, report: FailureReport) -> None:
    """Append a report to the run's `failure.txt`, unless the file already contains it.

    If writing fails, no error is raised, because a full disk may be why the run failed.
    """
    path = directory / FAILURE
    with contextlib.suppress(OSError):
        if path.exists() and report.text in path.read_text("utf-8", errors="replace"):
            return
        # Escape invalid characters, because a message may contain a file name that is not UTF-8.
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {report.text}\n\n")


def _read_ranks(folder: Path, known: Iterable[FailedRank], *, is_over: bool) -> list[RankState]:
    """Return what is known about every rank that wrote a position, a stack or a failure.

    Args:
        folder: The folder of failure records.
        known: Failures that the caller knows.
        is_over: Whether all processes of the run have ended.
    """
    positions = read_positions(folder)
    failures = {failure.rank: failure for failure in known} | read_failures(folder)
    sizes = [found.world_size for found in (*positions.values(), *failures.values())]
    size = max(sizes, default=0)
    ranks: list[RankState] = []
    for rank in range(size):
        at, stacks = positions.get(rank), read_stack(folder, rank)
        if not (at or stacks or rank in failures):
            continue
        failure = failures.get(rank) or _fatal(folder, rank, size, stacks)
        life = _life(at, is_over=is_over) if at else _Life.GONE
        state = RankState(
            rank=rank, world_size=size, at=at, failure=failure, life=life, stacks=stacks
        )
        ranks.append(state)
    return ranks


def _fatal(folder: Path, rank: int, size: int, stacks: str) -> FailedRank | None:
    """Return the failure of a rank that a fatal signal ended (such as SIGABRT); None if none did.

    Args:
        folder: The folder of failure records.
        rank: The rank.
        size: Number of ranks of the run.
        stacks: Stacks that the rank wrote.
    """
    if not (signal := fatal_error(stacks)):
        return None
    time_s = stack_path(folder, rank).stat().st_mtime
    return FailedRank(
        rank=rank, world_size=size, kind=FailureKind.DIED, error=f"died: {signal}", time_s=time_s
    )


def _life(at: SeenPosition, *, is_over: bool) -> _Life:
    """Return whether the rank that wrote a position still works.

    A process on another machine cannot be seen; it counts as running unless the run is over.
    """
    if at.has_ended:
        return _Life.ENDED
    if at.host != socket.gethostname():
        return _Life.GONE if is_over else _Life.RUNS
    # If the start time differs, another process has got the same process id.
    if process_start(at.pid) != at.started:
        return _Life.GONE
    lives = {ProcessState.STOPPED: _Life.STOPPED, ProcessState.GONE: _Life.GONE}
    return lives.get(process_state(at.pid), _Life.RUNS)


def _cause(ranks: Sequence[RankState]) -> tuple[list[RankState], str]:
    """Return the ranks that caused the failure, and words for how they failed."""
    failed = sorted((s for s in ranks if s.failure), key=lambda s: s.failure.time_s)  # type: ignore
    causes = [s for s in failed if not (s.is_consequence or s.is_wordless)]
    died = [s for s in causes if s.failure and s.failure.kind == FailureKind.DIED]
    if died and died[0].failure and causes[0].failure:
        later_s = died[0].failure.time_s - causes[0].failure.time_s
        # If a rank raised an error more than a second before the first rank died, the error is the
        # cause. Otherwise the death is the cause, because launchers notice it up to a second late.
        if later_s <= _NOTICED_S:
            return died, died[0].failure.error
    if causes and causes[0].failure:
        return causes[:1], f"failed: {causes[0].failure.error}"
    if wordless := [s for s in ranks if s.is_wordless]:
        return wordless, _wordless(wordless, ranks)
    alive = [s for s in ranks if s.failure is None and s.life != _Life.ENDED and s.stacks]
    if not_waiting := [s for s in alive if not s.waits]:
        return not_waiting, "has not joined the collective that others waited for"
    failure = failed[0].failure
    return failed[:1], f"failed: {failure.error if failure else ''}"


def _wordless(wordless: Sequence[RankState], ranks: Sequence[RankState]) -> str:
    """Return in words why ranks without an error and a stack may have ended.

    Args:
        wordless: The ranks that left neither an error nor a stack.
        ranks: All ranks.
    """
    first = wordless[0]
    if first.failure is not None:
        return first.failure.error
    if first.life == _Life.STOPPED:
        return "gave no sign of life: its process is stopped"
    if len(wordless) == len(ranks) > 1:
        return (
            "ended without an error message, as all ranks did: they or their launcher were killed"
        )
    return "ended without an error message: it was killed, ran out of memory, or its node was lost"


def _about(seen: RankState, directory: Path) -> list[str]:
    """Return the lines of the failure report about a rank that caused the failure."""
    lines: list[str] = []
    if seen.at is not None:
        since = datetime.fromtimestamp(seen.at.changed_s).strftime("%H:%M:%S")
        preposition = "last seen in" if seen.is_wordless or _has_died(seen) else "in"
        lines = [f"  {preposition} {seen.where} (since {since})", f"  {seen.at.place}"]
    elif seen.failure and seen.failure.position:
        lines = [f"  in {seen.where}"]
    if seen.failure and seen.failure.kind == FailureKind.RAISED:
        return lines + _tail(seen.failure.traceback[-_LAST_LINES:], "last lines of its traceback")
    lines += _tail(seen.stack[:_LAST_LINES], "its stack, most recent call first")
    return lines + _tail(_log_lines(directory, seen.rank), "last lines of its log")


def _has_died(seen: RankState) -> bool:
    return seen.failure is not None and seen.failure.kind == FailureKind.DIED


def _log_lines(directory: Path, rank: int) -> list[str]:
    try:
        text = (directory / LOGS / f"rank-{rank}.log").read_text("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-_LAST_LINES:]


def _flight(directory: Path, records: Path) -> list[str]:
    """Return the report's line that names the files of NCCL's flight recorder; [] without files.

    Files that were written before the run's most recent start do not count.

    Args:
        directory: The run's folder.
        records: The folder of failure records of the run's most recent start.
    """
    path = directory / LOGS / f"{FLIGHT_RECORDS}*"
    if not records.exists():
        return []
    dumped = [found.stat().st_mtime for found in path.parent.glob(path.name)]
    if any(time_s > began_s(records) for time_s in dumped):
        return [f"NCCL's last operations: {path} (torchfrtrace reads them)"]
    return []


def _failed_first(seen: RankState) -> tuple[bool, float, int]:
    """Return a sort key: failed ranks come first, by time of failure, then the others by rank."""
    return seen.failure is None, seen.failure.time_s if seen.failure else 0.0, seen.rank


def _line(seen: RankState) -> str:
    """Return the line of the failure report about a rank that did not cause the failure."""
    what = "was running"
    if seen.failure and seen.failure.kind == FailureKind.RAISED:
        what = f"then failed: {seen.failure.error}"
    elif seen.failure:
        what = f"then {seen.failure.error}"
    elif seen.life == _Life.ENDED:
        what = "had ended"
    elif seen.is_wordless:
        what = "ended without an error message"
    return f"rank {seen.rank} {what} (in {seen.where})"


def _listed(ranks: Sequence[int]) -> str:
    """Return the first `_MOST_OTHERS` rank numbers as text, and how many more there are."""
    more = len(ranks) - _MOST_OTHERS
    return ", ".join(map(str, ranks[:_MOST_OTHERS])) + f" and {more} more" * (more > 0)


def _more(ranks: Sequence[RankState]) -> list[str]:
    """Return a line that says how many ranks the report leaves out; [] if it lists all of them."""
    return [f"and {len(ranks) - _MOST_OTHERS} more ranks"] * (len(ranks) > _MOST_OTHERS)


def _tail(lines: list[str], title: str) -> list[str]:
    """Return the title followed by the lines, indented; [] if there are no lines."""
    return [f"  {title}:", *(f"    {line}" for line in lines)] if lines else []
