"""Tests discovery of the launcher and the choice of device."""

import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from wlb.parallel import world as worlds
from wlb.parallel.host import HOSTS
from wlb.plan import UserError
from wlb.spec.run import Device


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch):
    """Sets variables in an environment that names no launcher."""
    prefixes = ("SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_")
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(prefixes):
            monkeypatch.delenv(name)

    def put(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return put


def test_nothing_is_discovered_without_a_launcher(env):
    assert worlds.discover() is None


def test_torchrun_is_discovered(env):
    env(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, GROUP_RANK=1)
    env(MASTER_ADDR="node1", MASTER_PORT=29500)
    assert worlds.discover() == worlds.World(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        origin=worlds.Origin.TORCHRUN,
        master_address="node1",
        master_port=29500,
    )


def test_one_process_needs_no_launcher_whatever_names_its_rank(env):
    """A PyTorchJob of Kubernetes names it, also of one process."""
    env(RANK=0, WORLD_SIZE=1, MASTER_ADDR="localhost", MASTER_PORT=23456)
    assert worlds.discover() is None


def test_torchrun_variables_that_are_missing_or_no_numbers_are_named(env):
    env(RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    with pytest.raises(ValueError, match="LOCAL_RANK is not set"):
        worlds.discover()
    env(LOCAL_RANK="first")
    with pytest.raises(ValueError, match="LOCAL_RANK = 'first' must be a whole number"):
        worlds.discover()


SLURM = {
    "SLURM_JOB_ID": 4711,
    "SLURM_STEP_ID": 0,
    "SLURM_NTASKS": 20,
    "SLURM_PROCID": 17,
    "SLURM_LOCALID": 1,
    "SLURM_NODEID": 2,
    "SLURM_STEP_NODELIST": "gpu[007-008,012]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_an_srun_step_is_discovered(env):
    env(**SLURM)
    world = worlds.discover()
    assert world == worlds.World(
        rank=17,
        world_size=20,
        local_rank=1,
        local_world_size=4,
        node_rank=2,
        origin=worlds.Origin.SLURM,
        master_address="gpu007",
        master_port=15_000 + (31 * 4711) % 15_000,
    )
    env(SLURM_GPUS_PER_TASK="h100:1")
    assert worlds.discover().one_gpu_each


def test_a_step_meets_elsewhere_after_a_requeue_or_if_told_to(env):
    env(**SLURM)
    before = worlds.discover().master_port
    env(SLURM_RESTART_COUNT=1)
    assert before != worlds.discover().master_port > 15_000
    env(MASTER_ADDR="gpu008-ib", MASTER_PORT=23_456)
    world = worlds.discover()
    assert (world.master_address, world.master_port) == ("gpu008-ib", 23_456)


def test_a_port_that_is_taken_is_named(env, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        env(**SLURM | {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0})
        env(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        expected = (
            rf"port {port} on 127\.0\.0\.1 is already in use by "
            rf"another program, .* Set MASTER_PORT to a"
        )
        with pytest.raises(UserError, match=expected):
            worlds.init(worlds.discover(), torch.device("cpu"), timeout_s=5.0)


@pytest.mark.parametrize(
    "batch_script",
    [{"SLURM_NTASKS": 1}, {"SLURM_STEP_NUM_TASKS": 1}, {"SLURM_STEP_ID": 0xFFFF_FFFB}],
)
def test_a_batch_script_is_no_step_of_many_ranks(env, batch_script):
    env(**SLURM, **{k: v for k, v in batch_script.items() if k not in SLURM})
    env(**batch_script)
    assert worlds.discover() is None


def test_torchrun_inside_slurm_is_torchrun(env):
    env(**SLURM, RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="x", MASTER_PORT=1)
    env(LOCAL_WORLD_SIZE=1, TORCHELASTIC_RUN_ID="none")
    assert worlds.discover().origin == worlds.Origin.TORCHRUN


HOOK = {"RANK": 17, "WORLD_SIZE": 20, "LOCAL_RANK": 1, "MASTER_ADDR": "gpu007", "MASTER_PORT": 9}


def test_a_step_whose_hook_sets_some_of_torchrun_s_variables_is_a_step(env):
    """Enroot's 50-slurm-pytorch.sh says nothing of nodes; Slurm's own variables do."""
    env(**SLURM, **HOOK)
    world = worlds.discover()
    assert world.origin == worlds.Origin.SLURM
    assert (world.rank, world.world_size, world.node_rank) == (17, 20, 2)
    assert (world.local_rank, world.local_world_size) == (1, 4)
    env(WORLD_SIZE=1, SLURM_STEP_NUM_TASKS=1)
    assert worlds.discover() is None


def test_ranks_without_their_number_on_a_node_are_refused(env):
    env(**HOOK)
    with pytest.raises(ValueError, match=r"RANK = 17 .* LOCAL_WORLD_SIZE.* to no step of srun\."):
        worlds.discover()
    env(**SLURM, WORLD_SIZE=16)
    with pytest.raises(
        ValueError, match=r"WORLD_SIZE = 16 .* a step of srun with 20 tasks\. Start"
    ):
        worlds.discover()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[3,5]", "gpu3"),
        ("login,gpu[3,5]", "login"),
        ("r[1-2]n[04-05]", "r1n04"),
        ("r[1-2]-ib,login", "r1-ib"),
    ],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert worlds.first_host(nodelist) == host


def test_tasks_on_node_refuses_what_it_cannot_read():
    assert [worlds.tasks_on_node("8(x2),4", node) for node in range(3)] == [8, 8, 4]
    with pytest.raises(ValueError, match="'8,many' must be written as in"):
        worlds.tasks_on_node("8,many", 0)
    with pytest.raises(ValueError, match="SLURM_NODEID = 3"):
        worlds.tasks_on_node("8(x2),4", 3)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_auto_takes_cuda_only_with_a_gpu_for_each_rank(gpus):
    gpus(4)
    assert worlds.choose_device(Device.AUTO, local_ranks=4).kind == "cuda"
    assert worlds.choose_device(Device.CPU, local_ranks=4).kind == "cpu"
    few = worlds.choose_device(Device.AUTO, local_ranks=8)
    assert few == ("cpu", "4 GPUs for 8 ranks on this machine")
    gpus(1)
    assert worlds.choose_device(Device.AUTO, local_ranks=8, one_gpu_each=True).kind == "cuda"


def test_cuda_that_is_missing_is_refused_with_numbers_and_remedy(gpus):
    gpus(2)
    with pytest.raises(ValueError, match=r"2 GPUs for 8 ranks .* at most 2 ranks on this machine"):
        worlds.choose_device(Device.CUDA, local_ranks=8)
    gpus(0)
    with pytest.raises(ValueError, match=r"0 GPUs for 1 ranks .* Set run\.device = cpu"):
        worlds.choose_device(Device.CUDA, local_ranks=1)


def test_a_rank_takes_the_gpu_of_its_local_rank():
    world = worlds.World(rank=9, world_size=16, local_rank=1, local_world_size=8, master_port=1)
    assert worlds.rank_device(world, "cuda") == torch.device("cuda", 1)
    assert worlds.rank_device(world, "cpu") == torch.device("cpu")


def test_defaults_for_cuda_leave_what_the_user_set(env, monkeypatch):
    for name in (*worlds.CUDA_DEFAULTS, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # restored with what the call sets
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    worlds.set_cuda_defaults()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    del os.environ["PYTORCH_ALLOC_CONF"]
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:native"
    worlds.set_cuda_defaults()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_records_of_nccl_leave_what_the_user_set_by_new_and_old_names(monkeypatch):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
    for name in (*names, "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # restored with what the call sets
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "50"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    worlds.set_flight_records("logs/nccl-rank-")
    assert [os.environ.get(name) for name in names] == [None, "0", "logs/nccl-rank-"]


def test_nccl_is_told_its_device_and_hosts_get_a_group_of_their_own(monkeypatch):
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("set", device)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda kind, **how: asked.append((kind, how["device_id"]))
    )
    monkeypatch.setattr(
        dist, "new_group", lambda **how: asked.append((how["backend"], how["group_desc"]))
    )
    device = torch.device("cuda", 1)
    worlds.init(worlds.World(), device, timeout_s=60)
    # torch splits a mesh's groups off a world that knows its device, and off one without Gloo.
    assert asked == [("set", device), ("nccl", device), ("gloo", HOSTS)]


@pytest.mark.parametrize(
    ("asked", "threads"),
    [("", [8, 4, 1]), ("1", [1, 1, 1]), ("6", [6, 4, 1]), ("2,4", [2, 2, 1]), ("none", [8, 4, 1])],
)
def test_ranks_divide_the_cores_and_take_no_more_threads_than_asked(
    env, monkeypatch, asked, threads
):
    env(OMP_NUM_THREADS=asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [worlds.threads_per_rank(num_ranks) for num_ranks in (1, 2, 16)] == threads


def test_a_world_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="rank = 2 must be from 0 to"):
        worlds.World(rank=2, world_size=2, master_port=1)
    with pytest.raises(ValueError, match="2 ranks cannot connect without master_port"):
        worlds.World(rank=0, world_size=2)


def test_cuda_defaults_are_set_before_devices_are_counted(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    for is_built in (False, True):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda is_built=is_built: is_built)
        worlds.choose_device(Device.AUTO, local_ranks=1)
    assert seen == [None, worlds.CUDA_DEFAULTS["CUDA_DEVICE_MAX_CONNECTIONS"]]


def test_a_thread_begins_with_the_ranks_gpu(monkeypatch):
    """A new thread has GPU 0, where all ranks of a node would make a context."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: chosen.append((threading.current_thread().name, device)),
    )
    device = torch.device("cuda", 3)
    with worlds.device_thread("inputs", device) as pool:
        name = pool.submit(lambda: threading.current_thread().name).result()
    assert chosen == [(name, device)]
    assert name.startswith("inputs")
    with worlds.device_thread("inputs", torch.device("cpu")) as pool:
        pool.submit(int).result()
    assert len(chosen) == 1


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_rank_waits_for_others_after_an_exception(monkeypatch, kind):
    """Destroying a group of NCCL waits for its kernels, and thus for ranks that may be gone."""
    ended: list[str] = []
    monkeypatch.setattr(worlds, "init", lambda *_, **__: None)
    monkeypatch.setattr(worlds, "shutdown", lambda: ended.append("all"))
    monkeypatch.setattr(worlds, "destroy_gloo_groups", lambda: ended.append("gloo"))
    device = torch.device(kind)
    with worlds.in_group(worlds.World(), device, timeout_s=1.0):
        assert not ended
    assert ended == ["all"]
    with pytest.raises(KeyboardInterrupt), worlds.in_group(worlds.World(), device, timeout_s=1.0):
        raise KeyboardInterrupt
    assert ended == ["all", "gloo" if kind == "cuda" else "all"]
