"""This process's rank and device, and the start and end of torch.distributed.

`discover` finds out whether torchrun or Slurm started this process, `choose_device` chooses CPU or
CUDA, and `init` starts torch.distributed. No other file reads the environment.
"""

import atexit
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from wlb.parallel.gloo import use_one_worker
from wlb.parallel.host import allow_open_files, destroy_gloo_groups, new_host_group
from wlb.parallel.wait_signals import ended_by_signals
from wlb.plan import UserError
from wlb.spec.run import Device

# Slurm gives its batch, interactive and external steps numbers from this one up. srun did not start
# these steps, so their variables do not describe ranks.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


class Origin(StrEnum):
    """What started this process."""

    TORCHRUN = "torchrun"
    SLURM = "slurm"
    SPAWNED = "spawned"  # another process of wlb, which started the ranks itself
    SINGLE = "single"  # no launcher: the run has one process


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's rank, its node, and how it finds the other ranks.

    Ranks find each other at master_address:master_port or through rendezvous_file. A single rank
    needs neither.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # this rank's number on its node
    local_world_size: int = 1  # ranks on this node
    node_rank: int = 0
    origin: Origin = Origin.SINGLE
    master_address: str = ""  # host of rank 0
    master_port: int = 0
    rendezvous_file: str = ""  # path of a file that all ranks share
    one_gpu_each: bool = False  # the launcher lets each rank see only one GPU

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(
                f"rank = {self.rank} must be from 0 to world_size - 1 (world_size = "
                f"{self.world_size}); correct the rank that the launcher sets"
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise UserError(
                f"local rank = {self.local_rank} on node {self.node_rank} must be from "
                "0 to local_world_size - 1 (local_world_size = "
                f"{self.local_world_size}); correct the values that the launcher sets"
            )
        if self.world_size > 1 and not (self.rendezvous_file or self.master_port):
            raise UserError(
                f"{self.world_size} ranks cannot connect without master_port or rendezvous_file; "
                "give master_address and master_port, or rendezvous_file"
            )


def discover() -> World | None:
    """Read this process's `World` from the environment variables that torchrun or srun has set.

    If RANK and WORLD_SIZE are set but LOCAL_WORLD_SIZE is not, the process was not started by
    torchrun: enroot's hook for PyTorch images sets only the first two in srun tasks.

    Returns:
        The world, or None if neither launcher started this process.

    Raises:
        UserError: RANK and WORLD_SIZE do not fit the srun step to which this process belongs.
    """
    env = os.environ
    is_given = "RANK" in env and "WORLD_SIZE" in env
    if is_given and "LOCAL_WORLD_SIZE" in env:
        return _from_torchrun(env)
    num_tasks = _tasks_of_step(env)
    # Do not refuse a job of one process with WORLD_SIZE = 1, such as a PyTorchJob of Kubernetes.
    if is_given and _number(env, "WORLD_SIZE") != max(1, num_tasks):
        step = f"a step of srun with {num_tasks} tasks" if num_tasks else "no step of srun"
        raise UserError(
            f"RANK = {env['RANK']} and WORLD_SIZE = {env['WORLD_SIZE']} are set "
            "without LOCAL_WORLD_SIZE (the number of ranks on this machine), and this "
            f"process belongs to {step}. Start it with torchrun or srun, or set "
            "LOCAL_WORLD_SIZE, or unset RANK and WORLD_SIZE"
        )
    return _from_slurm(env, num_tasks) if num_tasks > 1 else None


def _tasks_of_step(env: Mapping[str, str]) -> int:
    """Return the number of tasks of the srun step of this process; 0 if srun did not start it."""
    if _number(env, "SLURM_STEP_ID", _FIRST_SPECIAL_STEP) >= _FIRST_SPECIAL_STEP:
        return 0
    return _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))


def _from_torchrun(env: Mapping[str, str]) -> World:
    world_size = _number(env, "WORLD_SIZE")
    return World(
        rank=_number(env, "RANK"),
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
        node_rank=_number(env, "GROUP_RANK", 0),
        origin=Origin.TORCHRUN,
        master_address=_text(env, "MASTER_ADDR"),
        master_port=_number(env, "MASTER_PORT"),
    )


def _from_slurm(env: Mapping[str, str], num_tasks: int) -> World:
    node_rank = _number(env, "SLURM_NODEID")
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or ""
    job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    starts = _number(env, "SLURM_RESTART_COUNT", 0)
    # Choose a port below the range that the system gives to other programs. The port differs
    # between the steps of a job and between restarts, so that a port that an earlier step or
    # attempt still uses is not chosen again.
    port = 15_000 + (31 * job + 997 * starts + step) % 15_000
    first = first_host(hosts) if hosts else ""
    return World(
        rank=_number(env, "SLURM_PROCID"),
        world_size=num_tasks,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=tasks_on_node(tasks, node_rank) if tasks else num_tasks,
        node_rank=node_rank,
        origin=Origin.SLURM,
        master_address=env.get("MASTER_ADDR") or first or _text(env, "SLURM_LAUNCH_NODE_IPADDR"),
        master_port=_number(env, "MASTER_PORT", port),
        one_gpu_each=env.get("SLURM_GPUS_PER_TASK", "").rsplit(":", 1)[-1] == "1",
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: "gpu[003-007,9],login" gives "gpu003"."""
    prefix, bracket, rest = nodelist.partition("[")
    if "," in prefix or not bracket:
        return nodelist.partition(",")[0]
    inside, _, rest = rest.partition("]")
    host = prefix + re.split("[,-]", inside, maxsplit=1)[0]
    # Text after the bracket, up to the next comma, still belongs to this host's name.
    return host + first_host(rest) if rest and not rest.startswith(",") else host


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Return the number of tasks on one node, from Slurm's notation: "8(x2),4" means 8, 8 and 4."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(
                f"SLURM_TASKS_PER_NODE = {tasks_per_node!r} must be written as in "
                "8(x2),4; start with srun, which sets this variable"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise UserError(
            f"SLURM_NODEID = {node}, but SLURM_TASKS_PER_NODE lists only {len(counts)} "
            "nodes; start with srun, which sets both variables"
        )
    return counts[node]


def _text(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        if name.startswith("SLURM"):
            raise UserError(
                f"{name} is not set, although srun started this process; start the process again "
                "with srun, which sets this variable"
            )
        raise UserError(
            f"{name} is not set, although RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are; start this "
            "process with torchrun, which sets all of them, or unset RANK and WORLD_SIZE"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{name} = {text!r} must be a whole number; correct this environment variable"
        ) from None


class DeviceChoice(NamedTuple):
    """The kind of device that all ranks use, and why."""

    kind: str  # "cpu" or "cuda"
    reason: str  # for the log, such as "2 GPUs for 2 ranks on this machine"


def choose_device(
    requested: Device, *, local_ranks: int, one_gpu_each: bool = False
) -> DeviceChoice:
    """Choose CUDA if every rank of this machine gets a GPU, else the CPU.

    Sets the variables of `CUDA_DEFAULTS` before it counts GPUs. Does not create a CUDA context.

    Args:
        requested: The value of `run.device`. With `auto` the number of GPUs decides.
        local_ranks: Ranks on this machine.
        one_gpu_each: Whether the launcher lets each rank see only one GPU.

    Raises:
        UserError: CUDA is requested and there are too few GPUs.
    """
    if requested == Device.CPU:
        return DeviceChoice("cpu", "the configuration sets run.device = cpu")
    if torch.backends.cuda.is_built():
        # Set the variables now, because the driver may read them when GPUs are first counted.
        set_cuda_defaults()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = 1 if one_gpu_each else local_ranks
    found = f"{num_gpus} GPUs for {local_ranks} ranks on this machine"
    if one_gpu_each:
        found += " (each rank sees only its GPU)"
    if num_gpus >= needed:
        return DeviceChoice("cuda", found)
    if requested == Device.CUDA:
        raise UserError(
            f"run.device = cuda needs a GPU for each rank, but there are {found}. "
            + (f"Start at most {num_gpus} ranks on this machine, or set" if num_gpus else "Set")
            + f" run.device = {'auto' if num_gpus else 'cpu'}"
        )
    return DeviceChoice("cpu", found)


def device_memory_bytes() -> int | None:
    """Return the memory in bytes of the smallest visible GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    gpus = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(i).total_memory for i in gpus), default=None)


def rank_device(world: World, kind: str) -> torch.device:
    """Return this rank's device: its GPU if `kind` is "cuda", or the CPU if it is "cpu"."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", 0 if world.one_gpu_each else world.local_rank)


def select_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread; no effect for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """Make a pool with one thread, named after `name`, whose current device is `device`.

    The current device of a new thread is GPU 0. If the thread made a stream or event on GPU 0,
    every rank of the node would create a CUDA context of about 0.5 GiB on that GPU.
    """
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=select_device, initargs=(device,)
    )


@contextmanager
def in_group(world: World, device: torch.device, *, timeout_s: float) -> Iterator[None]:
    """Start torch.distributed, run the block, and shut torch.distributed down again.

    After an exception, only Gloo groups are destroyed on CUDA. Destroying an NCCL group would wait
    for collectives that this rank's GPU has started, and other ranks may never join these
    collectives.

    Args:
        world: This process among all ranks.
        device: This rank's device.
        timeout_s: Seconds that a collective may wait for other ranks.
    """
    init(world, device, timeout_s=timeout_s)
    try:
        yield
    except BaseException:
        if device.type == "cuda":
            destroy_gloo_groups()
        else:
            shutdown()
        raise
    shutdown()


def init(world: World, device: torch.device, *, timeout_s: float) -> None:
    """Start torch.distributed: Gloo on the CPU, NCCL on CUDA.

    On CUDA a Gloo group for CPU tensors and objects is added (`wlb.parallel.host`).

    Because `device_id` is given, torch makes the NCCL communicator of all ranks immediately, and
    makes the mesh's groups from it with one ncclCommSplit per axis. This was read in the sources of
    torch 2.11 and 2.13; it has not run here on a GPU. All transfers of a group then share the
    group's communicator and stream and wait for each other, so each link between two pipeline ranks
    has a separate group (`wlb.parallel.mesh`).

    All Gloo groups are destroyed when Python exits, because a Gloo worker that is still alive then
    can abort the process (https://github.com/pytorch/pytorch/issues/65237). NCCL groups are left
    alone: they have no such worker, and destroying one could wait for ranks that have ended.

    Args:
        world: This process among all ranks.
        device: This rank's device.
        timeout_s: Seconds that a collective may wait for other ranks.

    Raises:
        UserError: The limit on open files is too low, or another program uses the port on which
            ranks find each other.
    """
    is_cuda = device.type == "cuda"
    allow_open_files(world.rank, world.world_size, device.type)
    one_gloo_worker(is_one_machine=world.local_world_size == world.world_size)
    if is_cuda:
        set_cuda_defaults()
    select_device(device)
    timeout = timedelta(seconds=timeout_s)
    with _free_port(world), ended_by_signals():
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=device if is_cuda else None,
            **_rendezvous(world, timeout),
        )
    if is_cuda:
        new_host_group(timeout_s)
    atexit.register(destroy_gloo_groups if is_cuda else shutdown)


CUDA_DEFAULTS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
}
"""Environment variables for ranks on CUDA, which are set unless the user has set them.

slurm/environment.sh sets the same ones.

- Expandable segments: steps need tensors of different sizes, which would fragment the allocator's
  segments if these had a fixed size.
- Connections: a process has 8 hardware queues by default and 32 at most. Streams that share a queue
  wait for each other, and a rank has a stream for computing, one for each communicator and several
  for FSDP2. (Megatron advises 1, for overlap that relies on the order of launches. With 1, FSDP2's
  gathers would wait for the kernels during which they should run.)
- Cache: FlashAttention-4 stores the kernels that it compiles, and later runs on the node read them.
"""
_OLD_NAMES = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""The older name of each variable, which torch still reads if the new one is not set."""


def set_cuda_defaults() -> None:
    """Set each environment variable of `CUDA_DEFAULTS` that is not set yet.

    Call this before CUDA is initialised. Child processes inherit the variables. torch's CUDA
    allocator reads PYTORCH_ALLOC_CONF when it first allocates memory.
    """
    _set_unless_given(CUDA_DEFAULTS)


def set_flight_records(prefix: str) -> None:
    """Make NCCL groups record their last 2,000 operations, and write them when a collective hangs.

    When a collective times out, each rank writes its record to the path `prefix` followed by its
    rank. This function sets environment variables, which torch reads when it makes a group.
    Variables that the user has set keep their values.
    """
    _set_unless_given(
        {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": prefix,
        }
    )


def _set_unless_given(variables: Mapping[str, str]) -> None:
    """Set each variable, unless the user has set it under its present or its older name."""
    for name, value in variables.items():
        if name not in os.environ and _OLD_NAMES.get(name, name) not in os.environ:
            os.environ[name] = value


def one_gloo_worker(*, is_one_machine: bool = False) -> None:
    """Give each Gloo group of this process one worker thread (`wlb.parallel.gloo` says why).

    `init` calls this. Call it yourself if another library, such as accelerate, starts
    torch.distributed. Groups use the network interfaces that GLOO_SOCKET_IFNAME names.

    Args:
        is_one_machine: Whether all ranks are on this machine, so that loopback suffices.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    use_one_worker(names, loopback=is_one_machine)


@contextmanager
def _free_port(world: World) -> Iterator[None]:
    """Raise a UserError in place of torch's error if another program uses the rendezvous port.

    Only rank 0 listens on the port, so only rank 0 gets this error.
    """
    try:
        yield
    except RuntimeError as error:
        if world.rank or "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {world.master_port} on {world.master_address} is already in use by "
            "another program, so ranks cannot connect there. Set MASTER_PORT to a "
            "free port, below the range from which the system assigns ports "
            "(/proc/sys/net/ipv4/ip_local_port_range)"
        ) from None


def _rendezvous(world: World, timeout: timedelta) -> dict[str, Any]:
    if world.rendezvous_file:
        return {"init_method": Path(world.rendezvous_file).absolute().as_uri()}
    if world.origin == Origin.TORCHRUN:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return {"store": _store_of_attempt(world, timeout)}
        return {"init_method": "env://"}
    if world.world_size == 1:
        return {"store": dist.HashStore()}  # pyright: ignore[reportPrivateImportUsage]
    return {"init_method": f"tcp://{world.master_address}:{world.master_port}"}


def _store_of_attempt(world: World, timeout: timedelta) -> Any:
    """Connect to the store of torchrun's agent, with key names that contain the number of restarts.

    torchrun restarts failed ranks up to --max-restarts times. With a static rendezvous, the agent's
    store then still has the addresses of ranks that have ended. The number in the key names keeps
    the attempts apart.
    """
    attempt = _number(os.environ, "TORCHELASTIC_RESTART_COUNT", 0)
    host, port = world.master_address, world.master_port
    # Type checkers do not find TCPStore and PrefixStore, because torch does not list them in
    # __all__.
    c10d: Any = dist
    store = c10d.TCPStore(host, port, is_master=False, timeout=timeout)
    return c10d.PrefixStore(f"attempt{attempt}", store)


def shutdown() -> None:
    """Destroy all process groups and their threads; no effect if there are none."""
    for at_exit in (shutdown, destroy_gloo_groups):
        atexit.unregister(at_exit)
    if dist.is_initialized():
        dist.destroy_process_group()


def threads_per_rank(local_world_size: int) -> int:
    """Return the number of CPU threads for each rank.

    This process's usable cores are divided by `local_world_size`, the ranks on this machine. If
    OMP_NUM_THREADS is set, it is an upper limit.
    """
    share = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    most = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(share, int(most)) if most.isdecimal() and int(most) else share


def environment(**overrides: str) -> dict[str, str]:
    """Return a copy of this process's environment with `overrides` applied."""
    return {**os.environ, **overrides}


def adopt_environment(variables: Mapping[str, str]) -> None:
    """Replace this process's whole environment by `variables`.

    A rank that is forked from a fork server would otherwise keep the server's environment.
    """
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def temporary_environment(**overrides: str) -> Iterator[None]:
    """Set environment variables while the block runs, for processes that the block starts."""
    before = {name: os.environ.get(name) for name in overrides}
    os.environ.update(overrides)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
