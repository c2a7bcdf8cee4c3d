"""Tests that torchrun's workers meet again after one of them died."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os
import signal
import torch
import torch.distributed as dist
from wlb.parallel import world as worlds

world = worlds.discover()
worlds.init(world, torch.device("cpu"), timeout_s=60.0)
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"attempt {attempt}: {total.item()}", flush=True)
if attempt == "0":
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
worlds.shutdown()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_ranks_meet_again_after_one_of_them_died(tmp_path: Path, kind: str) -> None:
    """The agent's store outlives its workers, and holds what those before said to each other."""
    (tmp_path / "worker.py").write_text(WORKER, "utf-8")
    meeting = {
        "static": ["--master-addr=127.0.0.1", f"--master-port={free_port()}"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"],
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts=1", *meeting[kind], str(tmp_path / "worker.py")],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 0: 3") == done.stdout.count("attempt 1: 3") == 2
