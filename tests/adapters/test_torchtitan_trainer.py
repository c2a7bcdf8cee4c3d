"""Tests torchtitan's own Trainer with `BalancedDataLoader`, on processes that torchrun starts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchtitan", reason="needs the extra [torchtitan]")

from tests.train.case import write_store

STEPS, SAVED = 20, 10
LENGTHS = np.clip(np.random.default_rng(4).lognormal(3.6, 0.9, 200).astype(int) + 1, 1, 400)
LAYOUTS = [
    pytest.param({"micro_batches": 2}, 1, marks=pytest.mark.nightly, id="one process"),
    pytest.param({"micro_batches": 2, "shard": 2}, 2, id="FSDP 2"),
    pytest.param({"micro_batches": 4, "pp": 2}, 2, id="PP 2"),
]


def launch(out: Path, ranks: int, **run: Any) -> list[dict[str, Any]]:
    """Runs the processes and returns what each wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", "tests.adapters.titan_trainer", json.dumps({"out": str(out), **run})]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", *program], capture_output=True, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{r}.json").read_text("utf-8")) for r in range(ranks)]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_it_trains_as_documents_one_by_one_and_resumes_exactly(
    tmp_path: Path, layout: dict[str, int], ranks: int
) -> None:
    """Loss and gradients of a step before and of one after the checkpoint, and all bits after
    it.
    """
    out = tmp_path / "out"
    out.mkdir()
    store = write_store(tmp_path / "store", LENGTHS.tolist())
    run: dict[str, Any] = {"store": store, "steps": STEPS, "save_at": SAVED, **layout}
    whole = launch(out, ranks, **run)
    shutil.rmtree(out / "checkpoint" / f"step-{STEPS}")
    rest = launch(out, ranks, checked=SAVED + 2, **run)
    for before, after in zip(whole, rest, strict=True):
        assert before["step"] == after["step"] == STEPS
        assert len(before["losses"]) == STEPS
        assert after["losses"] == {str(k): before["losses"][str(k)] for k in range(11, 21)}
        assert before["digest"] == after["digest"]
    # The last rank has the loss; with a pipeline the others have -1.
    for compared in (whole[-1]["compared"], rest[-1]["compared"]):
        assert compared["documents"] > 5
        assert compared["loss"] < 1e-6
        assert compared["gradient"] < 1e-5
    losses = [whole[-1]["losses"][str(k)] for k in (1, STEPS)]
    assert losses[1] < losses[0]
