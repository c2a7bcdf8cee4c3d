"""Tests Megatron-Core's own training loop with `PackedSteps`, on processes that torchrun starts."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # Transformer Engine and Apex are missing
    pytest.importorskip("megatron.core", reason="needs the extra [megatron]")

from tests.train.case import write_store

STEPS, SAVED = 20, 10
LENGTHS = np.clip(np.random.default_rng(4).lognormal(3.6, 0.9, 200).astype(int) + 1, 1, 300)


def launch(out: Path, ranks: int, **run: Any) -> list[dict[str, Any]]:
    """Runs the processes and returns what each wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", "tests.adapters.megatron_trainer", json.dumps({"out": str(out), **run})]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", *program], capture_output=True, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{r}.json").read_text("utf-8")) for r in range(ranks)]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("pp", [1, 2], ids=["DP 2", "PP 2"])
def test_it_trains_as_documents_one_by_one_and_resumes_exactly(tmp_path: Path, pp: int) -> None:
    """Megatron's data parallelism, optimizer, 1F1B with micro-batches of different lengths, and
    distributed checkpoint.
    """
    store = write_store(tmp_path / "store", LENGTHS.tolist())
    run: dict[str, Any] = {"store": store, "steps": STEPS, "pp": pp, "save_at": SAVED}
    whole = launch(tmp_path, 2, **run)
    rest = launch(tmp_path, 2, resume=True, checked=SAVED + 2, **run)
    for before, after in zip(whole, rest, strict=True):
        assert list(before["losses"]) == [str(k) for k in range(1, STEPS + 1)]
        assert after["losses"] == {str(k): before["losses"][str(k)] for k in range(11, 21)}
        assert before["digest"] == after["digest"]
        for compared in (before["compared"], after["compared"]):
            assert compared["documents"] > 8
            assert compared["lengths"] > 1
            assert compared["loss"] < 1e-6
            assert compared["gradient"] < 1e-5
    assert whole[0]["losses"][str(STEPS)] < whole[0]["losses"]["1"]
