"""Tests `cut` on two processes: ranks with other samples get as many micro-batches, balanced."""

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from wlb.adapters.rl.own_ranks import Cut, cut
from wlb.plan import UserError

HEAVY = [900, 700, 650, 500, 480, 300, 220, 180, 120, 90, 60, 30]
LIGHT = [400, 300, 250, 200, 150, 100, 80, 60, 50, 40]


def work(lengths: list[int], parts: list[list[int]]) -> np.ndarray:
    return np.array([sum(24576 * lengths[i] + lengths[i] ** 2 for i in part) for part in parts])


def test_a_process_by_itself() -> None:
    parts = cut(HEAVY, Cut(max_tokens=1000))
    assert sorted(i for part in parts for i in part) == list(range(12))
    assert len(parts) == 5
    assert len(cut(HEAVY, Cut(max_tokens=1000, at_least=6, multiple=4))) == 8
    with pytest.raises(UserError, match="sample 0 has 900 tokens"):
        cut(HEAVY, Cut(max_tokens=800))
    with pytest.raises(UserError, match="rank 0 has no sample"):
        cut([], Cut(max_tokens=800))


def one_of_two(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    mine = (HEAVY, LIGHT)[rank]
    found: dict[str, Any] = {"together": cut(mine, Cut(max_tokens=1000), dist.group.WORLD)}
    found["alone"] = cut(mine, Cut(max_tokens=1000, in_step=False), dist.group.WORLD)
    pairs = [i // 2 for i in range(len(mine))]
    found["pairs"] = cut(mine, Cut(max_tokens=1700, atoms=pairs), dist.group.WORLD)
    try:
        cut(mine, Cut(max_tokens=800))
    except UserError as error:
        found["refused"] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.process
def test_ranks_with_other_samples_get_as_many_micro_batches(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(one_of_two, (port, str(tmp_path)), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    first, second = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    for name in ("together", "pairs"):
        assert len(first[name]) == len(second[name])
        assert sorted(i for p in first[name] for i in p) == list(range(12))
        assert sorted(i for p in second[name] for i in p) == list(range(10))
    assert len(first["alone"]) == 5
    assert len(second["alone"]) == 2, "by itself the light rank needs fewer"
    for part in (*first["pairs"], *second["pairs"]):
        assert {i ^ 1 for i in part} == set(part)
    slots = np.stack([work(HEAVY, first["together"]), work(LIGHT, second["together"])])
    slowest = slots.max(0).sum()
    assert slowest < 1.02 * slots[0].sum(), "the light rank never makes the heavy one wait"
    assert first["refused"] == second["refused"], "all ranks refuse, so that none hangs"
    assert "sample 0 has 900 tokens" in first["refused"]
