"""The input of every part of gpu_hour, `Setting`, and its result, `Answer`."""

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
    """The measurement agrees with the claim."""
    DIFFERS = "differs"
    """The measured value is outside the tolerance, but nothing is broken."""
    FAILED = "failed"
    """Something is broken: a result is wrong, or a run ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The device that gpu_hour uses, and the folder that it writes to."""

    folder: Path  # folder of results, with a subfolder for each part
    device: str  # "cuda" or "cpu"
    gpus: int  # number of GPUs; 0 on a CPU
    quick: bool  # whether parts run in their short forms

    def of(self, part: str) -> Path:
        """Returns the folder of a part, which is made if it is missing."""
        path = self.folder / part
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def profile(self) -> Path:
        """Returns the path of the kernel profile that the part `profile` writes."""
        return self.folder / "profile" / "profile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table of claims."""

    claim: str  # what is claimed, in words
    claimed: str  # claimed or predicted value with its unit
    measured: str  # measured value with its unit
    verdict: Verdict


@dataclass(slots=True, kw_only=True)
class Answer:
    """The result of a part."""

    rows: list[Row] = field(default_factory=list[Row])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])  # raw numbers

    def claim(self, claim: str, claimed: str, measured: str, verdict: Verdict) -> None:
        """Adds a row to the table of claims."""
        self.rows.append(Row(claim=claim, claimed=claimed, measured=measured, verdict=verdict))

    def within(
        self, claim: str, claimed: float, measured: float, *, share: float, unit: str
    ) -> None:
        """Adds a row that holds if the claimed value is within `share` of the measured one.

        Args:
            claim: What is claimed, in words.
            claimed: Claimed or predicted value.
            measured: Measured value.
            share: Relative error up to which the claim holds.
            unit: Unit of both values.
        """
        off = claimed / measured - 1
        verdict = Verdict.HOLDS if abs(off) <= share else Verdict.DIFFERS
        said = f"{claimed:.4g} {unit} ({off:+.1%})".replace("  ", " ")
        self.claim(claim, said, f"{measured:.4g} {unit}".strip(), verdict)


def emptied_runs(folder: Path) -> Path:
    """Removes runs of an earlier try from a part's folder and returns the folder.

    Left there, they would be resumed, or counted as results of this try.
    """
    shutil.rmtree(folder / "runs", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def python(
    *arguments: str, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs `python ARGUMENTS` in the repository's root; its output goes to the part's log.

    Args:
        *arguments: Command-line arguments of the interpreter.
        check: Whether an exit status other than 0 raises CalledProcessError.
        env: Environment variables on top of this process's.
    """
    print("+", *arguments, flush=True)
    command: Sequence[str] = (sys.executable, *arguments)
    return subprocess.run(command, cwd=ROOT, check=check, env={**os.environ, **(env or {})})
