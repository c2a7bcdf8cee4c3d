import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.parallel import gloo_race
from tests.sets import nightly
from wlb.launch.local import run_local
from wlb.parallel import mesh
from wlb.parallel import world as worlds
from wlb.spec import ParallelSpec

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc"),
]


def _workers(world: worlds.World, parallel: ParallelSpec) -> tuple[int, int]:
    """Returns the Gloo groups that this rank is a member of, and worker threads."""
    mesh.build_mesh(parallel, torch.device("cpu"))
    for group in distributed_c10d._world.pg_map:
        dist.barrier(group)  # a thread has its name once it has worked
    return len(distributed_c10d._world.pg_map), gloo_race.num_workers()


@pytest.mark.full
@pytest.mark.dist
def test_each_group_of_a_mesh_has_one_worker():
    parallel = ParallelSpec(tp=2, cp=2, pp=1, dp=1)
    for groups, workers in run_local(_workers, 4, parallel, start_group=True, timeout_s=600):
        assert workers == groups >= 4  # world, tp, cp, dp x cp


EXIT = """
import atexit, sys, torch, torch.distributed as dist
from wlb.parallel import world as worlds
atexit.register(lambda: print("started at exit:", dist.is_initialized()))
worlds.init(worlds.World(), torch.device("cpu"), timeout_s=600)
dist.all_reduce(torch.zeros(4), async_op=True)
"""


@pytest.mark.process
@pytest.mark.full
def test_groups_are_destroyed_before_the_interpreter_ends():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "started at exit: False\n"), done.stderr


EXIT_ON_CUDA = """
import atexit, torch, torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg
from wlb.parallel import host, world as worlds

def left():
    return sorted(dist.get_backend(group) for group in distributed_c10d._world.pg_map)

init = dist.init_process_group
dist.init_process_group = lambda _, **how: init("fake", **{**how, "device_id": None})
torch.cuda.set_device = lambda device: None
atexit.register(lambda: print("at exit:", left()))
worlds.init(worlds.World(), torch.device("cuda", 0), timeout_s=600)
dist.new_group(backend="gloo")  # as the checkpoint's
dist.all_reduce(torch.zeros(4), group=host.host_group(), async_op=True)
print("before:", left())
"""


@pytest.mark.process
@pytest.mark.full
def test_on_cuda_only_the_gloo_groups_are_destroyed_before_the_interpreter_ends():
    """A fake group stands in for NCCL's, which needs a GPU."""
    command = [sys.executable, "-c", EXIT_ON_CUDA]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "before: ['fake', 'gloo', 'gloo']\nat exit: ['fake']\n"


def _race(how: str, seconds: float) -> tuple[int, int]:
    command = [sys.executable, gloo_race.__file__, str(seconds), how]
    done = subprocess.run(command, cwd=Path.cwd(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    workers, collectives = map(int, done.stdout.split())
    return workers, collectives


@pytest.mark.process
def test_a_group_has_one_worker():
    workers, _ = _race("one", 0.0)
    assert workers == 1


@pytest.mark.full
@pytest.mark.parametrize("seconds", [6.0, *nightly(120.0)])
def test_mixed_collectives_do_not_corrupt_the_heap(seconds):
    """With two workers a group, as torch has them, a minute ends in an abort."""
    workers, collectives = _race("one", seconds)
    assert workers == 1
    assert collectives > 1_000


def test_interfaces_of_the_environment_are_taken(monkeypatch):
    asked: list[dict[str, object]] = []

    def device(**where: object) -> object:
        asked.append(where)
        return create(hostname="127.0.0.1")

    gloo = dist.ProcessGroupGloo
    create = gloo.create_device
    monkeypatch.setattr(gloo, "__init__", gloo.__init__)
    monkeypatch.setattr(gloo, "create_device", staticmethod(device))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "first,second")
    worlds.one_gloo_worker(is_one_machine=True)
    gloo(dist.HashStore(), 0, 1)
    assert asked == [{"interface": name, "lazy_init": True} for name in ("first", "second")]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    worlds.one_gloo_worker(is_one_machine=True)
    gloo(dist.HashStore(), 0, 1)
    assert asked[2:] == [{"hostname": "127.0.0.1", "lazy_init": True}]
