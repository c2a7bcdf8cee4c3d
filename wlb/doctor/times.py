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

# A larger difference between clocks, in seconds, has the verdict warn or fail. If clocks differ by
# 0.1 s, logs and traces of ranks cannot be compared. If they differ by a minute, file servers and
# certificates may stop working.
SKEW_WARN_S, SKEW_FAIL_S = 0.1, 60.0
LATE_S = 10.0  # a rank is late if it starts more than this many seconds after the median rank
# How many times each node's clock is read. Only the reading with the shortest round trip counts.
ROUNDS = 8
NTP = "start chronyd or ntpd on the nodes"


class Exchange(NamedTuple):
    """One reading of another node's clock over the network. Times are in Unix seconds."""

    sent: float  # time on rank 0's clock when rank 0 sent the request
    theirs: float  # time on the other node's clock, which that node sent back
    received: float  # time on rank 0's clock when the answer arrived


def clock_offset(exchanges: Sequence[Exchange]) -> tuple[float, float]:
    """Estimate how many seconds another node's clock is ahead of rank 0's, from several readings.

    Only the reading with the shortest round trip counts. The estimate assumes that the other clock
    was read in the middle of the round trip.

    Returns:
        Seconds by which the other clock is ahead, and the largest possible error of this estimate
            in seconds, which is half of the round trip.
    """
    best = min(exchanges, key=lambda e: e.received - e.sent)
    return best.theirs - (best.sent + best.received) / 2, (best.received - best.sent) / 2


def clock_skew(patient: Patient, now: Callable[[], float] = time.time) -> list[Finding]:
    """Compare the clock of each node with the clock of rank 0. A collective call.

    Rank 0 asks the first rank of each other node for its time. This check has not run between two
    nodes yet.

    Args:
        patient: The run, this rank's device and the facts of all ranks.
        now: Function that returns this node's Unix time.

    Returns:
        A list with one finding on rank 0; an empty list on other ranks.
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
        found: The result of `clock_offset` for each other node. The key names the node's first rank
            and its host. Empty if there is only one node.
    """
    check = "clock skew"
    if not found:
        return passed(check, "all ranks are on one node")
    name, (ahead_s, uncertainty_s) = max(found.items(), key=lambda item: abs(item[1][0]))
    text = f"{name}: {ahead_s * 1e3:+.2f} ms (+-{uncertainty_s * 1e3:.2f}) from rank 0's clock"
    if abs(ahead_s) > SKEW_FAIL_S:
        return failed(check, text, NTP)
    if abs(ahead_s) > SKEW_WARN_S + uncertainty_s:
        return warned(
            check,
            text,
            f"{NTP}; until then, times in logs and traces of different nodes cannot be compared",
        )
    return passed(check, f"the largest difference is {text}")


def wait_for_all(arrived: float) -> float:
    """Wait until all ranks have called this function. A collective call.

    Args:
        arrived: When this rank started, by time.perf_counter.

    Returns:
        Seconds from this rank's start until the last rank called this function.
    """
    all_reduce_hosts(torch.zeros(1))
    return time.perf_counter() - arrived


def late_finding(waits_s: Sequence[float], hosts: Sequence[str]) -> Finding:
    """Check that no rank started more than `LATE_S` seconds after the median rank.

    If some did, the finding has the verdict warn and names them.

    Args:
        waits_s: Seconds that each rank waited for the last one (`wait_for_all`).
        hosts: Host of each rank.
    """
    check = "late ranks"
    # All ranks waited for the same last rank. So a rank that waited one second less than the median
    # rank also started one second later than the median rank.
    late_s = [median(waits_s) - wait for wait in waits_s]
    late = [rank for rank, behind in enumerate(late_s) if behind > LATE_S]
    if late:
        text = "later than the median rank: " + ", ".join(
            f"rank {rank} ({hosts[rank]}) by {late_s[rank]:.1f} s" for rank in late
        )
        remedy = (
            "check for other processes on these nodes, and whether Python's files are read slowly"
        )
        return warned(check, text, remedy)
    return passed(check, f"the last rank started {max(late_s):.2f} s after the median rank")
