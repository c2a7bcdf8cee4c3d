"""Where this process stands among the ranks: world, device, process group, 4-D mesh.

The only file that reads the environment. `discover` says whether torchrun or Slurm started this
process; `choose_device` and `init` start torch.distributed; `build_mesh` lays the ranks out.

Ranks are ordered TP, CP, PP, DP from the inside out (the paper's Section 2.2): TP neighbours share
a node's fastest links. The mesh lists its axes as (pp, dp, cp, tp), so that dp and cp lie side by
side and flatten into `fsdp`, over which gradients are summed and parameters sharded: over all of
it, or (HSDP) within groups of `shard_size` consecutive members, each of which holds a copy. Members
of a group are the nearest ones: cp ranks of one pipeline first.
"""

import atexit
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from wlb.parallel.gloo import use_one_worker
from wlb.spec.run import Device, ParallelSpec

AXES = ("pp", "dp", "cp", "tp")
FSDP = "fsdp"
HSDP = ("replicate", "shard")

# Slurm numbers its batch, interactive and external steps from here on; they are not srun steps.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


class Origin(StrEnum):
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    SPAWNED = "spawned"
    SINGLE = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all ranks, and where they meet.

    They meet at master_address:master_port, or through rendezvous_file, a file that all ranks
    see; a single rank needs neither. one_gpu_each: the launcher shows each rank only its own GPU.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    origin: Origin = Origin.SINGLE
    master_address: str = ""
    master_port: int = 0
    rendezvous_file: str = ""
    one_gpu_each: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside the {self.world_size} ranks of the run")
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(
                f"local rank {self.local_rank} is outside the {self.local_world_size} ranks of "
                f"node {self.node_rank}"
            )
        if self.world_size > 1 and not (self.rendezvous_file or self.master_port):
            raise ValueError(
                f"{self.world_size} ranks need a place to meet: a master address and port, or a "
                "rendezvous file"
            )


def discover() -> World | None:
    """The world that torchrun or srun put this process in; None if it was started by hand."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if _number(env, "SLURM_STEP_ID", _FIRST_SPECIAL_STEP) < _FIRST_SPECIAL_STEP:
        num_tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
        if num_tasks > 1:
            return _from_slurm(env, num_tasks)
    return None


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
    return World(
        rank=_number(env, "SLURM_PROCID"),
        world_size=num_tasks,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=tasks_on_node(tasks, node_rank) if tasks else num_tasks,
        node_rank=node_rank,
        origin=Origin.SLURM,
        master_address=first_host(hosts) if hosts else _text(env, "SLURM_LAUNCH_NODE_IPADDR"),
        # Below the ephemeral ports; other steps of the same job get another one.
        master_port=15_000 + (31 * job + step) % 15_000,
        one_gpu_each=env.get("SLURM_GPUS_PER_TASK", "").rsplit(":", 1)[-1] == "1",
    )


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: "gpu[003-007,9],login" -> "gpu003"."""
    prefix, bracket, rest = nodelist.partition("[")
    if "," in prefix or not bracket:
        return nodelist.partition(",")[0]
    inside, _, rest = rest.partition("]")
    host = prefix + re.split("[,-]", inside, maxsplit=1)[0]
    # A second bracket or a suffix belongs to the same host up to the next comma.
    return host + first_host(rest) if rest and not rest.startswith(",") else host


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Tasks of a node in Slurm's notation: "8(x2),4" -> 8, 8, 4."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE = {tasks_per_node!r} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID = {node}, but tasks are given for {len(counts)} nodes")
    return counts[node]


def _text(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise ValueError(
            f"{name} is not set although this process looks like one rank of several; start it "
            "with torchrun or srun, or unset RANK and WORLD_SIZE"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r} is not a whole number") from None


class DeviceChoice(NamedTuple):
    """Kind of device of all ranks ("cpu" or "cuda") and a sentence for the log."""

    kind: str
    reason: str


def choose_device(
    requested: Device, *, local_ranks: int, one_gpu_each: bool = False
) -> DeviceChoice:
    """CUDA if every rank of this machine gets a GPU of its own, else the CPU.

    Never falls back where CUDA was asked for. Does not start CUDA in this process.
    """
    if requested == Device.CPU:
        return DeviceChoice("cpu", "run.device = cpu was asked for")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = 1 if one_gpu_each else local_ranks
    found = f"{num_gpus} GPUs for {local_ranks} ranks on this machine"
    if one_gpu_each:
        found += " (the launcher shows each rank its own)"
    if num_gpus >= needed:
        return DeviceChoice("cuda", found)
    if requested == Device.CUDA:
        raise ValueError(
            f"run.device = cuda, but there are {found}; start at most {num_gpus} ranks here or "
            f"set run.device = {'auto' if num_gpus else 'cpu'}"
        )
    return DeviceChoice("cpu", found)


def device_memory_bytes() -> int | None:
    """Memory of the smallest GPU that this process sees; None without one."""
    if not torch.cuda.is_available():
        return None
    gpus = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(i).total_memory for i in gpus), default=None)


def rank_device(world: World, kind: str) -> torch.device:
    """The rank's own device: its local rank's GPU, or the CPU."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", 0 if world.one_gpu_each else world.local_rank)


def init(world: World, device: torch.device, *, timeout_s: float) -> None:
    """Start torch.distributed: Gloo on CPU; on CUDA NCCL, with Gloo beside it for CPU tensors.

    Gloo groups get one worker thread each (`wlb.parallel.gloo`) and, where all ranks are on this
    machine, the loopback interface. Groups on CPU are destroyed at the latest when Python exits:
    a Gloo worker that is alive then can abort the process (pytorch issue 65237).
    """
    one_gloo_worker(is_one_machine=world.local_world_size == world.world_size)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_s),
        **_rendezvous(world),
    )
    if device.type == "cpu":  # NCCL's groups could wait here for ranks that are gone
        atexit.register(shutdown)


def one_gloo_worker(*, is_one_machine: bool = False) -> None:
    """Give Gloo groups of this process one worker each, on the interfaces of GLOO_SOCKET_IFNAME.

    `init` does it; call it before torch.distributed is started by anybody else, such as accelerate.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    use_one_worker(names, loopback=is_one_machine)


def _rendezvous(world: World) -> dict[str, Any]:
    if world.rendezvous_file:
        return {"init_method": Path(world.rendezvous_file).absolute().as_uri()}
    if world.origin == Origin.TORCHRUN:
        return {"init_method": "env://"}  # torchrun's agent may host the store; torch knows
    if world.world_size == 1:
        return {"store": dist.HashStore()}  # pyright: ignore[reportPrivateImportUsage]
    return {"init_method": f"tcp://{world.master_address}:{world.master_port}"}


def limit_collectives(timeout_s: float, mesh: "Mesh | None" = None) -> None:
    """From now on a collective of all ranks, or of any group of a mesh, may take this long; torch
    gives new groups half an hour, whatever the first one had."""
    groups = [None] if mesh is None else mesh.groups
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def shutdown() -> None:
    """End torch.distributed, if it was started, and with it the threads of its groups."""
    atexit.unregister(shutdown)
    if dist.is_initialized():
        dist.destroy_process_group()


class Coordinates(NamedTuple):
    tp: int
    cp: int
    pp: int
    dp: int


def coordinates(rank: int, parallel: ParallelSpec) -> Coordinates:
    """Where a rank stands: tp fastest, then cp, pp, dp."""
    if not 0 <= rank < parallel.world_size:
        raise ValueError(f"rank {rank} is outside the {parallel.world_size} ranks of {parallel}")
    rank, tp = divmod(rank, parallel.tp)
    rank, cp = divmod(rank, parallel.cp)
    dp, pp = divmod(rank, parallel.pp)
    return Coordinates(tp=tp, cp=cp, pp=pp, dp=dp)


def rank_grid(parallel: ParallelSpec) -> np.ndarray:
    """All ranks, shape [pp, dp, cp, tp]."""
    physical = np.arange(parallel.world_size).reshape(
        max(1, parallel.dp), parallel.pp, parallel.cp, parallel.tp
    )
    return np.ascontiguousarray(physical.transpose(1, 0, 2, 3))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """The 4-D mesh seen from one rank.

    device_mesh: axes (pp, dp, cp, tp). fsdp: dp and cp flattened, dp major. sharding: what FSDP2
    shards parameters with: `fsdp`, or its ranks as (replicate, shard).
    """

    parallel: ParallelSpec
    device: torch.device
    rank: int
    device_mesh: DeviceMesh
    fsdp: DeviceMesh
    sharding: DeviceMesh

    @property
    def coordinates(self) -> Coordinates:
        return coordinates(self.rank, self.parallel)

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @property
    def tp_rank(self) -> int:
        return self.coordinates.tp

    @property
    def cp_rank(self) -> int:
        return self.coordinates.cp

    @property
    def pp_rank(self) -> int:
        return self.coordinates.pp

    @property
    def dp_rank(self) -> int:
        return self.coordinates.dp

    @property
    def fsdp_rank(self) -> int:
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def tp_size(self) -> int:
        return self.parallel.tp

    @property
    def cp_size(self) -> int:
        return self.parallel.cp

    @property
    def pp_size(self) -> int:
        return self.parallel.pp

    @property
    def dp_size(self) -> int:
        return self.parallel.dp

    @property
    def fsdp_size(self) -> int:
        return self.parallel.dp * self.parallel.cp

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Of every axis, of dp x cp and what shards it."""
        sharding = self.sharding.get_all_groups()
        return [*self.device_mesh.get_all_groups(), self.fsdp.get_group(), *sharding]

    @property
    def shard_size(self) -> int:
        """Ranks over which a copy of the parameters is sharded."""
        return self.sharding.size(self.sharding.ndim - 1)

    @property
    def shard_rank(self) -> int:
        return self.fsdp_rank % self.shard_size

    @property
    def replica(self) -> int:
        """Which of the copies of the parameters this rank has a shard of."""
        return self.fsdp_rank // self.shard_size

    @property
    def tp(self) -> DeviceMesh:
        return self.device_mesh["tp"]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("tp")

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("cp")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("pp")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("dp")

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        return self.fsdp.get_group()

    @property
    def world_group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group


def build_mesh(parallel: ParallelSpec, device: torch.device, *, shard_size: int = 0) -> Mesh:
    """The mesh over all ranks of the started process group; every rank calls it.

    shard_size: ranks over which a copy of the parameters is sharded, a divisor of dp x cp; 0 = all.
    """
    world_size = dist.get_world_size()
    if parallel.dp < 1 or parallel.world_size != world_size:
        raise ValueError(
            f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {parallel.dp} is not the "
            f"{world_size} ranks that run; set parallel.dp = ranks / (tp * cp * pp)"
        )
    ranks = torch.from_numpy(rank_grid(parallel))
    device_mesh = DeviceMesh(device.type, ranks, mesh_dim_names=AXES)
    fsdp = device_mesh["dp", "cp"]._flatten(FSDP)
    return Mesh(
        parallel=parallel,
        device=device,
        rank=dist.get_rank(),
        device_mesh=device_mesh,
        fsdp=fsdp,
        sharding=_sharding(fsdp, shard_size or fsdp.size()),
    )


def _sharding(fsdp: DeviceMesh, shard_size: int) -> DeviceMesh:
    copies, rest = divmod(fsdp.size(), shard_size)
    if rest:
        raise ValueError(
            f"fsdp.shard_size = {shard_size} does not divide the {fsdp.size()} ranks of dp x cp"
        )
    # A view of the same root mesh, which FSDP needs to join it with the tp axis.
    return fsdp if copies == 1 else fsdp._unflatten(0, (copies, shard_size), HSDP)


def threads_per_rank(local_world_size: int) -> int:
    """CPU threads of a rank when the ranks of a machine share its cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def environment(**overrides: str) -> dict[str, str]:
    """A copy of this process's environment with some variables changed."""
    return {**os.environ, **overrides}


def adopt_environment(variables: Mapping[str, str]) -> None:
    """Make `variables` this process's environment: a forked rank has its server's otherwise."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def temporary_environment(**overrides: str) -> Iterator[None]:
    """Change variables for processes started inside the block."""
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
