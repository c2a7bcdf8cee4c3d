"""Tests what is refused, or bounded, before ranks train: folders, inputs, ranks that never come."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tests.train.case import small_spec, train, write_corpus
from tests.train.faults.test_recorded_rank_broken import free_port
from wlb.launch.local import RankFailure, run_local
from wlb.parallel import world as worlds
from wlb.parallel.host import host_group
from wlb.parallel.world import World
from wlb.plan import UserError
from wlb.spec import RunSpec, to_toml
from wlb.train import start
from wlb.train.checkpoint.saver import CheckpointError, CheckpointSaver
from wlb.train.checkpoint.shared_folder import refuse_unshared
from wlb.train.faults.stop import Signals


def in_a_folder_of_its_own(world: World, folder: Path) -> None:
    """Lets rank 1 see another `runs`, as nodes do whose disks are their own."""
    mine = folder / f"node-{world.rank}"
    mine.mkdir()
    os.chdir(mine)
    refuse_unshared(Path("runs") / "small", world, within_s=0.5)


def in_the_same_folder(world: World, folder: Path) -> list[str]:
    refuse_unshared(folder / "small", world, within_s=10.0)
    torch.distributed.barrier()
    return os.listdir(folder / "small")


@pytest.mark.full
@pytest.mark.dist
def test_a_folder_that_nodes_do_not_share_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_local(in_a_folder_of_its_own, 2, tmp_path, start_group=True, timeout_s=600)
    told = str(caught.value)
    assert "rank 1: node 0 (" in told
    assert (
        f"does not see the file that rank 0 wrote to {tmp_path}/node-1/runs/small; set run.out"
        in told
    )
    assert "the same error on rank" in told
    found = run_local(in_the_same_folder, 2, tmp_path, start_group=True, timeout_s=600)
    assert found == [[], []]


@pytest.mark.process
def test_a_checkpoint_whose_shards_rank_0_does_not_see_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank of another node hashed lies on that node's own disk."""
    found = CheckpointSaver._all_files

    def and_of_rank_1(self: CheckpointSaver, partial: Path) -> dict[str, dict[str, object]]:
        return {**found(self, partial), "shard-00002.safetensors": {"bytes": 9, "sha256": "0"}}

    monkeypatch.setattr(CheckpointSaver, "_all_files", and_of_rank_1)
    monkeypatch.setattr("wlb.train.checkpoint.folder.SEEN_WITHIN_S", 0.2)
    spec = small_spec(tmp_path, write_corpus(tmp_path / "texts"), training={"steps": 1})
    with pytest.raises(
        CheckpointError,
        match=(
            r"shard-00002\.safetensors is "
            r"missing\. Set run\.out"
        ),
    ):
        train(spec)
    assert not list((tmp_path / "runs" / "small" / "checkpoints").iterdir())


@pytest.mark.full
@pytest.mark.dist
def test_a_rank_that_never_comes_is_not_waited_for_longer_than_a_collective(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, write_corpus(tmp_path / "texts"), training={"timeout_s": 2.0})
    (tmp_path / "run.toml").write_text(
        to_toml(replace(spec, parallel=replace(spec.parallel, tp=2)))
    )
    environment = {
        **os.environ,
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "wlb", "train", str(tmp_path / "run.toml")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1
    assert "2000ms" in done.stderr or "timed out" in done.stderr.lower()


def as_given_ranks(world: World, spec: RunSpec) -> list[float]:
    """Returns how long this rank's collectives may take while it waits for rank 0's answer, and
    when it begins to train.
    """
    limits_s: list[float] = []
    broadcast = dist.broadcast_object_list

    def note(*_: object) -> None:
        group = host_group()
        assert group is not None
        options = group._get_backend(torch.device("cpu")).options
        limits_s.append(options._timeout.total_seconds())

    def waits(*given: Any, **named: Any) -> None:
        note()
        broadcast(*given, **named)

    dist.broadcast_object_list = waits
    start.run_rank = note  # type: ignore[assignment]
    with Signals() as signals:
        console = Console(quiet=True)
        asked = start._Request(
            resume=None, calibrate=None, console=console, started_s=0.0, signals=signals
        )
        start._join_ranks(spec, world, asked)
    return limits_s


@pytest.mark.full
@pytest.mark.dist
def test_a_store_may_take_longer_to_make_than_a_collective_may(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, write_corpus(tmp_path / "texts"), training={"timeout_s": 300.0})
    spec = replace(spec, parallel=replace(spec.parallel, tp=2))
    limits_s = [start.PREPARE_TIMEOUT_S, 300.0]
    assert run_local(as_given_ranks, 2, spec, timeout_s=600) == [limits_s, limits_s]


def _process_or_refusal(refuses: bool) -> int:
    if refuses:
        raise UserError("kernels.fused = triton cannot be used for this run")
    return os.getpid()


@pytest.mark.full
@pytest.mark.process
def test_a_launcher_of_ranks_leaves_gpus_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run tries on a GPU is tried in a process that ends, if ranks are other processes."""
    assert start._in_new_process(_process_or_refusal, False) != os.getpid()
    with pytest.raises(UserError, match=r"kernels\.fused = triton cannot"):
        start._in_new_process(_process_or_refusal, True)

    class Claimed(Exception):
        """Ends a run where its job would be made."""

    probes: list[Any] = []

    def claimed(*args: Any) -> None:
        probes.append(args[-1])
        raise Claimed

    monkeypatch.setattr(start, "_claimed_job", claimed)
    for device in ("cpu", "cuda"):
        choice = worlds.DeviceChoice(device, "")
        monkeypatch.setattr(worlds, "choose_device", lambda *_, choice=choice, **__: choice)
        for dp in (1, 2):
            spec = small_spec(tmp_path, tmp_path / "texts", parallel={"dp": dp})
            with pytest.raises(Claimed):
                start.train(spec, resume=None, console=Console(), signals=Signals())
    here = start.probe_here
    assert probes == [here, here, here, start._in_new_process]
