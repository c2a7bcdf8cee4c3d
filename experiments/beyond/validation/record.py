"""Stores the measurements of each part of the validation in a JSON file beside the results page.

The parts can be run separately. Each run replaces the file of its part, and the page is made from
all files.
"""

import json
import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from experiments.harness.pages import commit
from wlb.cost.machine import cpu_name

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where and when a part was measured."""

    commit: str
    date: str
    machine: str  # name of the CPU
    cores: int
    load: tuple[float, float]  # load averages of one minute, before and after the part

    @classmethod
    def parse(cls, data: dict[str, Any]) -> "Conditions":
        return cls(**{**data, "load": tuple(data["load"])})

    def words(self) -> str:
        before, after = self.load
        return (
            f"Measured on {self.date} at commit {self.commit} on {self.cores} cores "
            f"({self.machine}); load average of one minute {before:.1f} before and {after:.1f} "
            f"after."
        )


def load_now() -> float:
    """Returns the load average of the last minute: processes that run or wait for a core."""
    return os.getloadavg()[0]


def conditions(load_before: float) -> Conditions:
    return Conditions(
        commit=commit(),
        date=date.today().isoformat(),
        machine=cpu_name(),
        cores=os.cpu_count() or 1,
        load=(load_before, load_now()),
    )


def save(part: str, data: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    (RESULTS / f"{part}.json").write_text(text, "utf-8")


def saved(part: str) -> dict[str, Any] | None:
    path = RESULTS / f"{part}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None
