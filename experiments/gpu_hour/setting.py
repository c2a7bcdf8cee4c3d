"""What every part of the hour is told, and what it answers."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Verdict(StrEnum):
    """What a measurement says about a claim."""

    HOLDS = "holds"
    DIFFERS = "differs"
    """The measurement is outside what was claimed; nothing is broken."""
    FAILED = "failed"
    """Something is wrong: a wrong result, a run that ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where the hour runs and writes."""

    folder: Path
    """Folder of the whole hour; a part writes below its own name in it."""
    device: str
    """"cuda" or "cpu"."""
    gpus: int
    """GPUs that are used; 0 on a CPU."""
    quick: bool
    """Short forms of all parts."""

    def of(self, part: str) -> Path:
        """The folder of a part, which is made if it is missing."""
        path = self.folder / part
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def profile(self) -> Path:
        """The kernel profile that the part `profile` writes."""
        return self.folder / "profile" / "profile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table of claims."""

    claim: str
    claimed: str
    measured: str
    verdict: Verdict


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a part found."""

    rows: list[Row] = field(default_factory=list[Row])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """Raw numbers, as they go to gpu_hour.json."""

    def claim(self, claim: str, claimed: str, measured: str, verdict: Verdict) -> None:
        self.rows.append(Row(claim=claim, claimed=claimed, measured=measured, verdict=verdict))

    def within(
        self, claim: str, claimed: float, measured: float, *, share: float, unit: str
    ) -> None:
        """Adds a row that holds if `measured` is within `share` of `claimed`."""
        off = claimed / measured - 1
        verdict = Verdict.HOLDS if abs(off) <= share else Verdict.DIFFERS
        said = f"{claimed:.4g} {unit} ({off:+.1%})".replace("  ", " ")
        self.claim(claim, said, f"{measured:.4g} {unit}".strip(), verdict)


def emptied_runs(folder: Path) -> Path:
    """A part's folder without the runs of an earlier try, which would be resumed or counted."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def python(
    *arguments: str, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs `python ARGUMENTS` at the repository's root; its output is that of the part.

    env: variables on top of this process's
    """
    print("+", *arguments, flush=True)
    command: Sequence[str] = (sys.executable, *arguments)
    return subprocess.run(command, cwd=ROOT, check=check, env={**os.environ, **(env or {})})
