"""`Finding` is the result of one check. `merged` joins the findings of all ranks.

A finding has one of these verdicts:

    skip  The check was not requested, or cannot be made on this machine.
    pass  Nothing is wrong.
    warn  The run would work, but slower than it should, or close to a limit.
    fail  The run would not start, would hang, or would compute wrong numbers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

UNFIT = 3
"""Exit status of `wlb doctor` if a check failed.

It differs from 1, which is also the status of a Python or srun that could not start, and then says
nothing about the nodes."""
_MOST_SHOWN = 3
"""If ranks have different texts for a check, its row of the table shows at most this many."""


class Verdict(StrEnum):
    """Verdict of a check. The members are ordered from the most harmless to the gravest."""

    SKIP = "skip"  # the check was not made
    PASS = "pass"  # nothing is wrong
    WARN = "warn"  # the run would work, but slowly, or close to a limit
    FAIL = "fail"  # the run would not start, would hang, or would compute wrong numbers

    @property
    def gravity(self) -> int:
        """How grave the verdict is, from 0 (SKIP, the most harmless) to 3 (FAIL)."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check, which is shown as one row of the table of findings."""

    check: str  # name of the check, as the table shows it
    verdict: Verdict
    found: str  # what was found, as text for the user
    remedy: str = ""  # what the user can do; never empty for warn and fail
    ranks: tuple[int, ...] = ()  # ranks with this finding; () if all ranks have it

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict in (Verdict.PASS, Verdict.SKIP), self

    def to_json(self) -> dict[str, Any]:
        """Return the finding as a dictionary that can be written as JSON."""
        return {**asdict(self), "verdict": str(self.verdict), "ranks": list(self.ranks)}


def passed(check: str, found: str) -> Finding:
    """Return a finding with the verdict pass."""
    return Finding(check=check, verdict=Verdict.PASS, found=found)


def skipped(check: str, found: str, remedy: str = "") -> Finding:
    """Return a finding with the verdict skip."""
    return Finding(check=check, verdict=Verdict.SKIP, found=found, remedy=remedy)


def warned(check: str, found: str, remedy: str) -> Finding:
    """Return a finding with the verdict warn."""
    return Finding(check=check, verdict=Verdict.WARN, found=found, remedy=remedy)


def failed(check: str, found: str, remedy: str) -> Finding:
    """Return a finding with the verdict fail."""
    return Finding(check=check, verdict=Verdict.FAIL, found=found, remedy=remedy)


def is_failed(findings: Sequence[Finding]) -> bool:
    """Return whether any finding has the verdict fail."""
    return any(finding.verdict == Verdict.FAIL for finding in findings)


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Join the findings of all ranks into one finding per check.

    The joined finding has the gravest verdict of any rank, and names the ranks and hosts with that
    verdict.

    Args:
        by_rank: For each rank, its findings.
        hosts: Name of each rank's host.
    """
    by_check: dict[str, dict[int, Finding]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            by_check.setdefault(finding.check, {})[rank] = finding
    return [_merged(found, hosts) for found in by_check.values()]


def _merged(by_rank: dict[int, Finding], hosts: Sequence[str]) -> Finding:
    """Join the findings of one check into one finding.

    `by_rank` has the finding of each rank that made the check, and `hosts` the name of each rank's
    host.
    """
    worst = max((finding.verdict for finding in by_rank.values()), key=lambda v: v.gravity)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, finding in by_rank.items():
        if finding.verdict == worst:
            ranks_by_text.setdefault(finding.found, []).append(rank)
    first = by_rank[next(iter(ranks_by_text.values()))[0]]
    ranks = tuple(sorted(rank for group in ranks_by_text.values() for rank in group))
    shown = () if len(ranks) == len(hosts) else ranks
    # If all ranks found the same, the text need not say which rank found it.
    if len(ranks_by_text) == 1 and len(ranks) == len(by_rank):
        return replace(first, ranks=shown)
    # Nothing is wrong, so it does not matter that the texts differ. Show one of them.
    if worst in (Verdict.PASS, Verdict.SKIP):
        whose = f"on rank {ranks[0]}; similar on others" if not shown else f"rank {ranges(ranks)}"
        return replace(first, found=f"{first.found} ({whose})", ranks=shown)
    texts = [
        f"rank {ranges(group)} on {', '.join(dict.fromkeys(hosts[r] for r in group))}: {text}"
        for text, group in list(ranks_by_text.items())[:_MOST_SHOWN]
    ]
    if len(ranks_by_text) > _MOST_SHOWN:
        rest = [rank for group in list(ranks_by_text.values())[_MOST_SHOWN:] for rank in group]
        texts.append(f"other texts on rank {ranges(rest)}")
    return replace(first, found="; ".join(texts), ranks=shown)


def ranges(ranks: Sequence[int]) -> str:
    """Return numbers as text, such as "0-3, 7" for 0, 1, 2, 3 and 7; "none" for an empty list."""
    if not ranks:
        return "none"
    ordered = sorted(ranks)
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b > a + 1]
    runs = [ordered[i:j] for i, j in pairwise([0, *breaks, len(ordered)])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
