"""Uses every communicator of a layout, checks its results, and measures its bandwidth.

Bandwidth is the bus bandwidth of nccl-tests: the bytes that a rank must send, divided by the time
of the call. All groups of an axis of the mesh, for example all TP groups, are measured at the same
time, because they also communicate at the same time in training.

**This code has not run with NCCL yet.** With Gloo, bandwidth is shown but not judged, because it
depends on other work of the CPU cores.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from wlb.cost import link_bandwidths
from wlb.cost.profile import Collective, KernelProfile
from wlb.doctor.facts import Facts, Patient
from wlb.doctor.finding import Finding, failed, passed, ranges, skipped, warned
from wlb.parallel import collectives
from wlb.parallel.connect import checked_all_to_all, checked_collectives
from wlb.parallel.grid import LINKS
from wlb.parallel.mesh import used_groups
from wlb.spec import ExchangeChoice

WORLD = "world"
# The collective that is measured on each axis of the mesh, which is the one that training uses most
# on that axis. The all-gather is measured on axes that are not named here.
OPS = {WORLD: Collective.ALL_REDUCE, "replicate": Collective.ALL_REDUCE}
OPS |= dict.fromkeys(LINKS, Collective.P2P)
SIZES = {"cpu": (1 << 20, 1 << 24), "cuda": (1 << 24, 1 << 28)}
"""Size in bytes of a call's buffer, by kind of device: in a quick and in a full examination."""
REPEATS = (5, 20)  # number of timed calls in a quick and in a full examination
ROWS = " rows"
"""Suffix that an axis' name gets if its all-to-all is measured.

CP ranks use an all-to-all to exchange only the rows of keys and values that they need."""
# A communicator of GPUs is slow if its bandwidth is below this share of the profile's bandwidth.
LEAST_OF_PROFILE = 0.5
REMEDY = (
    "check the transport with NCCL_DEBUG=INFO and the interfaces in NCCL_SOCKET_IFNAME and "
    "NCCL_IB_HCA, compare with nccl-tests, and leave out nodes that stay slow"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTiming:
    """Measurements of one communicator on one rank."""

    # Name of the axis of the mesh, with the suffix `ROWS` if an all-to-all was measured.
    axis: str
    ranks: tuple[int, ...]  # ranks of the communicator
    # The measured collective. An all-to-all of equal parts is recorded as an all-gather, because a
    # rank must send equally many bytes in both.
    op: Collective
    size_bytes: int  # size of the buffer in the timed calls
    # Seconds that the first calls of all checked collectives took together. They connect the ranks.
    first_s: float
    latency_s: float  # seconds of a call with a buffer of 8 bytes
    seconds: float  # seconds of a call with a buffer of size_bytes
    is_right: bool  # whether all checked results were right

    @property
    def bytes_per_s(self) -> float:
        """Bus bandwidth as in nccl-tests: bytes that a rank must send, per second of the call."""
        return self.size_bytes * self.op.wire_share(len(self.ranks)) / self.seconds


def measure_groups(patient: Patient) -> list[GroupTiming]:
    """Measure each of this rank's communicators, one after the other. A collective call.

    The result is empty if `patient` has no mesh.
    """
    if patient.mesh is None:
        return []
    used = used_groups(patient.mesh)
    found = [measure_group(axis, group, patient) for axis, group in used]
    exchange, cp = patient.spec.sharding.exchange, patient.mesh.parallel.cp
    if exchange != ExchangeChoice.GATHER and cp > 1:
        found.append(measure_rows("cp", patient.mesh.group("cp"), patient))
    return found


def measure_rows(axis: str, group: dist.ProcessGroup, patient: Patient) -> GroupTiming:
    """Measure and check an all-to-all in which every rank sends equally many bytes to every rank.

    CP ranks use all-to-alls to exchange only the keys and values that they need.

    Args:
        axis: Name of the axis of the mesh.
        group: The communicator.
        patient: The run, this rank's device and the facts of all ranks.
    """
    device, count, is_full = patient.device, group.size(), not patient.is_quick
    size = SIZES[device.type][is_full] // (4 * count) * (4 * count)
    began = time.perf_counter()
    calls = list(checked_all_to_all(axis, group, device))
    is_right = all(found.item() == due.item() for _, found, due in calls)
    first_s = time.perf_counter() - began
    repeats, parts = REPEATS[is_full], [size // 4 // count] * count
    small, large = torch.zeros(count, device=device), torch.zeros(sum(parts), device=device)
    ones = [1] * count

    def exchange_of(rows: torch.Tensor, splits: list[int]) -> Callable[[], object]:
        return lambda: collectives.all_to_all(rows, splits, splits, group)

    return GroupTiming(
        axis=axis + ROWS,
        ranks=tuple(dist.get_process_group_ranks(group)),
        op=Collective.ALL_GATHER,
        size_bytes=size,
        first_s=first_s,
        latency_s=_seconds(exchange_of(small, ones), device, repeats),
        seconds=_seconds(exchange_of(large, parts), device, repeats),
        is_right=is_right,
    )


def measure_group(axis: str, group: dist.ProcessGroup, patient: Patient) -> GroupTiming:
    """Measure the collective that training uses most on a communicator, and check its result.

    Args:
        axis: Name of the axis of the mesh.
        group: The communicator.
        patient: The run, this rank's device and the facts of all ranks.
    """
    device, count = patient.device, group.size()
    op = OPS.get(axis, Collective.ALL_GATHER)
    is_full = not patient.is_quick
    size = SIZES[device.type][is_full] // (4 * count) * (4 * count)
    began = time.perf_counter()
    calls = list(checked_collectives(axis, group, device))
    # item() waits for the device, so first_s includes the execution of the calls.
    is_right = all(found.item() == due.item() for _, found, due in calls)
    first_s = time.perf_counter() - began
    small, repeats = torch.zeros(2, device=device), REPEATS[is_full]
    latency_s = _seconds(lambda: dist.all_reduce(small, group=group), device, repeats)
    call, check = _call(op, group, size, device)
    seconds = _seconds(call, device, repeats)
    return GroupTiming(
        axis=axis,
        ranks=tuple(dist.get_process_group_ranks(group)),
        op=op,
        size_bytes=size,
        first_s=first_s,
        latency_s=latency_s,
        seconds=seconds,
        is_right=is_right and check(),
    )


def _call(
    op: Collective, group: dist.ProcessGroup, size: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], bool]]:
    """Return a function that calls the collective `op` once, and one that checks its result.

    The checking function returns whether the result is right. `size` is the size of the buffer in
    bytes.
    """
    rank, count = dist.get_rank(group), group.size()
    if op == Collective.ALL_REDUCE:
        # The buffer has only zeros. Other values could overflow, because each call sums in place.
        total = torch.zeros(size // 4, device=device)
        return lambda: dist.all_reduce(total, group=group), lambda: not bool(total.any())
    if op == Collective.P2P:
        sent = torch.full((size // 4,), float(rank), device=device)
        received = torch.full_like(sent, -1.0)
        call = _shift(sent, received, group)
        return call, lambda: bool((received == (rank - 1) % count).all())
    mine = torch.full((size // 4 // count,), float(rank), device=device)
    rows = torch.arange(count, device=device, dtype=torch.float32)
    return (
        lambda: collectives.all_gather(mine, group),
        lambda: bool((collectives.all_gather(mine, group).view(count, -1) == rows[:, None]).all()),
    )


def _shift(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Return a function that sends `sent` to the next rank of the group's ring.

    It also receives the previous rank's tensor into `received`.
    """
    rank, count = dist.get_rank(group), group.size()
    following, before = (dist.get_global_rank(group, (rank + i) % count) for i in (1, -1))

    def call() -> None:
        send = dist.P2POp(dist.isend, sent, following, group)
        receive = dist.P2POp(dist.irecv, received, before, group)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()

    return call


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the mean seconds of a call, over `repeats` calls that follow an untimed first call."""
    call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def link_findings(
    timings: Sequence[GroupTiming], everyone: Sequence[Facts], profile: KernelProfile | None
) -> list[Finding]:
    """Return a finding on the communicators of each axis of the mesh. Only rank 0 calls this.

    Args:
        timings: Measurements of all ranks.
        everyone: Facts of all ranks.
        profile: The profile whose bandwidths are compared with the measured ones; None compares
            nothing.
    """
    by_axis: dict[str, list[GroupTiming]] = {}
    for timing in timings:
        by_axis.setdefault(timing.axis, []).append(timing)
    if not by_axis:
        return [
            skipped(
                "communicators",
                "a single rank has no communicators",
                "start all ranks of the layout",
            )
        ]
    return [_axis_finding(axis, found, everyone, profile) for axis, found in by_axis.items()]


def _axis_finding(
    axis: str, found: list[GroupTiming], everyone: Sequence[Facts], profile: KernelProfile | None
) -> Finding:
    """Judge the communicators of one axis of the mesh, given all ranks' measurements `found`.

    The verdict is fail if a result was wrong. On GPUs it is warn if the slowest communicator's
    bandwidth is far below the profile's (`LEAST_OF_PROFILE`). With profile = None the bandwidth is
    not judged.
    """
    check, groups = f"communicator {axis}", {timing.ranks for timing in found}
    wrong = {timing.ranks for timing in found if not timing.is_right}
    if wrong:
        where = "; ".join(f"ranks {ranges(r)} on {_hosts(r, everyone)}" for r in sorted(wrong))
        remedy = (
            "do not train on these nodes; to find the broken link, repeat with NCCL_P2P_DISABLE=1 "
            "or NCCL_IB_DISABLE=1"
        )
        return failed(check, f"WRONG results from {where}", remedy)
    slow, fast = (pick(found, key=lambda t: t.bytes_per_s) for pick in (min, max))
    text = (
        f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(slow.ranks)} ranks, "
        f"{_call_of(slow)}: "
        f"{slow.bytes_per_s / 1e9:.2f} to "
        f"{fast.bytes_per_s / 1e9:.2f} GB/s, 8 bytes in {_most(found, 'latency_s') * 1e6:.0f} us, "
        f"first calls in {_most(found, 'first_s'):.2f} s"
    )
    if profile is None:
        return passed(check, text)
    expected = expected_bytes_per_s(slow, profile)
    text += f"; profile {profile.name} assumes {expected / 1e9:.2f} GB/s"
    if everyone[slow.ranks[0]].gpu is not None and slow.bytes_per_s < LEAST_OF_PROFILE * expected:
        where = f"slowest: ranks {ranges(slow.ranks)} on {_hosts(slow.ranks, everyone)}"
        return warned(check, f"{text}; {where}", REMEDY)
    return passed(check, text)


def expected_bytes_per_s(timing: GroupTiming, profile: KernelProfile) -> float:
    """Return the bandwidth (bytes/s) that a profile predicts for the call measured in `timing`.

    The value can be compared with `GroupTiming.bytes_per_s`. It includes the latency of the call,
    except for an all-to-all between nodes, for which the bandwidth of their links is returned.
    """
    count, span = len(timing.ranks), max(timing.ranks) - min(timing.ranks) + 1
    if timing.axis.endswith(ROWS) and span > profile.ranks_per_node:
        return link_bandwidths(profile).between
    cost = profile.collective(timing.op, span_ranks=span, num_ranks=count)
    seconds = cost.time_ns(timing.size_bytes, num_ranks=count) / 1e9
    return timing.size_bytes * timing.op.wire_share(count) / seconds


def _call_of(timing: GroupTiming) -> str:
    return "all_to_all" if timing.axis.endswith(ROWS) else str(timing.op)


def _hosts(ranks: Sequence[int], everyone: Sequence[Facts]) -> str:
    return ", ".join(dict.fromkeys(everyone[rank].host for rank in ranks))


def _most(timings: Sequence[GroupTiming], name: str) -> float:
    return max(getattr(timing, name) for timing in timings)
