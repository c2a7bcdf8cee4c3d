"""Kills training runs at random points and counts how often their tokens were trained.

`survive` trains a small run over one epoch of a store. At random moments it kills the launcher by
SIGKILL, which ends all ranks, and starts the run anew with `--resume auto`. After a number of kills
it lets the run end.

The run's ledger and last checkpoint then answer two questions. Did the final weights train every
token of the loader exactly once? Are the losses bit-equal to those of a run that was not killed?
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wlb.data import TokenStoreWriter
from wlb.planner import open_planner
from wlb.spec import RunSpec, apply, check, to_toml
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.telemetry.ledger import Count, count

LAYOUTS = {
    "1 rank": {"parallel": {"dp": 1}},
    "DP 2": {"parallel": {"dp": 2}},
    "CP 2": {"parallel": {"cp": 2}},
    "PP 2": {"parallel": {"pp": 2}, "pp": {"schedule": "1f1b"}},
}
LONGEST_S = 0.8
"""Longest time, after the first step that follows a start, until the run is killed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one layout."""

    kills: int  # number of kills
    resumed: int  # kills after which there was a complete checkpoint
    count: Count  # tokens trained once, never, and repeatedly
    same_losses: bool  # whether losses equal those of the run that was not killed


def write_store(prefix: Path, num: int) -> str:
    """Writes a store of documents with heavy-tailed lengths, some longer than the window."""
    draw = np.random.default_rng(0)
    with TokenStoreWriter(prefix, vocab_size=320) as writer:
        for length in np.clip(draw.lognormal(3.5, 1.0, num), 2, 400).astype(int):
            writer.add(draw.integers(0, 300, int(length)))
    return str(prefix)


def spec_of(folder: Path, store: str, name: str, layout: str) -> RunSpec:
    spec = apply(
        RunSpec(),
        {
            "run": {"name": name, "output_dir": str(folder / "runs"), "device": "cpu"},
            "model": {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_hidden_size": 64,
            },
            "pp": {"virtual_stages": 1},
            "data": {"store": store, "context_window": 128, "num_windows": 4, "epochs": 1},
            "packing": {"policy": "var_len", "queue_thresholds": [0.5, 0.9]},
            "planner": {"baseline": False},
            "training": {"steps": 100_000, "warmup_steps": 2, "timeout_s": 60.0},
            "eval": {"steps": 0},
            "checkpoint": {"interval": 5, "keep": 2},
            "telemetry": {"ledger": True},
        },
        source="killed_runs",
    )
    return check(apply(spec, LAYOUTS[layout], source=layout))


def start(spec: RunSpec, folder: Path) -> subprocess.Popen[bytes]:
    toml = folder / f"{spec.run.name}.toml"
    toml.write_text(to_toml(spec), "utf-8")
    command = [sys.executable, "-m", "wlb", "train", str(toml), "--resume", "auto"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / f"{spec.run.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_once(spec: RunSpec, folder: Path, draw: random.Random) -> bool:
    """Starts or resumes a run, and kills it a random time after it has begun to train.

    Returns:
        Whether it was killed; False if the run ended before.
    """
    run = Path(spec.run.output_dir) / spec.run.name
    ledger = run / "ledger.jsonl"
    before = size_of(ledger)
    process = start(spec, folder)
    while process.poll() is None and size_of(ledger) <= before + 100:
        time.sleep(0.01)
    end = time.monotonic() + draw.uniform(0.0, LONGEST_S)
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    if process.poll() is not None:
        if process.returncode:
            raise RuntimeError(f"the run failed by itself; {folder / spec.run.name}.log says why")
        return False
    # This kills only the launcher. Ranks have their own process groups, but end when it dies.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.3)
    return True


def losses_of(run: Path) -> dict[int, float]:
    """Returns the loss of each step; if a step was trained several times, the last loss."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a kill can leave an incomplete line
        if record["kind"] == "step":
            found[record["measured"]["step"]] = record["measured"]["loss"]
    return found


def survive(folder: Path, store: str, layout: str, *, kills: int, seed: int) -> Outcome:
    """Kills a run `kills` times, lets it end, and compares it with a run that was not killed."""
    draw = random.Random(seed)
    name = layout.lower().replace(" ", "-")
    straight = spec_of(folder, store, f"{name}-straight", layout)
    process = start(straight, folder)
    if process.wait():
        raise RuntimeError(f"{straight.run.name} failed; its log in {folder} says why")
    spec = spec_of(folder, store, name, layout)
    checkpoints = Path(spec.run.output_dir) / name / "checkpoints"
    done = resumed = 0
    while done < kills:
        if not kill_once(spec, folder, draw):
            raise RuntimeError(f"{name} ended after {done} of {kills} kills; give it more data")
        done += 1
        resumed += bool(checkpoint.list_complete(checkpoints))
    process = start(spec, folder)
    if process.wait():
        raise RuntimeError(f"{name} did not end well; its log in {folder} says why")
    run = Path(spec.run.output_dir) / name
    filled = replace(spec, model=replace(spec.model, vocab_size=320))
    state = checkpoint.planner_state(checkpoint.list_complete(checkpoints)[-1])
    counted = count(run, open_planner(filled, store, "cpu"), state)
    other = Path(spec.run.output_dir) / straight.run.name
    return Outcome(
        kills=done, resumed=resumed, count=counted, same_losses=losses_of(run) == losses_of(other)
    )
