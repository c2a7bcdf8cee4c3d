"""`Facts` describes a rank's machine, so that ranks can be compared; `Patient` has a check's
inputs.

The GPU's part has not run on a GPU.
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
    """A rank's GPU. bus: its PCI address as sysfs writes it. driver_cuda: the newest CUDA of the
    driver as (major, minor); (0, 0) where NVML is missing. num_visible: GPUs this rank sees.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    uuid: str
    num_visible: int
    bus: str = ""
    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)
    no_nvml: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A rank's place, software and GPU. problem: why it has not the device that the run asks for.
    nccl, cuda: versions of torch's build; "" where it has none. kernels: those that would
    compute the run, or why none can.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node: int
    host: str
    python: str
    torch: str
    wlb: str
    cuda: str
    nccl: str
    one_gpu_each: bool = False
    problem: str = ""
    kernels: str = ""
    gpu: GpuFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """Inputs of a rank's checks. spec: with dp and vocabulary size filled in, also where one
    process examines the machine for a larger layout, and `mesh` is None.
    """

    spec: RunSpec
    world: World
    device: torch.device
    is_quick: bool
    mesh: Mesh | None = None
    everyone: tuple[Facts, ...] = ()

    @property
    def facts(self) -> Facts:
        return self.everyone[self.world.rank]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def facts_of(world: World, device: torch.device, problem: str = "") -> Facts:
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
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, nccl.version()))  # pyright: ignore[reportArgumentType]


def gpu_facts(device: torch.device) -> GpuFacts:
    """Has not run on a GPU; tested with stand-ins for torch.cuda and NVML."""
    properties: Any = torch.cuda.get_device_properties(device)
    told: dict[str, Any] = {}
    nvml, told["no_nvml"] = start_nvml()
    if nvml is not None:
        try:
            told |= _from_nvml(nvml, str(properties.uuid))
        except nvml.NVMLError as error:
            told["no_nvml"] = f"NVML does not know this GPU: {error}"
        finally:
            nvml.nvmlShutdown()
    return GpuFacts(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        uuid=str(properties.uuid),
        num_visible=torch.cuda.device_count(),
        **told,
    )


def _from_nvml(nvml: Any, uuid: str) -> dict[str, Any]:
    # The version is 12040 for 12.4.
    version = int(nvml.nvmlSystemGetCudaDriverVersion())
    bus = as_text(nvml.nvmlDeviceGetPciInfo(handle_of(nvml, uuid)).busId)
    return {
        "driver": as_text(nvml.nvmlSystemGetDriverVersion()),
        "driver_cuda": (version // 1000, version % 1000 // 10),
        "bus": sysfs_address(bus),
    }


def as_text(value: Any) -> str:
    """Older releases of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def sysfs_address(bus: str) -> str:
    """ "0000:1b:00.0", as sysfs writes it, for NVML's "00000000:1B:00.0"."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def affinity() -> frozenset[int]:
    """The cores this process may run on."""
    return frozenset(os.sched_getaffinity(0))
