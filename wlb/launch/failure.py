"""Compose the report of a failed run from the states of all ranks that the root knows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wlb.launch.position import Snapshot

LAST_LINES = 20
_OUT_OF_TIME = ("timed out", "timeout", "Timed out", "Timeout")
_MOST_OTHERS = 16
_WAITS = (
    "torch/distributed/",
    "wlb/parallel/collectives.py",
    "wlb/parallel/context_op.py",
    "wlb/train/reduce.py",
    "wlb/train/evaluate.py",
    "wlb/parallel/warm.py",
)
"""Path parts in the innermost stack frames of a rank that waits for other ranks. On CUDA
collectives are asynchronous: a rank waits where it reads their result."""
_INNERMOST = 8


@dataclass(slots=True, kw_only=True)
class RankStatus:
    """State of a rank as the root knows it. order: its index among the failed ranks, from 1. lines:
    last lines of its traceback or log. is_gone: it said goodbye. has_report, has_written: it
    received the report, and wrote it."""

    rank: int
    place: str
    at: Snapshot | None = None
    failure: str = ""
    order: int = 0
    lines: list[str] = field(default_factory=list[str])
    stack: list[str] = field(default_factory=list[str])
    is_dead: bool = False
    is_silent: bool = False
    is_gone: bool = False
    has_report: bool = False
    has_written: bool = False

    @property
    def waits(self) -> bool:
        """Whether its main thread waits for other ranks, judging by the innermost frames."""
        return any(part in line for line in self.stack[-_INNERMOST:] for part in _WAITS)

    @property
    def where(self) -> str:
        return self.at.describe() if self.at else "a place of which no message came"

    @property
    def is_lost(self) -> bool:
        return self.is_dead or self.is_silent


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorLoss:
    """A node's aggregator that died, or fell silent. name: its process, in words. ranks: those that
    reported to it."""

    ranks: tuple[int, ...]
    name: str
    is_silent: bool

    def describe(self, silence_s: float) -> str:
        """For example "the watch of rank 8, 9 (process 77 on gpu2) died"."""
        what = f"gave no sign of life for {silence_s:g} s" if self.is_silent else "died"
        return f"the watch of rank {_listed(self.ranks)} ({self.name}) {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """rank: the cause of the failure. error: one line. text: the whole report."""

    rank: int
    error: str
    text: str


def compose_report(
    ranks: list[RankStatus],
    world_size: int,
    *,
    silence_s: float,
    stuck_s: float,
    losses: Sequence[AggregatorLoss] = (),
    logs: Path | None = None,
) -> FailureReport:
    """Name the ranks that caused the failure before those that failed as a consequence.

    losses: aggregators that were lost; they are the cause if no rank is. logs: folder of the ranks'
    logs, read for ranks without a traceback that the report is about.
    """
    lost = [loss.describe(silence_s) for loss in losses]
    first, what = _cause(ranks, silence_s, stuck_s, is_watch_lost=bool(lost))
    lines = [*lost]
    if first:
        cause = first[0]
        lines = [f"rank {cause.rank} of {world_size} {what}", *_about(cause, logs)]
        for other in first[1:_MOST_OTHERS]:
            lines += [f"rank {other.rank} as well", *_about(other, logs)]
        lines += [*_more(first), *lost]
    error = first[0].failure or what if first else lost[0]
    told = {seen.rank for seen in first}
    alike = [s for s in ranks if s.rank not in told and s.failure and s.failure == error]
    told |= {seen.rank for seen in alike}
    if alike:
        lines.append(f"the same on rank {_listed([s.rank for s in alike])}")
    rest = sorted(
        (s for s in ranks if s.rank not in told), key=lambda s: (not s.failure, s.order, s.rank)
    )
    lines += [*(_line(seen) for seen in rest[:_MOST_OTHERS]), *_more(rest)]
    missing = sorted(set(range(world_size)) - {seen.rank for seen in ranks})
    if missing:
        lines.append(f"no message ever from rank {_listed(missing)}")
    rank = first[0].rank if first else losses[0].ranks[0]
    return FailureReport(rank=rank, error=error, text="\n".join(lines))


def report_alone(loss: AggregatorLoss, reporter: RankStatus, *, silence_s: float) -> FailureReport:
    """Report the loss of an aggregator by a rank that reaches no other one."""
    what = loss.describe(silence_s)
    text = [f"{what}; rank {reporter.rank} reports it and knows no other rank", _line(reporter)]
    return FailureReport(rank=loss.ranks[0], error=what, text="\n".join(text))


def _cause(
    ranks: list[RankStatus], silence_s: float, stuck_s: float, *, is_watch_lost: bool
) -> tuple[list[RankStatus], str]:
    """The ranks that caused the failure, and its description; no rank if a watch was lost
    instead."""
    if dead := [s for s in ranks if s.is_dead and not s.failure]:
        return dead, "died"
    if silent := [s for s in ranks if s.is_silent]:
        return silent, f"gave no sign of life for {silence_s:g} s (stopped, or its node is lost)"
    failed = sorted((s for s in ranks if s.failure), key=lambda s: s.order)
    if failed and not any(word in failed[0].failure for word in _OUT_OF_TIME):
        return failed[:1], f"failed: {failed[0].failure}"
    if is_watch_lost:
        return [], ""
    idle = [s for s in ranks if not (s.failure or s.is_gone or s.is_dead)]
    if apart := [s for s in idle if not s.waits]:
        return apart, f"has not joined the collective that others have waited for ({stuck_s:g} s)"
    if failed:
        return failed[:1], f"failed: {failed[0].failure}"
    return idle, f"waits for other ranks, as all ranks have for {stuck_s:g} s"


def _about(seen: RankStatus, logs: Path | None) -> list[str]:
    preposition = "last message from" if seen.is_lost else "in"
    lines = [f"  {preposition} {seen.where}", f"  {seen.place}"]
    if seen.stack and not seen.failure:
        lines += _tail(seen.stack, "stack")
    if seen.failure:
        return lines + _tail(seen.lines, "traceback")
    return lines + _tail(last_lines(logs, seen.rank) if logs is not None else [], "log")


def last_lines(logs: Path, rank: int) -> list[str]:
    try:
        text = (logs / f"rank-{rank}.log").read_text("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-LAST_LINES:]


def _listed(ranks: Sequence[int]) -> str:
    more = len(ranks) - _MOST_OTHERS
    return ", ".join(map(str, ranks[:_MOST_OTHERS])) + f" and {more} more" * (more > 0)


def _more(ranks: Sequence[RankStatus]) -> list[str]:
    return [f"and {len(ranks) - _MOST_OTHERS} more ranks"] * (len(ranks) > _MOST_OTHERS)


def _tail(lines: list[str], of: str) -> list[str]:
    return [f"  last lines of its {of}:", *(f"    {line}" for line in lines)] if lines else []


def _line(seen: RankStatus) -> str:
    what = "was running"
    if seen.failure:
        what = f"then failed: {seen.failure.splitlines()[-1]}"
    elif seen.is_dead:
        what = "then died"
    elif seen.is_gone:
        what = "had ended"
    return f"rank {seen.rank} {what} (in {seen.where})"
