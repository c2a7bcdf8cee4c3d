"""Measures how much CPU time other programs took during each step of a training run (Linux).

A new line in the run's metrics marks the end of a step. The time of other programs is the busy time
of all cores in the step minus the CPU time of the run's processes. Busy time includes stolen time,
which other virtual machines took.

/proc is read once per step. It counts in hundredths of a second, so the result says little about
steps much shorter than a second.
"""

import os
import time
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

_PROC = Path("/proc")
_POLL_S = 0.02
_IDLE = (3, 4)
"""Fields of /proc/stat in which a core does nothing: idle, and waiting for a disk."""


class _Reading(NamedTuple):
    at_s: float  # when it was read
    busy_s: float  # busy time of all cores since the machine started
    own_s: float  # CPU time of the run's processes and of this process


def watch(run: "Popen[Any]", metrics: Path) -> list[float]:
    """Waits for a run to end and returns the cores that other programs used in each step.

    Args:
        run: The training process.
        metrics: File that the run writes its metrics to.

    Returns:
        CPU time of other programs over the time of the step, for each step except the first. Empty
        on systems without /proc.
    """
    readings: list[_Reading] = []
    seen = 0
    while run.poll() is None:
        time.sleep(_POLL_S)
        size = metrics.stat().st_size if metrics.exists() else 0
        if size == seen or not (_PROC / "stat").exists():
            continue
        seen = size
        num_steps = metrics.read_text("utf-8").count('"kind": "step"')
        if num_steps > len(readings):
            readings += [_read(run.pid)] * (num_steps - len(readings))
    return [
        max(0.0, (b.busy_s - a.busy_s) - (b.own_s - a.own_s)) / max(1e-3, b.at_s - a.at_s)
        for a, b in pairwise(readings)
    ]


def _read(pid: int) -> _Reading:
    ticks = os.sysconf("SC_CLK_TCK")
    first, *_ = (_PROC / "stat").read_text().splitlines()
    times = [int(x) for x in first.split()[1:9]]
    busy = sum(t for i, t in enumerate(times) if i not in _IDLE)
    return _Reading(time.monotonic(), busy / ticks, _own_ticks(pid) / ticks)


def _own_ticks(pid: int) -> int:
    """Returns the CPU time of this process, of `pid` and of all its descendants, in clock ticks."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for path in _PROC.iterdir():
        if not path.name.isdigit():
            continue
        try:
            _, _, rest = (path / "stat").read_text().rpartition(")")
        except OSError:
            continue  # the process has just ended
        values = rest.split()
        parents[int(path.name)] = int(values[1])
        used[int(path.name)] = int(values[11]) + int(values[12])
    return sum(
        ticks
        for child, ticks in used.items()
        if child == os.getpid() or _descends(child, pid, parents)
    )


def _descends(child: int, ancestor: int, parents: dict[int, int]) -> bool:
    while child in parents and child != ancestor:
        child = parents[child]
    return child == ancestor
