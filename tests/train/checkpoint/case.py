"""Provides what tests of checkpoints share: specs of runs that save, and copies of a run."""

import shutil
from pathlib import Path
from typing import Any

from tests.train.case import Run, small_spec
from wlb.spec import RunSpec

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def spec_of(folder: Path, corpus: Path, **sections: dict[str, Any]) -> RunSpec:
    saved = {"interval": 2, "keep": 9, **sections.pop("checkpoint", {})}
    # A constant rate: runs of different lengths have the same steps.
    training = {"min_learning_rate": 0.02, **sections.pop("training", {})}
    return small_spec(folder, corpus, checkpoint=saved, training=training, **sections)


def copied(run: Run, folder: Path, corpus: Path, **sections: dict[str, Any]) -> RunSpec:
    """Returns the spec of a run whose folder is a copy of `run`'s."""
    spec = spec_of(folder, corpus, **sections)
    shutil.copytree(run.folder, folder / "runs" / "small")
    return spec


def at(folder: Path, step: int) -> Path:
    return folder / "runs" / "small" / "checkpoints" / f"step-{step:08d}"
