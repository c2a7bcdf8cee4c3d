"""Clocks of nodes compared with rank 0's, and ranks that start late."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from wlb.doctor.facts import Patient
from wlb.doctor.finding import Finding, failed, passed, warned
from wlb.parallel.host import all_reduce_hosts, host_group

APART_WARN_S, APART_FAIL_S = 0.1, 60.0
"""Logs and traces of ranks no longer compare; file servers and certificates no longer agree."""
LATE_S = 10.0
ROUNDS = 8
NTP = "start chronyd or ntpd on the nodes"


class Exchange(NamedTuple):
    """One question of rank 0 for another clock: Unix times in seconds."""

    asked: float
    theirs: float
    answered: float


def apart(exchanges: Sequence[Exchange]) -> tuple[float, float]:
    """How far the other clock is ahead in seconds, and by how much that may be wrong: half of the
    shortest round trip, whose middle is taken for the moment of the answer.
    """
    best = min(exchanges, key=lambda e: e.answered - e.asked)
    return best.theirs - (best.asked + best.answered) / 2, (best.answered - best.asked) / 2


def clock_skew(patient: Patient, now: Callable[[], float] = time.time) -> list[Finding]:
    """Rank 0 asks one rank of each other node in turn, over Gloo; a collective call.

    The finding is rank 0's alone. Between two nodes it has not run.
    """
    leaders = [facts for facts in patient.everyone if facts.local_rank == 0 and facts.rank]
    mine, group = torch.zeros(1, dtype=torch.float64), host_group()
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
            asked = now()
            dist.send(mine, dst=facts.rank, group=group)
            dist.recv(mine, src=facts.rank, group=group)
            exchanges.append(Exchange(asked, float(mine), now()))
        found[f"rank {facts.rank} ({facts.host})"] = apart(exchanges)
    return [skew_finding(found)]


def skew_finding(found: dict[str, tuple[float, float]]) -> Finding:
    """found: seconds ahead and their uncertainty, by who."""
    check = "clock skew"
    if not found:
        return passed(check, "one node has one clock")
    who, (ahead_s, about_s) = max(found.items(), key=lambda item: abs(item[1][0]))
    text = f"{who} is {ahead_s * 1e3:+.2f} ms (+-{about_s * 1e3:.2f}) from rank 0"
    if abs(ahead_s) > APART_FAIL_S:
        return failed(check, text, NTP)
    if abs(ahead_s) > APART_WARN_S + about_s:
        return warned(check, text, f"{NTP}; logs and traces of ranks do not compare")
    return passed(check, f"at most: {text}")


def wait_for_all(arrived: float) -> float:
    """Seconds from `arrived` (time.perf_counter) until the last rank came; a collective call."""
    all_reduce_hosts(torch.zeros(1))
    return time.perf_counter() - arrived


def late_finding(waits_s: Sequence[float], hosts: Sequence[str]) -> Finding:
    """The rank that all waited for, if it came `LATE_S` after the median rank. waits_s: by rank."""
    check = "late ranks"
    late_s = [median(waits_s) - wait for wait in waits_s]
    late = [rank for rank, behind in enumerate(late_s) if behind > LATE_S]
    if late:
        text = ", ".join(f"rank {rank} ({hosts[rank]}) by {late_s[rank]:.1f} s" for rank in late)
        remedy = (
            "check other processes on these nodes, and the speed of reading the environment's files"
        )
        return warned(check, text, remedy)
    return passed(check, f"the last came {max(late_s):.2f} s after the median")
