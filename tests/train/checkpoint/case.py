"""Shared by tests of checkpoints: configurations of runs that save, and copies of a run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.case import Run, small_spec
from wlb.plan import PlannerState
from wlb.spec import RunSpec
from wlb.train.checkpoint.saver import CheckpointSaver, Saved

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def spec_of(folder: Path, corpus: Path, **sections: dict[str, Any]) -> RunSpec:
    saved = {"interval": 2, "keep": 9, **sections.pop("checkpoint", {})}
    # The learning rate is constant, so that runs of different lengths have equal steps.
    training = {"min_learning_rate": 0.02, **sections.pop("training", {})}
    return small_spec(folder, corpus, checkpoint=saved, training=training, **sections)


def copied(run: Run, folder: Path, corpus: Path, **sections: dict[str, Any]) -> RunSpec:
    """Copies the folder of a run and returns the configuration of a run in the copy."""
    spec = spec_of(folder, corpus, **sections)
    shutil.copytree(run.folder, folder / "runs" / "small")
    return spec


def at(folder: Path, step: int) -> Path:
    return folder / "runs" / "small" / "checkpoints" / f"step-{step:08d}"


def save_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes training in this process wait until each save has finished."""
    save = CheckpointSaver.save

    def waited(
        self: CheckpointSaver, step: int, state: PlannerState | None, **options: Any
    ) -> list[Saved]:
        return save(self, step, state, **options) + self.wait()

    monkeypatch.setattr(CheckpointSaver, "save", waited)
