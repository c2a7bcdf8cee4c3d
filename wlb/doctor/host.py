"""Checks the resources of a rank's node: CPU cores, open files, shared memory, disk and memory."""

import resource
import shutil
from pathlib import Path

import torch

from wlb.doctor.facts import Patient, affinity
from wlb.doctor.finding import Finding, failed, passed, skipped, warned
from wlb.doctor.gpu import NO_GPU
from wlb.memory import planned_gib
from wlb.memory.budget import ALLOCATOR_GAPS, CHECKPOINT_BYTES
from wlb.packing import with_s_max
from wlb.parallel.host import open_files_needed
from wlb.plan import UserError
from wlb.train.checkpoint.folder import list_complete
from wlb.train.checkpoint.room import most_at_once
from wlb.train.job import directory_of
from wlb.train.memory_check import GIB, budget_of, check_budget, estimate_of, within

PCI, NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
SHM, MEM_INFO = Path("/dev/shm"), Path("/proc/meminfo")

SHM_A_RANK_BYTES = 64 << 20
"""Bytes of shared memory that NCCL may need per rank.

Between GPUs of a node that cannot access each other's memory, NCCL transfers data through buffers
in shared memory, which take tens of MB."""


def descriptors(patient: Patient) -> Finding:
    """Check that the limit on open files is high enough for rank 0, which opens the most files.

    Only the hard limit matters, because `wlb.parallel.world.init` raises the soft limit to it.
    """
    name, world = "file descriptors", patient.spec.parallel.world_size
    need = open_files_needed(0, world, patient.device.type)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = (
        f"limits on open files: soft {_limit(soft)}, hard {_limit(hard)}; rank 0 of {world} ranks "
        f"needs about {need}"
    )
    most = max(soft, hard) if resource.RLIM_INFINITY not in (soft, hard) else need
    if most >= need:
        return passed(name, found)
    remedy = "raise the hard limit (LimitNOFILE of slurmd, or the limit of the container)"
    return failed(name, found, remedy)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def numa(patient: Patient) -> Finding:
    """Check that this process is bound to CPU cores of its GPU's NUMA node.

    The check was tested with folders that imitate sysfs, but not on a GPU.
    """
    name, gpu = "NUMA binding", patient.facts.gpu
    if gpu is None:
        return skipped(name, NO_GPU)
    try:
        node = int((PCI / gpu.bus / "numa_node").read_text("utf-8"))
        local_cores = cores_of((NODES / f"node{node}" / "cpulist").read_text("utf-8"))
    except (OSError, ValueError):
        return skipped(name, f"sysfs does not name the NUMA node of {gpu.bus or gpu.name}")
    mine = affinity()
    found = (
        f"the GPU is on NUMA node {node}, with {len(mine & local_cores)} of this rank's "
        f"{len(mine)} CPU cores"
    )
    if mine <= local_cores:
        return passed(name, found)
    how = "srun --cpu-bind=..., --gpu-bind=closest, or numactl --cpunodebind"
    if mine & local_cores:
        return warned(name, found, f"bind ranks near their GPUs: {how}")
    return warned(
        name, f"{found}: bound to another NUMA node", f"bind ranks near their GPUs: {how}"
    )


def cores_of(text: str) -> frozenset[int]:
    """Return the core numbers in a list such as "0-3,8", as sysfs writes it."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def shared_memory(patient: Patient) -> Finding:
    """Check that /dev/shm has enough free space for NCCL's buffers.

    The needed space is an estimate (`SHM_A_RANK_BYTES`) that was not compared with a run on GPUs.
    """
    name = "shared memory"
    try:
        usage = shutil.disk_usage(SHM)
    except OSError as error:
        return failed(name, f"{SHM} cannot be read: {error}", f"mount a tmpfs at {SHM}")
    need = SHM_A_RANK_BYTES * max(1, patient.world.local_world_size)
    found = f"{SHM} has {_size(usage.free)} free of {_size(usage.total)}"
    if usage.free >= need:
        return passed(name, found)
    remedy = "start docker with --shm-size=16g or --ipc=host, or mount a larger tmpfs on /dev/shm"
    if patient.is_cuda and patient.world.local_world_size > 1:
        return failed(name, f"{found}; NCCL may need {_size(need)}", remedy)
    return warned(name, found, remedy)


def disk(patient: Patient) -> Finding:
    """Check that the disk of run.output_dir has enough free space for the run's checkpoints."""
    name, spec = "disk for checkpoints", patient.spec
    folder = Path(spec.run.output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    one = spec.model.num_parameters * CHECKPOINT_BYTES
    most = most_at_once(spec)
    found = f"{folder} has {_size(free)} free; a checkpoint takes about {_size(one)}"
    there = len(list_complete(directory_of(spec) / "checkpoints"))
    # With several checkpoints, the run can still save, because a save removes the oldest one if
    # the disk is full.
    if free < one and there < 2:
        return failed(
            name, found, "make space on this disk, or set run.output_dir to a larger disk"
        )
    if free < (most - there) * one:
        remedy = f"make space for {most} checkpoints at the same time, or lower checkpoint.keep"
        return warned(name, found, remedy)
    return passed(name, found)


def memory(patient: Patient) -> Finding:
    """Compare the free memory of this rank's device with the memory that the fullest rank needs.

    The verdict is fail if the free memory is too small, or if the run does not fit even into the
    whole memory of a device. On a CPU, the available memory of the machine is divided equally among
    its ranks. This check has not run on a GPU yet.
    """
    name, spec = "memory", patient.spec
    budget = budget_of(spec, patient.device.type)
    try:
        available_gib = budget.planned_gib if budget else planned_gib(spec)
        filled = with_s_max(spec, planned_gib=available_gib)
        filled, _ = within(filled, budget)
        check_budget(filled, budget)
        need = estimate_of(filled).total_bytes
    except UserError as error:
        remedy = (
            "set training.recompute or a smaller data.context_window, or use more ranks "
            "(parallel.*)"
        )
        return failed(name, str(error), remedy)
    free, what = _free_bytes(patient)
    is_partial = patient.world.world_size < spec.parallel.world_size and not patient.is_cuda
    if is_partial:
        found = (
            f"the fullest rank needs about {_size(need)} of its device, but this check ran on a CPU"
        )
        return skipped(name, found)
    if free is None:
        return skipped(
            name, f"the fullest rank needs about {_size(need)}; the free memory is not known"
        )
    found = f"{_size(free)} of {what} free; the fullest rank needs about {_size(need)}"
    if need > free:
        remedy = (
            "end other processes that use the memory (see nvidia-smi), set training.recompute, or "
            "use more ranks"
        )
        return failed(name, found, remedy)
    if need > free * (1 - ALLOCATOR_GAPS):
        return warned(
            name,
            found,
            f"lower packing.s_max: less than {ALLOCATOR_GAPS:.0%} is left for the allocator's gaps",
        )
    return passed(name, found)


def _free_bytes(patient: Patient) -> tuple[int | None, str]:
    """Return a rank's free memory in bytes and its total memory as text; (None, "") if not known.

    On a CPU, both are the machine's memory divided by the number of its ranks.
    """
    if patient.is_cuda:
        free, total = torch.cuda.mem_get_info(patient.device)
        return free, _size(total)
    try:
        lines = MEM_INFO.read_text("utf-8").splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines}
        share = max(1, patient.world.local_world_size)
        return sizes["MemAvailable"] // share, f"{_size(sizes['MemTotal'] // share)} a rank"
    except (OSError, KeyError, ValueError, IndexError):
        return None, ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
