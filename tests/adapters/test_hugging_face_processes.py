"""Tests of balanced trainers on two processes, which torchrun starts."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs the extra [hf]")
pytest.importorskip("trl", reason="needs the extra [hf]")

from tests.adapters.trainer_worker import EPOCHS


def launch(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs two processes and returns what each wrote."""
    out.mkdir()
    program = Path(__file__).with_name("trainer_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, str(program), str(out), *arguments], capture_output=True, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{r}.json").read_text("utf-8")) for r in range(2)]


@pytest.mark.full
@pytest.mark.dist
def test_two_processes_train_every_row_and_resume_exactly(tmp_path: Path) -> None:
    """They resume in a later epoch, where accelerate's skipping loader would begin with the first
    one's rows.
    """
    whole = launch(tmp_path / "whole")
    assert Counter(whole[0]["seen"] + whole[1]["seen"]) == dict.fromkeys(range(120), EPOCHS)
    per_epoch = whole[0]["steps_per_epoch"]
    saved = sorted(int(p.name.split("-")[1]) for p in (tmp_path / "whole").glob("checkpoint-*"))
    step = next(s for s in saved if per_epoch < s < 2 * per_epoch and s % per_epoch)
    again = launch(tmp_path / "again", str(tmp_path / "whole" / f"checkpoint-{step}"))
    for rank in range(2):
        rest = again[rank]["seen"]
        assert 0 < len(rest) < len(whole[rank]["seen"])
        assert whole[rank]["seen"][-len(rest) :] == rest
        assert again[rank]["steps"] == whole[rank]["steps"]
    assert again[0]["losses"] == whole[0]["losses"]  # the log goes on from the checkpoint's


@pytest.mark.nightly
@pytest.mark.dist
def test_accelerate_dispatches_micro_batches_that_are_filled_up(tmp_path: Path) -> None:
    first, second = launch(tmp_path / "out", "dispatch")
    assert first["same"]
    assert second["same"]
    assert first["batches"] == second["batches"] == first["announced"] > 10
