"""Every communicator of a layout: made, its sums checked, its bandwidth measured.

Bandwidth follows nccl-tests (bytes that a rank puts on the wire over time). All groups of an axis
run at once, as in training. **Over NCCL this has not run**; over Gloo figures are shown and not
judged, because they depend on other work of the cores.
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
OPS = {WORLD: Collective.ALL_REDUCE, "replicate": Collective.ALL_REDUCE}
OPS |= dict.fromkeys(LINKS, Collective.P2P)
"""Collective that is measured on an axis; on other axes it is the all-gather, their main
collective."""
SIZES = {"cpu": (1 << 20, 1 << 24), "cuda": (1 << 24, 1 << 28)}
"""Bytes of the whole buffer in a quick and in a full examination."""
REPEATS = (5, 20)
ROWS = " rows"
"""End of the name under which an all-to-all of keys' rows over an axis is told."""
LEAST_OF_PROFILE = 0.5
REMEDY = (
    "NCCL_DEBUG=INFO shows the transport; compare with nccl-tests, see NCCL_SOCKET_IFNAME and "
    "NCCL_IB_HCA, and leave out nodes that stay slow"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTiming:
    """One communicator, as one rank measured it. first_s: of all first calls.
    latency_s: of 8 bytes. seconds: of size_bytes. is_right: sums and rows were as they must be.
    axis: with `ROWS` at its end, an all-to-all of equal parts, which puts an all-gather's bytes on
    the wire; op is what prices it, P2P between nodes.
    """

    axis: str
    ranks: tuple[int, ...]
    op: Collective
    size_bytes: int
    first_s: float
    latency_s: float
    seconds: float
    is_right: bool

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes * self.op.wire_share(len(self.ranks)) / self.seconds


def measure_groups(patient: Patient) -> list[GroupTiming]:
    """This rank's communicators, one after the other; a collective call."""
    if patient.mesh is None:
        return []
    used = used_groups(patient.mesh)
    found = [measure_group(axis, group, patient) for axis, group in used]
    exchange, cp = patient.spec.sharding.exchange, patient.mesh.parallel.cp
    if exchange != ExchangeChoice.GATHER and cp > 1:
        found.append(measure_rows("cp", patient.mesh.group("cp"), patient))
    return found


def measure_rows(axis: str, group: dist.ProcessGroup, patient: Patient) -> GroupTiming:
    """The all-to-all by which CP ranks bring each other the rows that they read."""
    device, count, is_full = patient.device, group.size(), not patient.is_quick
    size = SIZES[device.type][is_full] // (4 * count) * (4 * count)
    began = time.perf_counter()
    calls = list(checked_all_to_all(axis, group, device))
    is_right = all(found.item() == due.item() for _, found, due in calls)
    first_s = time.perf_counter() - began
    repeats, parts = REPEATS[is_full], [size // 4 // count] * count
    small, own = torch.zeros(count, device=device), torch.zeros(sum(parts), device=device)
    ones = [1] * count

    def bring(rows: torch.Tensor, splits: list[int]) -> Callable[[], object]:
        return lambda: collectives.all_to_all(rows, splits, splits, group)

    return GroupTiming(
        axis=axis + ROWS,
        ranks=tuple(dist.get_process_group_ranks(group)),
        op=Collective.ALL_GATHER,
        size_bytes=size,
        first_s=first_s,
        latency_s=_seconds(bring(small, ones), device, repeats),
        seconds=_seconds(bring(own, parts), device, repeats),
        is_right=is_right,
    )


def measure_group(axis: str, group: dist.ProcessGroup, patient: Patient) -> GroupTiming:
    device, count = patient.device, group.size()
    op = OPS.get(axis, Collective.ALL_GATHER)
    is_full = not patient.is_quick
    size = SIZES[device.type][is_full] // (4 * count) * (4 * count)
    began = time.perf_counter()
    calls = list(checked_collectives(axis, group, device))
    # The calls of item() wait for the device.
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
    """A function that runs the collective, and one that tells whether its last result is right."""
    rank, count = dist.get_rank(group), group.size()
    if op == Collective.ALL_REDUCE:
        # The buffer holds zeros, because it is reduced in place many times and other sums would
        # overflow.
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
    """Sends to the next rank and receives from the one before, around the group."""
    rank, count = dist.get_rank(group), group.size()
    following, before = (dist.get_global_rank(group, (rank + i) % count) for i in (1, -1))

    def call() -> None:
        send = dist.P2POp(dist.isend, sent, following, group)
        receive = dist.P2POp(dist.irecv, received, before, group)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()

    return call


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean over the repeats, after one that is not counted."""
    call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def link_findings(
    timings: Sequence[GroupTiming], everyone: Sequence[Facts], profile: KernelProfile | None
) -> list[Finding]:
    """A finding an axis, on rank 0. profile: source of the bandwidths to compare with; None = no
    comparison.
    """
    by_axis: dict[str, list[GroupTiming]] = {}
    for timing in timings:
        by_axis.setdefault(timing.axis, []).append(timing)
    if not by_axis:
        return [skipped("communicators", "one rank has none", "start the layout's ranks")]
    return [_of_axis(axis, found, everyone, profile) for axis, found in by_axis.items()]


def _of_axis(
    axis: str, found: list[GroupTiming], everyone: Sequence[Facts], profile: KernelProfile | None
) -> Finding:
    check, groups = f"communicator {axis}", {timing.ranks for timing in found}
    wrong = {timing.ranks for timing in found if not timing.is_right}
    if wrong:
        where = "; ".join(f"ranks {ranges(r)} on {_hosts(r, everyone)}" for r in sorted(wrong))
        remedy = "do not train here: NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 find the broken link"
        return failed(check, f"WRONG numbers in {where}", remedy)
    slow, fast = (pick(found, key=lambda t: t.bytes_per_s) for pick in (min, max))
    text = (
        f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(slow.ranks)} ranks, "
        f"{_call_of(slow)}: "
        f"{slow.bytes_per_s / 1e9:.2f} to "
        f"{fast.bytes_per_s / 1e9:.2f} GB/s, 8 bytes in {_most(found, 'latency_s') * 1e6:.0f} us, "
        f"made in {_most(found, 'first_s'):.2f} s"
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
    """Bandwidth on the wire that the profile prices this call with, its start included."""
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
