"""Compose the report of a failed run from the states of all ranks that rank 0 knows."""

from dataclasses import dataclass, field
from typing import Any

from wlb.launch.position import describe

_OUT_OF_TIME = ("timed out", "timeout", "Timed out", "Timeout")
_MOST_OTHERS = 16
_WAITS = (
    "torch/distributed/",
    "wlb/parallel/collectives.py",
    "wlb/parallel/context_op.py",
    "wlb/train/reduce.py",
    "wlb/train/evaluate.py",
    "wlb/train/telemetry/meter.py",
)
"""Path parts in the innermost stack frames of a rank that waits for other ranks. On CUDA
collectives are asynchronous: a rank waits where it reads their result."""
_INNERMOST = 8


@dataclass(slots=True, kw_only=True)
class RankStatus:
    """State of a rank as rank 0 knows it.

    at: `Position.to_json`. order: its place among the failed ranks, from 1. lines: last lines of
    its traceback or log. is_gone: it said goodbye. is_told: it was told to end.
    """

    rank: int
    place: str
    at: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""
    order: int = 0
    lines: list[str] = field(default_factory=list[str])
    stack: list[str] = field(default_factory=list[str])
    is_dead: bool = False
    is_silent: bool = False
    is_gone: bool = False
    is_told: bool = False

    @property
    def waits(self) -> bool:
        """Whether its main thread waits for other ranks, judging by the innermost frames."""
        return any(part in line for line in self.stack[-_INNERMOST:] for part in _WAITS)

    @property
    def where(self) -> str:
        return describe(self.at) if self.at else "before its first message"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """rank: the cause of the failure. error: one line. text: the whole report."""

    rank: int
    error: str
    text: str


def compose_report(
    ranks: list[RankStatus], world_size: int, *, silence_s: float, stuck_s: float
) -> FailureReport:
    """Name the ranks that caused the failure before those that failed as a consequence."""
    first, what = _cause(ranks, silence_s, stuck_s)
    cause = first[0]
    lines = [f"rank {cause.rank} of {world_size} {what}", *_about(cause)]
    for other in first[1:]:
        lines += [f"rank {other.rank} as well", *_about(other)]
    alike = [s for s in ranks if s not in first and s.failure and s.failure == cause.failure]
    if alike:
        lines.append(f"the same on rank {', '.join(str(s.rank) for s in alike)}")
    rest = sorted(
        (s for s in ranks if s not in first and s not in alike),
        key=lambda s: (not s.failure, s.order, s.rank),
    )
    lines += [_line(seen) for seen in rest[:_MOST_OTHERS]]
    if len(rest) > _MOST_OTHERS:
        lines.append(f"and {len(rest) - _MOST_OTHERS} more ranks")
    missing = sorted(set(range(world_size)) - {seen.rank for seen in ranks})
    if missing:
        lines.append(f"no message ever from rank {', '.join(map(str, missing))}")
    return FailureReport(rank=cause.rank, error=cause.failure or what, text="\n".join(lines))


def rank_zero_gone(
    world_size: int, *, silence_s: float, reporter: RankStatus, lines: list[str]
) -> FailureReport:
    """Report the loss of rank 0, which knew the other ranks' states. silence_s: 0 if it died."""
    what = f"gave no sign of life for {silence_s:g} s" if silence_s else "died"
    text = [f"rank 0 of {world_size} {what}; the other ranks reported to it", *_tail(lines, "log")]
    return FailureReport(rank=0, error=what, text="\n".join([*text, _line(reporter)]))


def _cause(
    ranks: list[RankStatus], silence_s: float, stuck_s: float
) -> tuple[list[RankStatus], str]:
    """Return the ranks that caused the failure, and what they did."""
    if dead := [s for s in ranks if s.is_dead and not s.failure]:
        return dead, "died"
    if silent := [s for s in ranks if s.is_silent]:
        return silent, f"gave no sign of life for {silence_s:g} s (stopped, or its node is lost)"
    failed = sorted((s for s in ranks if s.failure), key=lambda s: s.order)
    if failed and not any(word in failed[0].failure for word in _OUT_OF_TIME):
        return failed[:1], f"failed: {failed[0].failure}"
    idle = [s for s in ranks if not (s.failure or s.is_gone or s.is_dead)]
    if apart := [s for s in idle if not s.waits]:
        return apart, f"has not joined the collective that others have waited for ({stuck_s:g} s)"
    if failed:
        return failed[:1], f"failed: {failed[0].failure}"
    return idle, f"waits for other ranks, as all ranks have for {stuck_s:g} s"


def _about(seen: RankStatus) -> list[str]:
    preposition = "last message from" if seen.is_dead or seen.is_silent else "in"
    lines = [f"  {preposition} {seen.where}", f"  {seen.place}"]
    if seen.stack and not seen.failure:
        lines += _tail(seen.stack, "stack")
    return lines + _tail(seen.lines, "traceback" if seen.failure else "log")


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
