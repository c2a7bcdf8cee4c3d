"""Kills training runs at random points and counts how often their tokens were trained.

`survive` takes a small run over one epoch of a store. It kills the run's launcher (SIGKILL) at a
random moment, with which all ranks end, and starts the run again with `--resume auto`; after a
number of kills the run may end. Its ledger and its last checkpoint answer two questions: was every
token that the loader gave trained exactly once in the lineage of the final weights, and are the
losses those of a run that nobody killed, bit for bit?
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
"""A kill comes at most this many seconds after the first step that follows a start."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds the outcome of one layout."""

    kills: int  # that hit a running process
    resumed: int  # kills after which a complete checkpoint was there
    count: Count  # tokens trained once, never, and repeatedly
    same_losses: bool  # as the run that was not killed


def write_store(prefix: Path, num: int) -> str:
    """Writes documents of a heavy-tailed distribution, some longer than the window."""
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
    """Starts or resumes the run, waits until it trains and a random while more, and kills it.

    Returns False if the run ended first.
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
    # This kills the launcher alone: ranks lead their own process groups, and end when it dies.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.3)
    return True


def losses_of(run: Path) -> dict[int, float]:
    """Returns losses by step; the last one of a step that was trained several times."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            # A kill can leave half a line.
            continue
        if record["kind"] == "step":
            found[record["measured"]["step"]] = record["measured"]["loss"]
    return found


def survive(folder: Path, store: str, layout: str, *, kills: int, seed: int) -> Outcome:
    """Kills a run `kills` times, lets it end, and counts its tokens."""
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
