"""Shared by tests of whole runs: a tiny corpus, a small configuration, and results of a run."""

import json
import random
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from wlb.data import TokenStoreWriter
from wlb.plan import PlannerState
from wlb.spec import RunSpec, Schedule, apply, check
from wlb.train import start
from wlb.train.job import Job
from wlb.train.stores import open_stores, ready

WORDS = (
    "the",
    "a",
    "rank",
    "plan",
    "waits",
    "for",
    "long",
    "short",
    "documents",
    "balance",
    "work",
)


def write_corpus(folder: Path, *, num_files: int = 60, seed: int = 0) -> Path:
    """Writes text files of random words, of which a few are much longer than the others."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        num_words = int(draw.lognormvariate(3.5, 1.0)) + 1
        (folder / f"{i:03d}.txt").write_text(" ".join(draw.choices(WORDS, k=num_words)), "utf-8")
    return folder


def write_store(prefix: Path, lengths: list[int]) -> str:
    """Writes a token store of random documents with these lengths and returns its prefix.

    The vocabulary has 320 tokens.
    """
    draw = np.random.default_rng(0)
    with TokenStoreWriter(prefix, vocab_size=320) as writer:
        for length in lengths:
            writer.add(draw.integers(0, 300, length))
    return str(prefix)


def small_spec(folder: Path, corpus: Path, **sections: dict[str, Any]) -> RunSpec:
    """Returns the configuration of a run of 6 steps on one rank.

    S_max is so large that all documents of a step fit. So the documents of a step depend only on
    the thresholds, and not on prices, which differ between layouts.

    Args:
        folder: Folder in which the run writes to runs.
        corpus: Folder of text files.
        **sections: Overrides by section, as in parallel={"tp": 2}.
    """
    spec = apply(
        RunSpec(),
        {
            "run": {"name": "small", "output_dir": str(folder / "runs"), "device": "cpu"},
            "model": {
                "hidden_size": 32,
                "num_layers": 4,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_hidden_size": 64,
            },
            "parallel": {"dp": 1},
            "pp": {"virtual_stages": 1},
            "data": {
                "corpus": str(corpus),
                "bpe_vocab_size": 320,
                "heldout_fraction": 0.1,
                "context_window": 128,
                "num_windows": 4,
            },
            "packing": {"queue_thresholds": [0.5, 0.9], "s_max": 8.0},
            "training": {
                "steps": 6,
                "learning_rate": 0.02,
                "min_learning_rate": 0.002,
                "warmup_steps": 2,
                "timeout_s": 600.0,
            },
            "eval": {"steps": 1},
        },
        source="small_spec",
    )
    return check(apply(spec, sections, source="small_spec"))


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "one": {},
    "tp2-pp2-v2": {"parallel": {"tp": 2, "pp": 2}, "pp": {"virtual_stages": 2}},
    "cp2-pp2": {"parallel": {"cp": 2, "pp": 2}, "pp": {"schedule": "1f1b"}},
    "cp4-needed": {"parallel": {"cp": 4}, "sharding": {"exchange": "needed"}},
    "tp2-cp2-needed": {"parallel": {"tp": 2, "cp": 2}, "sharding": {"exchange": "needed"}},
    "dp2-tp2": {"parallel": {"dp": 2, "tp": 2}},
    # There are two KV heads, so two TP ranks have a copy of each.
    "tp4-dp2": {"parallel": {"tp": 4, "dp": 2}},
    "pp2-layers-3-1": {"parallel": {"pp": 2}, "pp": {"stage_layers": [3, 1]}},
}


def relaid(spec: RunSpec, layout: str) -> RunSpec:
    """Returns the configuration with one of the LAYOUTS."""
    plain = replace(
        spec,
        parallel=replace(spec.parallel, tp=1, cp=1, pp=1, dp=1),
        pp=replace(spec.pp, schedule=Schedule.INTERLEAVED_1F1B, virtual_stages=1, stage_layers=()),
    )
    return check(apply(plain, LAYOUTS[layout], source=layout))


def job_of(spec: RunSpec) -> Job:
    """Returns the job of a new run, as `start.train` passes it to ranks, and makes its folder.

    The job has no held-out documents.
    """
    stores = open_stores(spec, Console(quiet=True))
    job = Job(
        spec=ready(spec, stores, spec.parallel.world_size),
        train_store=stores.train,
        heldout_store="",
        resume=None,
        title=spec.run.name,
        started_s=0.0,
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    return job


class Run:
    """The files that a run wrote."""

    def __init__(self, spec: RunSpec) -> None:
        self.folder = Path(spec.run.output_dir) / spec.run.name
        text = (self.folder / "metrics.jsonl").read_text("utf-8")
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "step"]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        found = [line for line in self.lines if line["kind"] == "evaluation"]
        return [(line["steps_done"], line["heldout_loss"]) for line in found]

    @property
    def losses(self) -> list[float]:
        return [line["measured"]["loss"] for line in self.steps]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def state(self, step: int) -> PlannerState:
        path = self.folder / "checkpoints" / f"step-{step:08d}" / "planner.json"
        return PlannerState.from_json(json.loads(path.read_text("utf-8")))


def train(spec: RunSpec, *, resume: bool | str = False, verbose: bool = True) -> tuple[Run, str]:
    """Trains a run.

    Args:
        spec: The run.
        resume: True to resume from the newest checkpoint, or a value of `--resume`.
        verbose: Whether the console shows all steps.

    Returns:
        The files of the run, and the text that the starting process printed.
    """
    console = Console(file=StringIO(), width=200)
    resume_from = resume if isinstance(resume, str) else ("" if resume else None)
    start.train(spec, resume=resume_from, console=console, verbose=verbose)
    assert isinstance(console.file, StringIO)
    return Run(spec), console.file.getvalue()
