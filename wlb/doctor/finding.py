"""`Finding` is the result of one check, with the remedy; `merged` joins those of all ranks by
check.

fail: the run would not start, would hang, or would compute wrong numbers. warn: it would run, but
slower than it should or close to a limit. skip: it was not asked for, or cannot be seen from here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

UNFIT = 3
"""Exit status of an examination with a fail. 1 is also that of a Python or an srun that cannot
start, which says nothing of the nodes."""
_MOST_SHOWN = 3
"""Different texts of one check that a row shows."""


class Verdict(StrEnum):
    """From harmless to grave; a row of several ranks takes the gravest."""

    SKIP = "skip"
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"

    @property
    def gravity(self) -> int:
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row. ranks: those that found it, if not all did. remedy: what to do; never empty for warn
    and fail.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict in (Verdict.PASS, Verdict.SKIP), self

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict), "ranks": list(self.ranks)}


def passed(check: str, found: str) -> Finding:
    return Finding(check=check, verdict=Verdict.PASS, found=found)


def skipped(check: str, found: str, remedy: str = "") -> Finding:
    return Finding(check=check, verdict=Verdict.SKIP, found=found, remedy=remedy)


def warned(check: str, found: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARN, found=found, remedy=remedy)


def failed(check: str, found: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.FAIL, found=found, remedy=remedy)


def is_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.verdict == Verdict.FAIL for finding in findings)


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """One finding a check, in the order of the first rank that made it: the gravest verdict, with
    the ranks and hosts that found it. hosts: of each rank.
    """
    by_check: dict[str, dict[int, Finding]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            by_check.setdefault(finding.check, {})[rank] = finding
    return [_merged(found, hosts) for found in by_check.values()]


def _merged(by_rank: dict[int, Finding], hosts: Sequence[str]) -> Finding:
    worst = max((finding.verdict for finding in by_rank.values()), key=lambda v: v.gravity)
    alike: dict[str, list[int]] = {}
    for rank, finding in by_rank.items():
        if finding.verdict == worst:
            alike.setdefault(finding.found, []).append(rank)
    first = by_rank[next(iter(alike.values()))[0]]
    ranks = tuple(sorted(rank for group in alike.values() for rank in group))
    shown = () if len(ranks) == len(hosts) else ranks
    if len(alike) == 1 and len(ranks) == len(by_rank):
        return replace(first, ranks=shown)
    if worst in (Verdict.PASS, Verdict.SKIP):
        whose = f"rank {ranks[0]}; others alike" if not shown else f"rank {ranges(ranks)}"
        return replace(first, found=f"{first.found} ({whose})", ranks=shown)
    texts = [
        f"rank {ranges(group)} on {', '.join(dict.fromkeys(hosts[r] for r in group))}: {text}"
        for text, group in list(alike.items())[:_MOST_SHOWN]
    ]
    if len(alike) > _MOST_SHOWN:
        rest = [rank for group in list(alike.values())[_MOST_SHOWN:] for rank in group]
        texts.append(f"and rank {ranges(rest)}")
    return replace(first, found="; ".join(texts), ranks=shown)


def ranges(ranks: Sequence[int]) -> str:
    """ "0-3, 7" for ranks 0, 1, 2, 3 and 7; "none" without ranks."""
    if not ranks:
        return "none"
    ordered = sorted(ranks)
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b > a + 1]
    runs = [ordered[i:j] for i, j in pairwise([0, *breaks, len(ordered)])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
