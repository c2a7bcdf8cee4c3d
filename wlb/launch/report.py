"""Compose the report of a failed run from the files that its ranks left in the run's folder.

Whoever ends a run calls it: the local launcher, the script of a Slurm job, the next start of the
run, or `wlb report`. The report names the rank that failed first, and says where each rank was.

When a rank fails, its peers fail, too: their collectives time out or lose a connection. Such errors
are consequences and not the cause. The cause is, in this order: a rank that died; a rank that
raised another error; a rank that is gone without a message; a live rank that is not waiting for
others.
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
FAILURE = "failure.txt"  # file of the reports, in the run's folder
FLIGHT_RECORDS = "nccl-rank-"
"""Beginning of the file names of NCCL's flight records in `logs`."""
_LAST_LINES = 20  # of a traceback, stack or log that a report shows
_MOST_OTHERS = 16  # ranks that a report lists
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
"""Texts in errors of a rank whose peer is gone or does not join a collective."""
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

They are parts of paths. For torch's pipeline schedules it is the function in which they wait,
because the same file also computes. On CUDA, collectives are asynchronous, so a rank waits where it
reads their result."""
_INNERMOST = 8  # stack frames to search for these texts
_NOTICED_S = 1.0
"""Longest time in seconds until a launcher notices that a rank has died."""


class _Life(Enum):
    """Whether the process of a rank exists."""

    RUNS = auto()
    ENDED = auto()  # it has finished its work
    STOPPED = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What the files say about a rank."""

    rank: int
    world_size: int
    at: SeenPosition | None  # its position; None if it wrote none
    failure: FailedRank | None  # None if it reported no failure
    life: _Life
    # Stack of its main thread, or of all threads at a fatal signal; "" if it wrote none.
    stacks: str

    @property
    def stack(self) -> list[str]:
        """Return the stack of the main thread, most recent call first."""
        return main_stack(self.stacks)

    @property
    def waits(self) -> bool:
        """Return whether its main thread waits for other ranks, by the innermost frames."""
        return any(part in line for line in self.stack[:_INNERMOST] for part in _WAITS)

    @property
    def is_consequence(self) -> bool:
        """Return whether it failed only because another rank did.

        NCCL's watchdog aborts ranks that wait for a failed peer, so an abort in a wait is a
        consequence.
        """
        failure = self.failure
        if failure is None:
            return False
        if failure.kind == FailureKind.DIED:
            return ("SIGABRT" in failure.error or "Aborted" in failure.error) and self.waits
        return failure.kind == FailureKind.RAISED and is_consequence(failure.error)

    @property
    def is_wordless(self) -> bool:
        """Return whether its process is gone or stopped and left no explanation."""
        if self.failure is not None:
            return self.failure.kind == FailureKind.SILENT
        return self.life in (_Life.GONE, _Life.STOPPED) and not self.stacks

    @property
    def where(self) -> str:
        """Return its position in words."""
        if self.at:
            return self.at.describe()
        reported = self.failure.position if self.failure else ""
        return reported or "an unknown place"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Report of a failed run."""

    rank: int  # the rank that failed first
    error: str  # its failure in one line
    text: str  # the whole report


def is_consequence(error: str) -> bool:
    """Return whether an error is one that a rank gets if its peer fails or does not join."""
    return any(part in error for part in _CONSEQUENCES)


def compose_report(
    directory: Path,
    *,
    is_over: bool = True,
    known: Iterable[FailedRank] = (),
    records: Path | None = None,
) -> FailureReport | None:
    """Report what ended a start of a run.

    Args:
        directory: The run's folder.
        is_over: Whether no process of the run is left. Otherwise processes on other machines may
            still work.
        known: Failures that the caller knows. They may be missing in the folder if its disk is
            full.
        records: The start's folder of records; None means the last start.

    Returns:
        The report, or None if all ranks are working or have finished.
    """
    records = newest_records(directory) if records is None else records
    ranks = _read_ranks(records, known, is_over=is_over)
    size = max((seen.world_size for seen in ranks), default=0)
    if not any(seen.failure or seen.is_wordless for seen in ranks):
        return None
    # The ranks that caused the failure come first, with all details.
    first, what = _cause(ranks)
    cause = first[0]
    lines = [f"rank {cause.rank} of {size} {what}", *_about(cause, directory)]
    for other in first[1:_MOST_OTHERS]:
        lines += [f"rank {other.rank} as well", *_about(other, directory)]
    lines += _more(first)
    # Then ranks with the same error, in one line, and then the others, in one line each.
    named = {seen.rank for seen in first}
    error = cause.failure.error if cause.failure else what
    same_error = [
        s for s in ranks if s.failure and s.failure.error == error and s.rank not in named
    ]
    if same_error:
        lines.append(f"the same on rank {_listed([seen.rank for seen in same_error])}")
    named |= {seen.rank for seen in same_error}
    rest = [s for s in ranks if s.rank not in named and (s.at or s.failure)]
    rest.sort(key=_failed_first)
    lines += [*(_line(seen) for seen in rest[:_MOST_OTHERS]), *_more(rest)]
    with_position = {seen.rank for seen in ranks if seen.at}
    if with_position and (
        without_position := sorted(set(range(size)) - {seen.rank for seen in ranks})
    ):
        lines.append(f"no position was written by rank {_listed(without_position)}")
    lines += _flight(directory, records)
    return FailureReport(rank=cause.rank, error=error, text="\n".join(lines))


def keep_report(directory: Path, report: FailureReport) -> None:
    """Append a report to the run's `failure.txt`, unless it is there already.

    A full disk may be the cause of the failure, so failing to write is not an error.
    """
    path = directory / FAILURE
    with contextlib.suppress(OSError):
        if path.exists() and report.text in path.read_text("utf-8", errors="replace"):
            return
        # A message may name a file whose name is not UTF-8.
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {report.text}\n\n")


def _read_ranks(folder: Path, known: Iterable[FailedRank], *, is_over: bool) -> list[RankState]:
    """Return the state of every rank that left anything."""
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
    """Return the failure of a process that a fatal signal ended, such as NCCL's SIGABRT."""
    if not (signal := fatal_error(stacks)):
        return None
    time_s = stack_path(folder, rank).stat().st_mtime
    return FailedRank(
        rank=rank, world_size=size, kind=FailureKind.DIED, error=f"died: {signal}", time_s=time_s
    )


def _life(at: SeenPosition, *, is_over: bool) -> _Life:
    """Return whether the process of a position still exists, as far as this machine can see."""
    if at.has_ended:
        return _Life.ENDED
    if at.host != socket.gethostname():
        return _Life.GONE if is_over else _Life.RUNS
    # Another start time means that the process id was reused.
    if process_start(at.pid) != at.started:
        return _Life.GONE
    lives = {ProcessState.STOPPED: _Life.STOPPED, ProcessState.GONE: _Life.GONE}
    return lives.get(process_state(at.pid), _Life.RUNS)


def _cause(ranks: Sequence[RankState]) -> tuple[list[RankState], str]:
    """Return the ranks that caused the failure, and what they did."""
    failed = sorted((s for s in ranks if s.failure), key=lambda s: s.failure.time_s)  # type: ignore
    causes = [s for s in failed if not (s.is_consequence or s.is_wordless)]
    died = [s for s in causes if s.failure and s.failure.kind == FailureKind.DIED]
    if died and died[0].failure and causes[0].failure:
        later_s = died[0].failure.time_s - causes[0].failure.time_s
        # A rank that raised an error well before the deaths explains them.
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
    """Return in words why ranks that left no explanation may have ended."""
    first = wordless[0]
    if first.failure is not None:
        return first.failure.error
    if first.life == _Life.STOPPED:
        return "gave no sign of life: its process is stopped"
    if len(wordless) == len(ranks) > 1:
        return "ended without a word, as all ranks did: they or their launcher were killed"
    return "ended without a word: it was killed, lacked memory, or its node was lost"


def _about(seen: RankState, directory: Path) -> list[str]:
    """Return the lines about a rank that caused the failure."""
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
    """Return a line on NCCL's flight records, if ranks of this start wrote some."""
    path = directory / LOGS / f"{FLIGHT_RECORDS}*"
    if not records.exists():
        return []
    dumped = [found.stat().st_mtime for found in path.parent.glob(path.name)]
    if any(time_s > began_s(records) for time_s in dumped):
        return [f"NCCL's last operations: {path} (torchfrtrace reads them)"]
    return []


def _failed_first(seen: RankState) -> tuple[bool, float, int]:
    """Sort key: ranks that failed by time, then the others."""
    return seen.failure is None, seen.failure.time_s if seen.failure else 0.0, seen.rank


def _line(seen: RankState) -> str:
    """Return the line about a rank that did not cause the failure."""
    what = "was running"
    if seen.failure and seen.failure.kind == FailureKind.RAISED:
        what = f"then failed: {seen.failure.error}"
    elif seen.failure:
        what = f"then {seen.failure.error}"
    elif seen.life == _Life.ENDED:
        what = "had ended"
    elif seen.is_wordless:
        what = "ended without a word"
    return f"rank {seen.rank} {what} (in {seen.where})"


def _listed(ranks: Sequence[int]) -> str:
    """Return rank numbers as text, cut after `_MOST_OTHERS`."""
    more = len(ranks) - _MOST_OTHERS
    return ", ".join(map(str, ranks[:_MOST_OTHERS])) + f" and {more} more" * (more > 0)


def _more(ranks: Sequence[RankState]) -> list[str]:
    """Return a line that says how many ranks are not listed, if some are not."""
    return [f"and {len(ranks) - _MOST_OTHERS} more ranks"] * (len(ranks) > _MOST_OTHERS)


def _tail(lines: list[str], title: str) -> list[str]:
    """Return lines under an indented title; none if there are no lines."""
    return [f"  {title}:", *(f"    {line}" for line in lines)] if lines else []
