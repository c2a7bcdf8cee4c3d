"""Tests whole training runs over NCCL: eight ranks share one GPU (`tests.gpu.one_gpu`)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.gpu_hour.runs import toml_of
from tests.gpu.one_gpu import ENVIRONMENT
from tests.parallel.test_world_torchrun import free_port
from wlb.prepare.synthetic import prepare_synthetic
from wlb.report.run.records import read_run

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU: none here"),
]

STEPS = 6
WINDOW = 2048
EIGHT = ["parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.dp=1", "pp.virtual_stages=2"]
OTHER_EIGHT = ["parallel.tp=1", "parallel.cp=4", "parallel.pp=1", "parallel.dp=2"]


def write_run(folder: Path) -> Path:
    """Writes a store of documents of the paper's lengths, and the TOML of a run on them."""
    store = folder / "documents"
    prepare_synthetic(store, family="wlb_paper", num_tokens=200_000, window=WINDOW, seed=0)
    path = folder / "run.toml"
    keys: dict[str, object] = {
        "run.name": "shared",
        "run.device": "cuda",
        "run.output_dir": str(folder / "runs"),
        "model.vocab_size": 512,
        "model.hidden_size": 256,
        "model.num_layers": 4,
        "model.num_heads": 8,
        "model.num_kv_heads": 4,
        "model.ffn_hidden_size": 512,
        "data.store": str(store),
        "data.context_window": WINDOW,
        "data.num_windows": 4,
        "kernels.deterministic": True,
        "training.dtype": "bfloat16",
        "training.steps": STEPS,
        "training.warmup_steps": 1,
        "checkpoint.interval": 3,
    }
    path.write_text(toml_of(keys), "utf-8")
    return path


def train(path: Path, world_size: int, *arguments: str) -> None:
    """Runs `wlb train` on ranks that each take this GPU and a host of their own for NCCL."""
    port = str(free_port())
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "NCCL_HOSTID": f"host-of-rank-{rank}",
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "wlb", "train", str(path), *arguments]
        ranks.append(subprocess.Popen(command, env=environment))
    assert [rank.wait(timeout=600) for rank in ranks] == [0] * world_size


def losses(folder: Path, name: str) -> dict[int, float]:
    """Returns the loss of each step of a run, as it was trained last."""
    return {s.step: s.measured.loss for s in read_run(folder / "runs" / name).steps}


def half_done(folder: Path, name: str) -> str:
    """Makes a copy of the first run as it was in the middle, and returns its name."""
    copy = shutil.copytree(folder / "runs" / "shared", folder / "runs" / name)
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08d}")
    return name


def test_a_run_in_four_dimensions_over_nccl_trains_and_resumes(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    train(path, 8, "--set", *EIGHT)
    whole = losses(tmp_path, "shared")
    assert len(whole) == STEPS

    # One process computes the same model on the same documents.
    train(path, 1, "--set", "parallel.dp=1", "run.name=alone")
    assert losses(tmp_path, "alone") == pytest.approx(whole, rel=5e-3)

    # The second half again, from the checkpoint in the middle: the same bits.
    train(path, 8, "--resume", "auto", "--set", f"run.name={half_done(tmp_path, 'again')}", *EIGHT)
    assert losses(tmp_path, "again") == whole

    # And in another layout, which reads the same checkpoint.
    name = half_done(tmp_path, "other")
    train(path, 8, "--resume", "auto", "--set", f"run.name={name}", *OTHER_EIGHT)
    assert losses(tmp_path, "other") == pytest.approx(whole, rel=5e-3)
