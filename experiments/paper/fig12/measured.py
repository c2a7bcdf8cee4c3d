"""Reads measured speed-ups of finished runs into the table format of the simulated ones.

A run is a folder that `wlb train` wrote: `metrics.jsonl` has one line per step, and the last
checkpoint has the settings that tell which system it was.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from experiments.harness.pages import Table

WARMUP_STEPS = 3
"""This many first steps of a run are left out."""
SYSTEM_OF = {"original": "plain_4d", "fixed": "fixed_4d", "var_len": "paper", "bounded": "wlb"}
"""A run's packing policy tells its system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds the means of one run, without its first steps."""

    folder: Path
    system: str
    steps: int
    tokens_per_s: float
    step_s: float
    imbalance: float


def read_run(folder: Path) -> Measured:
    """Reads a run; raises ValueError naming the folder if it is no finished run."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run: it has no metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    trained = [line for line in lines if line.get("kind") == "step"]
    steps = [line["measured"] for line in trained][WARMUP_STEPS:]
    timed = [s for s in steps if s.get("step_time_s")]
    if not timed:
        raise ValueError(f"{folder} has no timed step after the first {WARMUP_STEPS}")
    seconds = sum(s["step_time_s"] for s in timed)
    return Measured(
        folder=folder,
        system=_system(folder),
        steps=len(timed),
        tokens_per_s=sum(s["num_tokens"] for s in timed) / seconds,
        step_s=seconds / len(timed),
        imbalance=_mean([s["imbalance"] for s in timed if s.get("imbalance")]),
    )


def measured_table(folders: list[Path]) -> Table:
    """Returns speed-ups over Plain-4D's run, or over the first run if there is none of Plain-4D."""
    runs = [read_run(folder) for folder in folders]
    baseline = next((r for r in runs if r.system == "plain_4d"), runs[0])
    return Table(
        name="measured",
        title=f"Measured, over {baseline.folder.name}",
        columns=["run", "system", "steps", "s/step", "tokens/s", "imbalance", "speed-up"],
        rows=[
            [
                r.folder.name,
                r.system,
                r.steps,
                r.step_s,
                r.tokens_per_s,
                r.imbalance,
                r.tokens_per_s / baseline.tokens_per_s,
            ]
            for r in runs
        ],
        formats={"s/step": ".3f", "tokens/s": ",.0f", "imbalance": ".3f", "speed-up": ".3f"},
        note="Tokens per second of what was trained; what is held back at the end is not counted.",
    )


def _system(folder: Path) -> str:
    """Returns the system of the last checkpoint's packing policy, or else the folder's name."""
    checkpoints = sorted(folder.glob("checkpoints/step-*/run.json"))
    if not checkpoints:
        return folder.name
    policy = json.loads(checkpoints[-1].read_text("utf-8"))["spec"]["packing"]["policy"]
    return SYSTEM_OF.get(policy, policy)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
