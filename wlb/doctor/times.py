"""Compares the clocks of nodes with the clock of rank 0, and finds ranks that start late."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from wlb.doctor.facts import Patient
from wlb.doctor.finding import Finding, failed, passed, warned
from wlb.parallel.host import all_reduce_hosts, host_group

# Differences between clocks, in seconds, that are a warning or a fail. If clocks differ by 0.1 s,
# logs and traces of ranks cannot be compared. If they differ by a minute, file servers and
# certificates no longer work.
SKEW_WARN_S, SKEW_FAIL_S = 0.1, 60.0
LATE_S = 10.0  # a rank is late if it starts more than this many seconds after the median rank
# How often each node's clock is read. The reading with the shortest round trip counts.
ROUNDS = 8
NTP = "start chronyd or ntpd on the nodes"


class Exchange(NamedTuple):
    """One reading of another node's clock over the network. Times are in Unix seconds."""

    sent: float  # rank 0's clock when it asked
    theirs: float  # the other clock's answer
    received: float  # rank 0's clock when the answer arrived


def clock_offset(exchanges: Sequence[Exchange]) -> tuple[float, float]:
    """Estimate how many seconds another clock is ahead of this one, from several readings.

    Only the reading with the shortest round trip counts. The other clock is assumed to be read in
    the middle of the round trip.

    Returns:
        Seconds that the other clock is ahead, and the largest error of this estimate, which is half
            of the round trip.
    """
    best = min(exchanges, key=lambda e: e.received - e.sent)
    return best.theirs - (best.sent + best.received) / 2, (best.received - best.sent) / 2


def clock_skew(patient: Patient, now: Callable[[], float] = time.time) -> list[Finding]:
    """Compare the clock of each node with the clock of rank 0. A collective call.

    Rank 0 asks the first rank of each other node for its time. This check has not run between two
    nodes yet.

    Args:
        patient: Inputs of the check.
        now: Returns the Unix time.

    Returns:
        A finding on rank 0; none on other ranks.
    """
    leaders = [facts for facts in patient.everyone if facts.local_rank == 0 and facts.rank]
    mine, group = torch.zeros(1, dtype=torch.float64), host_group()
    # A rank other than 0 answers with its time if it is the first of its node.
    if patient.world.rank:
        for facts in leaders:
            if facts.rank == patient.world.rank:
                for _ in range(ROUNDS):
                    dist.recv(mine, src=0, group=group)
                    dist.send(torch.tensor([now()], dtype=torch.float64), dst=0, group=group)
        return []
    found: dict[str, tuple[float, float]] = {}
    for facts in leaders:
        exchanges: list[Exchange] = []
        for _ in range(ROUNDS):
            sent = now()
            dist.send(mine, dst=facts.rank, group=group)
            dist.recv(mine, src=facts.rank, group=group)
            exchanges.append(Exchange(sent, float(mine), now()))
        found[f"rank {facts.rank} ({facts.host})"] = clock_offset(exchanges)
    return [skew_finding(found)]


def skew_finding(found: dict[str, tuple[float, float]]) -> Finding:
    """Return the finding about the clock that differs most from rank 0's.

    Args:
        found: By rank and host: the seconds that its clock is ahead of rank 0's, and the largest
            error of this estimate. Empty if there is only one node.
    """
    check = "clock skew"
    if not found:
        return passed(check, "not needed on one node")
    name, (ahead_s, uncertainty_s) = max(found.items(), key=lambda item: abs(item[1][0]))
    text = f"{name} differs by {ahead_s * 1e3:+.2f} ms (+-{uncertainty_s * 1e3:.2f}) from rank 0"
    if abs(ahead_s) > SKEW_FAIL_S:
        return failed(check, text, NTP)
    if abs(ahead_s) > SKEW_WARN_S + uncertainty_s:
        return warned(
            check,
            text,
            f"{NTP}; until then, times in logs and traces of different nodes cannot be compared",
        )
    return passed(check, f"at most: {text}")


def wait_for_all(arrived: float) -> float:
    """Wait for all ranks, and return how long this rank has waited. A collective call.

    Args:
        arrived: When this rank started, by time.perf_counter.

    Returns:
        Seconds from this rank's start until the last rank came.
    """
    all_reduce_hosts(torch.zeros(1))
    return time.perf_counter() - arrived


def late_finding(waits_s: Sequence[float], hosts: Sequence[str]) -> Finding:
    """Return a warning that names the ranks that started more than `LATE_S` after the median rank.

    Args:
        waits_s: Seconds that each rank waited for the last one.
        hosts: Host of each rank.
    """
    check = "late ranks"
    # All ranks waited for the same last rank. So a rank that waited one second less than the median
    # rank started one second later.
    late_s = [median(waits_s) - wait for wait in waits_s]
    late = [rank for rank, behind in enumerate(late_s) if behind > LATE_S]
    if late:
        text = ", ".join(f"rank {rank} ({hosts[rank]}) by {late_s[rank]:.1f} s" for rank in late)
        remedy = "check for other processes on these nodes, and for slow reading of Python's files"
        return warned(check, text, remedy)
    return passed(check, f"the last came {max(late_s):.2f} s after the median")
