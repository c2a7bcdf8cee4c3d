"""Checks a rank's GPU with NVML: driver, NVLink between TP ranks, clocks, throttling, ECC errors.

NVML is the NVIDIA library that nvidia-smi uses. **These checks have not run on a GPU.** They are
tested with a stand-in for NVML.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from wlb.cost.machine import start_nvml
from wlb.doctor.facts import Facts, Patient
from wlb.doctor.finding import Finding, failed, passed, skipped, warned
from wlb.profile.device import THROTTLE_REASONS, handle_of

# NO_GPU is what checks of GPUs find on CPU ranks. INSTALL_NVML is the remedy if NVML does not work.
NO_GPU = "ranks are on the CPU"
INSTALL_NVML = "make NVML work, usually with pip install nvidia-ml-py"
# Reasons for lower clocks, as named in `THROTTLE_REASONS`. Those in BROKEN mean that the GPU or its
# power supply is defective, and those in HOT mean that the GPU is too hot.
BROKEN = frozenset({"hardware_slowdown", "hardware_thermal", "power_brake"})
HOT = frozenset({"software_thermal"})


class NoNvml(Exception):
    """Raised if NVML is not installed or refuses a query. The message says why."""


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """Start NVML, yield its Python module, and shut it down after the block.

    Raises:
        NoNvml: If NVML does not start, or refuses a query in the block.
    """
    nvml, why = start_nvml()
    if nvml is None:
        raise NoNvml(why)
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NoNvml(f"NVML cannot answer a query: {error}") from None
    finally:
        nvml.nvmlShutdown()


def driver(patient: Patient) -> Finding:
    """Check that the driver supports the CUDA version for which torch was built.

    This check has not run on a GPU yet.
    """
    name, facts = "driver", patient.facts
    if not patient.is_cuda or facts.gpu is None:
        return skipped(name, NO_GPU)
    if not facts.gpu.driver:
        return warned(name, facts.gpu.no_nvml, INSTALL_NVML)
    major, minor = facts.gpu.driver_cuda
    found = (
        f"driver {facts.gpu.driver} supports CUDA up to {major}.{minor}, "
        f"torch built for {facts.cuda}"
    )
    wanted = tuple(map(int, facts.cuda.split(".")[:2]))
    if major < wanted[0]:
        remedy = f"update the driver, or install a torch built for CUDA {major}.x"
        return failed(name, found, remedy)
    if (major, minor) < wanted:
        remedy = "kernels compiled at run time (Triton, torch.compile) may fail: update the driver"
        return warned(name, found, remedy)
    return passed(name, found)


def nvlink(patient: Patient) -> Finding:
    """Check that NVLink connects this GPU with the GPUs of its TP group on the same node.

    This check has not run on a GPU yet.
    """
    name, gpu = "NVLink", patient.facts.gpu
    if gpu is None:
        return skipped(name, NO_GPU)
    peers = tp_peers(patient)
    if not peers:
        return skipped(name, "no other rank of the TP group is on this node")
    try:
        with opened_nvml() as nvml:
            own = handle_of(nvml, gpu.uuid)
            active, num_links = _links(nvml, own)
            unlinked = [who for who, uuid in peers if not _is_linked(nvml, own, uuid)]
    except NoNvml as error:
        remedy = "let NVML see all GPUs of the node, or compare with nvidia-smi nvlink --status"
        return warned(name, str(error), remedy)
    found = f"{active} of {num_links} links are active"
    if not unlinked:
        return passed(name, f"connected to all {len(peers)} other TP ranks of the node; {found}")
    found = f"not connected to {', '.join(unlinked)}; {found}"
    if num_links and not active:
        remedy = (
            "see nvidia-smi nvlink --status; restart nvidia-fabricmanager, or leave the node out"
        )
        return failed(name, found, remedy)
    remedy = (
        "TP would use PCIe on this node; lower parallel.tp, or check nvidia-smi nvlink --status"
    )
    return warned(name, found, remedy)


def tp_peers(patient: Patient) -> list[tuple[str, str]]:
    """Return the GPUs of the other ranks on this node that are in this rank's TP group.

    Without a mesh, because this process is the only rank, all other visible GPUs are returned.
    Without tensor parallelism, the list is empty.

    Returns:
        A pair for each GPU: a name for messages, and the UUID.
    """
    gpu, mesh = patient.facts.gpu, patient.mesh
    if gpu is None or patient.spec.parallel.tp == 1:
        return []
    if mesh is None:
        uuids = [_uuid(index) for index in range(gpu.num_visible)]
        return [(f"GPU {i}", uuid) for i, uuid in enumerate(uuids) if uuid != gpu.uuid]
    first = patient.world.rank - mesh.at.tp
    ranks = range(first, first + patient.spec.parallel.tp)
    others = [patient.everyone[rank] for rank in ranks if rank != patient.world.rank]
    return [
        (f"rank {o.rank}", o.gpu.uuid) for o in others if o.gpu and o.host == patient.facts.host
    ]


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _is_linked(nvml: Any, own: Any, uuid: str) -> bool:
    status = nvml.nvmlDeviceGetP2PStatus(
        own, handle_of(nvml, uuid), nvml.NVML_P2P_CAPS_INDEX_NVLINK
    )
    return status == nvml.NVML_P2P_STATUS_OK


def _links(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return how many of a GPU's NVLinks are active, and how many it has; (0, 0) without NVLink."""
    active = count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break
        count += 1
    return active, count


def clocks(patient: Patient, under_load: Callable[[Callable[[], None]], None]) -> Finding:
    """Check the GPU's clocks, and reasons for throttling, while the GPU multiplies matrices.

    This check has not run on a GPU yet.

    Args:
        patient: The run, this rank's device and the facts of all ranks.
        under_load: A function that keeps the GPU busy and meanwhile calls its argument repeatedly.
            It is called with a function that reads the clocks.
    """
    name, gpu = "clocks", patient.facts.gpu
    if gpu is None:
        return skipped(name, NO_GPU)
    seen: set[str] = set()
    rates: list[int] = []
    try:
        with opened_nvml() as nvml:
            handle = handle_of(nvml, gpu.uuid)

            def read() -> None:
                bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
                seen.update(n for c, n in THROTTLE_REASONS.items() if bits & getattr(nvml, c, 0))
                rates.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))

            under_load(read)
            application = _application_clock(nvml, handle)
    except NoNvml as error:
        return warned(name, str(error), INSTALL_NVML)
    return _judge_clocks(name, seen, rates, application)


def _application_clock(nvml: Any, handle: Any) -> tuple[int, int] | None:
    """Return the configured and the default application clock of the SMs, in MHz.

    Newer GPUs have no application clock; the result is then None.
    """
    try:
        return (
            nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetDefaultApplicationsClock(handle, nvml.NVML_CLOCK_SM),
        )
    except nvml.NVMLError:
        return None


def _judge_clocks(
    name: str, seen: set[str], rates: list[int], application: tuple[int, int] | None
) -> Finding:
    """Judge the clocks and the reasons for throttling that were read while the GPU was busy.

    Args:
        name: Name of the check.
        seen: Reasons for lower clocks that any reading showed, as named in `THROTTLE_REASONS`.
        rates: Clock of the SMs at each reading, in MHz.
        application: Configured and default application clock of the SMs, in MHz; None if the GPU
            has no application clock.
    """
    found = f"SM clock {min(rates)} to {max(rates)} MHz under load"
    reasons = sorted(seen - {"idle"})
    if reasons:
        found += f"; limited by {', '.join(reasons)}"
    if seen & BROKEN:
        remedy = (
            "see nvidia-smi -q -d PERFORMANCE,TEMPERATURE; leave the node out and have it repaired"
        )
        return failed(name, found, remedy)
    if seen & HOT:
        return warned(name, found, "the GPU is too hot; check its cooling, or leave the node out")
    if application is not None and application[0] < application[1]:
        found += (
            f"; application clock {application[0]} MHz is below the default of {application[1]} MHz"
        )
        return warned(name, found, "run nvidia-smi --reset-applications-clocks")
    return passed(name, found)


def memory_errors(patient: Patient) -> Finding:
    """Check for ECC errors since the driver was loaded, and for memory rows that need remapping.

    Remapping means that a GPU replaces a defective memory row by a spare one. This check has not
    run on a GPU yet.
    """
    name, gpu = "ECC", patient.facts.gpu
    if gpu is None:
        return skipped(name, NO_GPU)
    try:
        with opened_nvml() as nvml:
            handle = handle_of(nvml, gpu.uuid)
            if nvml.nvmlDeviceGetEccMode(handle)[0] != nvml.NVML_FEATURE_ENABLED:
                remedy = (
                    "run nvidia-smi -e 1 and restart, because memory errors stay undetected "
                    "without ECC"
                )
                return warned(name, "ECC is off", remedy)
            errors = nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
            *_, is_pending, has_failed = _remapped_rows(nvml, handle)
    except NoNvml as error:
        return skipped(name, str(error))
    found = f"{errors} uncorrected errors since the driver was loaded"
    if has_failed:
        return failed(
            name, f"{found}; defective memory rows could not be replaced", "have the GPU replaced"
        )
    if errors or is_pending:
        found += "; defective memory rows will be replaced at the next reset" if is_pending else ""
        return failed(name, found, "reset the GPU (nvidia-smi -r) or leave the node out")
    return passed(name, found)


def _remapped_rows(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Return four numbers about the remapped memory rows of the GPU `handle`.

    Returns:
        The number of rows remapped after correctable errors, the number of rows remapped after
            uncorrectable errors, whether a remapping is pending (1 or 0), and whether one has
            failed. All are 0 for GPUs that cannot remap rows.
    """
    try:
        return tuple(nvml.nvmlDeviceGetRemappedRows(handle))
    except nvml.NVMLError:
        return 0, 0, 0, 0


def equal_gpus(everyone: Sequence[Facts]) -> Finding:
    """Check that every rank has a device of the kind that the run needs, and that GPUs are equal.

    The verdict is warn if a node with several ranks has more GPUs than ranks. This check has not
    run on a GPU yet.

    Args:
        everyone: Facts of all ranks.
    """
    name = "GPUs"
    lacking: dict[str, list[Facts]] = {}
    for facts in everyone:
        if facts.problem:
            lacking.setdefault(facts.problem, []).append(facts)
    if lacking:
        found = "; ".join(f"{_hosts(them)}: {problem}" for problem, them in lacking.items())
        return failed(name, found, "start one rank per GPU, or set run.device = cpu")
    without = [facts for facts in everyone if facts.gpu is None]
    if len(without) == len(everyone):
        return skipped(name, NO_GPU)
    if without:
        found = (
            f"{_hosts(without)} would compute on CPUs, but the other nodes would compute on GPUs"
        )
        return failed(name, found, "set run.device = cuda, and leave out nodes without GPUs")
    kinds: dict[str, list[Facts]] = {}
    for facts in everyone:
        assert facts.gpu is not None
        gib = facts.gpu.memory_bytes / (1 << 30)
        kinds.setdefault(f"{facts.gpu.name} of {gib:.1f} GiB", []).append(facts)
    if len(kinds) > 1:
        found = "; ".join(f"{kind}: {_hosts(ranks)}" for kind, ranks in kinds.items())
        return failed(name, found, "use nodes of one kind (sbatch --constraint, --gres=gpu:TYPE:N)")
    idle = [f for f in everyone if f.gpu and _spare(f)]
    if idle:
        found = f"{next(iter(kinds))}; {_hosts(idle)} has more GPUs than ranks"
        return warned(name, found, "start one rank per GPU (--ntasks-per-node, --nproc-per-node)")
    return passed(name, f"{len(everyone)} x {next(iter(kinds))}")


def _spare(facts: Facts) -> bool:
    """Return whether a rank's node has idle GPUs, that is, more GPUs than ranks.

    False if the node has one rank, which may be intended, or if each rank sees only its own GPU.
    """
    assert facts.gpu is not None
    is_alone = facts.one_gpu_each or facts.local_world_size == 1
    return not is_alone and facts.gpu.num_visible > facts.local_world_size


def _hosts(ranks: Sequence[Facts]) -> str:
    """Return the names of the hosts of `ranks` as text. Each name is listed once."""
    return ", ".join(dict.fromkeys(facts.host for facts in ranks))


def equal_software(everyone: Sequence[Facts]) -> Finding:
    """Check that all ranks have the same versions of software and use the same kernels.

    Args:
        everyone: Facts of all ranks.
    """
    name = "versions"
    versions = {
        "wlb": [f.wlb for f in everyone],
        "torch": [f.torch for f in everyone],
        "python": [f.python for f in everyone],
        "NCCL": [f.nccl for f in everyone],
        "kernels": [f.kernels for f in everyone],
        "driver": [f.gpu.driver if f.gpu else "" for f in everyone],
    }
    differing = {what: values for what, values in versions.items() if len(set(values)) > 1}
    if differing:
        found = "; ".join(_by_host(what, values, everyone) for what, values in differing.items())
        remedy = "start all ranks in one environment or container, on nodes with one driver"
        # With different drivers, ranks may still work. With any other difference, they may compute
        # different numbers or make different plans.
        return (warned if list(differing) == ["driver"] else failed)(name, found, remedy)
    shown = [f"{what} {values[0]}" for what, values in versions.items() if values[0]]
    return passed(name, ", ".join(shown))


def _by_host(what: str, values: Sequence[str], everyone: Sequence[Facts]) -> str:
    """Describe which hosts have which version of a piece of software.

    `what` is the name of the software, and `values` has its version on each rank.
    """
    hosts: dict[str, list[Facts]] = {}
    for value, facts in zip(values, everyone, strict=True):
        hosts.setdefault(value or "none", []).append(facts)
    return f"{what} " + ", ".join(f"{value} on {_hosts(there)}" for value, there in hosts.items())
