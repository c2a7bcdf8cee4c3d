"""`Facts` describes a rank and its machine. `Patient` has the inputs of a check.

Some checks compare the facts of all ranks. The functions here that query a GPU have not run on a
GPU yet.
"""

import os
import platform
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import nccl

from wlb.cost.machine import program_version, start_nvml
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import World
from wlb.profile.device import handle_of
from wlb.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Facts about a rank's GPU."""

    name: str  # name of the GPU's model, as torch reports it
    memory_bytes: int  # total memory of the GPU
    capability: tuple[int, int]  # compute capability, such as (9, 0)
    uuid: str
    num_visible: int  # number of GPUs that this rank can see
    bus: str = ""  # PCI address as sysfs writes it
    driver: str = ""  # version of the driver; "" without NVML
    # Newest version of CUDA that the driver supports, such as (12, 4); (0, 0) without NVML.
    driver_cuda: tuple[int, int] = (0, 0)
    no_nvml: str = ""  # why NVML could not be used; "" if it was used


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A rank's place among the ranks, its software and its GPU."""

    rank: int  # number of the rank in the run
    local_rank: int  # number of the rank on its node
    local_world_size: int  # number of ranks on its node
    node: int  # number of the node
    host: str  # name of the node
    python: str  # version of Python
    torch: str  # version of torch
    wlb: str  # version of wlb
    cuda: str  # CUDA version of torch's build; "" without CUDA
    nccl: str  # NCCL version of torch's build; "" without NCCL
    one_gpu_each: bool = False  # whether the launcher gives each rank a single visible GPU
    problem: str = ""  # why the rank lacks the device that the run asks for; "" if it has it
    kernels: str = ""  # names of the kernels that would compute the run, or why none can
    gpu: GpuFacts | None = None  # facts about the rank's GPU; None on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """The inputs of a check on one rank: the run, the rank's device, and the facts of all ranks."""

    spec: RunSpec  # the run, with the data-parallel size and vocabulary size filled in
    world: World  # this rank's place among the processes of the launcher
    device: torch.device  # this rank's device
    is_quick: bool  # whether to make fewer and smaller measurements
    # This rank's place in the layout. None before the communicators are made, and always if this
    # process is the only rank or if ranks have different devices.
    mesh: Mesh | None = None
    everyone: tuple[Facts, ...] = ()  # facts of all ranks, by rank

    @property
    def facts(self) -> Facts:
        """The facts about this rank."""
        return self.everyone[self.world.rank]

    @property
    def is_cuda(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"


def facts_of(world: World, device: torch.device, problem: str = "") -> Facts:
    """Collect the facts of this rank.

    Args:
        world: This rank's place among the processes of the launcher.
        device: The device on which this rank would compute.
        problem: Why this rank lacks the kind of device that the run asks for; "" if it has it.
    """
    return Facts(
        rank=world.rank,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        node=world.node_rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=torch.__version__,
        wlb=program_version(),
        cuda=torch.version.cuda or "",
        nccl=_nccl(),
        one_gpu_each=world.one_gpu_each,
        problem=problem,
        gpu=gpu_facts(device) if device.type == "cuda" else None,
    )


def _nccl() -> str:
    """Return the version of torch's NCCL, such as "2.27.5"; "" if there is none."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, nccl.version()))  # pyright: ignore[reportArgumentType]


def gpu_facts(device: torch.device) -> GpuFacts:
    """Collect the facts about a GPU from torch and, if it is installed, from NVML.

    The function was tested with stand-ins for torch.cuda and NVML, but not on a GPU.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {}
    nvml, found["no_nvml"] = start_nvml()
    if nvml is not None:
        try:
            found |= _from_nvml(nvml, str(properties.uuid))
        except nvml.NVMLError as error:
            found["no_nvml"] = f"NVML does not know this GPU: {error}"
        finally:
            nvml.nvmlShutdown()
    return GpuFacts(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        uuid=str(properties.uuid),
        num_visible=torch.cuda.device_count(),
        **found,
    )


def _from_nvml(nvml: Any, uuid: str) -> dict[str, Any]:
    # NVML encodes the version in one integer, such as 12040 for CUDA 12.4.
    version = int(nvml.nvmlSystemGetCudaDriverVersion())
    bus = as_text(nvml.nvmlDeviceGetPciInfo(handle_of(nvml, uuid)).busId)
    return {
        "driver": as_text(nvml.nvmlSystemGetDriverVersion()),
        "driver_cuda": (version // 1000, version % 1000 // 10),
        "bus": sysfs_address(bus),
    }


def as_text(value: Any) -> str:
    """Return a text from NVML as str. Older releases of nvidia-ml-py return bytes instead."""
    return value.decode() if isinstance(value, bytes) else str(value)


def sysfs_address(bus: str) -> str:
    """Convert a PCI address from NVML's notation to that of sysfs.

    For example, "00000000:1B:00.0" becomes "0000:1b:00.0".
    """
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def affinity() -> frozenset[int]:
    """Return the CPU cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))
