"""Tests ranks of one machine: results, and every way in which a rank can fail."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.sets import nightly
from wlb.launch import local as launch
from wlb.launch.local import RankFailure, run_local
from wlb.parallel import world as worlds
from wlb.parallel.host import new_host_group

pytestmark = pytest.mark.dist


def _alive(pid: int) -> bool:
    """Returns whether a process runs; one that waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _assert_gone(pids: list[int], within_s: float = 300.0) -> None:
    end = time.monotonic() + within_s
    while time.monotonic() < end and any(map(_alive, pids)):
        time.sleep(0.02)
    assert [pid for pid in pids if _alive(pid)] == []


def _note_pid(world: worlds.World, folder: str) -> None:
    Path(folder, str(world.rank)).write_text(str(os.getpid()))


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in folder.iterdir()]


def _sum_of_ranks(world: worlds.World, factor: int) -> torch.Tensor:
    total = torch.tensor([float(world.rank * factor)])
    dist.all_reduce(total)
    return total


def _own_group(world: worlds.World) -> tuple[int, bool, int, str]:
    started = dist.is_initialized()
    worlds.init(world, torch.device("cpu"), timeout_s=600)
    return dist.get_rank(), started, torch.get_num_threads(), os.environ["WLB_TEST"]


def _raise_on_rank_2(world: worlds.World) -> None:
    if world.rank == 2:
        raise KeyError("no such document")
    dist.all_reduce(torch.zeros(1))


def _hang_on_rank_1(world: worlds.World, folder: str) -> str:
    _note_pid(world, folder)
    if world.rank == 1:
        time.sleep(600)
    return "done"


def _die_on_rank_3(world: worlds.World) -> None:
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def _exit_on_rank_0(world: worlds.World) -> None:
    if world.rank == 0:
        os._exit(7)
    time.sleep(600)


def _crash_on_rank_0(world: worlds.World) -> None:
    if world.rank == 0:
        os.abort()
    time.sleep(600)


def _start_a_child_and_fail(world: worlds.World, folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "child").write_text(str(child.pid))
    raise OSError("disk full")


def _unpicklable(world: worlds.World) -> object:
    return lambda: world


def test_results_come_in_rank_order():
    results = run_local(_sum_of_ranks, 4, 10, start_group=True, timeout_s=600)
    assert [float(r) for r in results] == [60.0] * 4


def test_the_function_starts_its_own_group_and_sees_the_environment(monkeypatch):
    monkeypatch.setenv("WLB_TEST", "set after the server started")
    threads = worlds.threads_per_rank(2)
    expected = [(rank, False, threads, "set after the server started") for rank in range(2)]
    assert run_local(_own_group, 2, timeout_s=600) == expected


def test_one_rank():
    assert float(run_local(_sum_of_ranks, 1, 10, start_group=True, timeout_s=600)[0]) == 0.0


def test_the_first_failure_is_the_error():
    with pytest.raises(RankFailure) as caught:
        run_local(_raise_on_rank_2, 4, start_group=True, timeout_s=600)
    assert caught.value.rank == 2
    assert "rank 2 of 4 failed: KeyError: 'no such document'" in str(caught.value)
    assert "in _raise_on_rank_2" in str(caught.value)


@pytest.mark.nightly
def test_a_hang_reports_the_stacks_of_the_ranks_that_run(tmp_path):
    with pytest.raises(RankFailure) as caught:
        run_local(_hang_on_rank_1, 2, str(tmp_path), timeout_s=20.0)
    text = str(caught.value)
    assert "ranks [1] of 2 still ran after 20.0 s" in text
    assert "--- rank 1\n" in text
    assert "in _hang_on_rank_1" in text
    assert "--- rank 0" not in text
    assert "_end_with_parent" not in text
    _assert_gone(_pids(tmp_path))


def test_a_killed_rank_is_reported_before_its_peers():
    with pytest.raises(RankFailure) as caught:
        run_local(_die_on_rank_3, 4, start_group=True, timeout_s=600)
    assert caught.value.rank == 3
    assert "rank 3 of 4 died from SIGKILL (exit code -9)" in str(caught.value)


def test_a_rank_that_leaves_is_reported_with_its_exit_code():
    with pytest.raises(RankFailure, match="rank 0 of 2 died with exit code 7"):
        run_local(_exit_on_rank_0, 2, timeout_s=600)


@pytest.mark.full
def test_a_crash_shows_where(tmp_path):
    with pytest.raises(RankFailure, match="died from SIGABRT") as caught:
        run_local(_crash_on_rank_0, 2, timeout_s=600)
    assert "in _crash_on_rank_0" in str(caught.value)


def test_what_a_failed_rank_started_goes_with_it(tmp_path):
    with pytest.raises(RankFailure, match="OSError: disk full"):
        run_local(_start_a_child_and_fail, 1, str(tmp_path), timeout_s=600)
    _assert_gone(_pids(tmp_path))


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RankFailure, match=r"rank 0 of 1 failed: .*pickle"):
        run_local(_unpicklable, 1, timeout_s=600)


def test_bad_calls_are_refused_before_any_rank_starts():
    with pytest.raises(ValueError, match="world_size = 0 must be at least 1"):
        run_local(_sum_of_ranks, 0)
    with pytest.raises(ValueError, match="give a function defined at the top of a module"):
        run_local(lambda world: None, 2)


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGKILL, *nightly(signal.SIGTERM, signal.SIGINT)])
def test_ranks_end_with_the_launcher(tmp_path, sent):
    script = tmp_path / "sleepers.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys, time
            from pathlib import Path
            from wlb.launch.local import run_local

            def sleep(world, folder):
                Path(folder, str(world.rank)).write_text(str(os.getpid()))
                time.sleep(600)

            if __name__ == "__main__":
                run_local(sleep, 2, sys.argv[1])
        """)
    )
    notes = tmp_path / "pids"
    notes.mkdir()
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(notes)],
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 600
        while (len(pids := _pids(notes)) < 2 or 0 in pids) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(pids) == 2
        launcher.send_signal(sent)
        code = launcher.wait(600)
    finally:
        launcher.kill()
    assert code != 0
    _assert_gone(pids)
    if sent != signal.SIGKILL:
        assert list(tmp_path.glob("wlb.*")) == []


def test_ranks_part_over_their_hosts_group(monkeypatch, tmp_path):
    """The group of all ranks may have no side for CPU tensors, as that of NCCL."""

    def init(world: worlds.World, device: torch.device, *, timeout_s: float) -> None:
        store = dist.HashStore()
        dist.init_process_group("cuda:gloo", store=store, rank=0, world_size=1)
        new_host_group(timeout_s)

    monkeypatch.setattr(worlds, "init", init)
    threads = torch.get_num_threads()
    job = launch._RankJob(
        world=worlds.World(),
        task=launch._pickled_task(_own_rank, ()),
        device="cuda",
        start_group=True,
        group_timeout_s=60.0,
        environment={"OMP_NUM_THREADS": str(threads)},
        records=tmp_path,
    )
    try:
        assert launch._run_task(job) == 0
        assert not dist.is_initialized()
    finally:
        worlds.shutdown()


def _own_rank(world: worlds.World) -> int:
    return dist.get_rank()
