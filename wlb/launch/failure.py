"""The report of ranks that ended a run, from what rank 0 saw of all of them."""

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
"""Parts of a file's path: what waits for other ranks has one of them in the end of its stack. On
CUDA collectives are only posted, and a rank waits where it reads what came of them."""
_INNERMOST = 8


@dataclass(slots=True, kw_only=True)
class RankStatus:
    """What is known of a rank. at: `Position.to_json`. order: as which rank it failed, from 1.
    lines: the end of its traceback or log. is_gone: it left as it should. is_told: it knows of the
    end."""

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
        """Whether it waits for other ranks, by the end of its main thread's stack."""
        return any(part in line for line in self.stack[-_INNERMOST:] for part in _WAITS)

    @property
    def where(self) -> str:
        return describe(self.at) if self.at else "before it said anything"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """rank: the one that the run ended for. error: in a line. text: everything."""

    rank: int
    error: str
    text: str


def compose_report(
    ranks: list[RankStatus], world_size: int, *, silence_s: float, stuck_s: float
) -> FailureReport:
    """Names the ranks that others failed for, if there are any, before those that complained."""
    first, what = _cause(ranks, silence_s, stuck_s)
    cause = first[0]
    lines = [f"rank {cause.rank} of {world_size} {what}", *_about(cause)]
    for other in first[1:]:
        lines += [f"so did rank {other.rank}", *_about(other)]
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
        lines.append(f"never heard of: rank {', '.join(map(str, missing))}")
    return FailureReport(rank=cause.rank, error=cause.failure or what, text="\n".join(lines))


def rank_zero_gone(
    world_size: int, *, silence_s: float, reporter: RankStatus, lines: list[str]
) -> FailureReport:
    """What is left to say when rank 0, which knows of all, is gone. silence_s: 0 if it died."""
    what = f"gave no sign of life for {silence_s:g} s" if silence_s else "died"
    text = [f"rank 0 of {world_size} {what}; it knew where the others are", *_tail(lines, "log")]
    return FailureReport(rank=0, error=what, text="\n".join([*text, _line(reporter)]))


def _cause(
    ranks: list[RankStatus], silence_s: float, stuck_s: float
) -> tuple[list[RankStatus], str]:
    """Ranks with which it began, and what they did."""
    if dead := [s for s in ranks if s.is_dead and not s.failure]:
        return dead, "died"
    if silent := [s for s in ranks if s.is_silent]:
        return silent, f"gave no sign of life for {silence_s:g} s (stopped, or its node is lost)"
    failed = sorted((s for s in ranks if s.failure), key=lambda s: s.order)
    if failed and not any(word in failed[0].failure for word in _OUT_OF_TIME):
        return failed[:1], f"failed: {failed[0].failure}"
    idle = [s for s in ranks if not (s.failure or s.is_gone or s.is_dead)]
    if apart := [s for s in idle if not s.waits]:
        return apart, f"takes no part in what the others have waited for, {stuck_s:g} s"
    if failed:
        return failed[:1], f"failed: {failed[0].failure}"
    return idle, f"has waited for other ranks for {stuck_s:g} s, as all of them do"


def _about(seen: RankStatus) -> list[str]:
    last = "last heard of " if seen.is_dead or seen.is_silent else ""
    lines = [f"  {last}in {seen.where}", f"  {seen.place}"]
    if seen.stack and not seen.failure:
        lines += _tail(seen.stack, "stack")
    return lines + _tail(seen.lines, "traceback" if seen.failure else "log")


def _tail(lines: list[str], of: str) -> list[str]:
    return [f"  the end of its {of}:", *(f"    {line}" for line in lines)] if lines else []


def _line(seen: RankStatus) -> str:
    what = "was running"
    if seen.failure:
        what = f"then failed: {seen.failure.splitlines()[-1]}"
    elif seen.is_dead:
        what = "then died"
    elif seen.is_gone:
        what = "had ended"
    return f"rank {seen.rank} {what} (in {seen.where})"
