"""Our schedule of dynamic degrees: sub-groups of any size, planned by price, waits included.

Samples that one rank cannot hold, or that are too much work for one, are calls of their own on
several ranks, most ranks first, each where it can begin first. The others go one by one, heaviest
first, to the rank that is done first, and share calls there; ranks with long samples thus get fewer
others. Several numbers of ranks are tried, and the schedule that is predicted to finish first is
taken. A sub-group stays in a node if it fits one, and begins with a node if not.
"""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.cp_degree.groups import Call, Schedule, SubGroup, finished_ns
from wlb.plan import FloatArray, IntArray

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Work of a sample's part, at most, over a rank's mean work of the step."""
WIDER = (1, 4 / 3, 3 / 2, 2, 8 / 3, 3)
"""Ranks of a sample that one rank cannot hold, over those that hold it; with a limit of 1.5 windows
a whole window is held by two thirds of the CP degree, so 4 / 3 makes that degree."""


def planned(
    lengths: IntArray,
    work: FloatArray,
    price: Callable[[Call, int], float],
    *,
    num_ranks: int,
    near: int,
    rows: int,
) -> Schedule:
    """Returns the best schedule found for samples of `lengths`, shape [num_samples].

    work: of each sample on one rank, in a call with others, in ns. price: of a call on a number of
    ranks, in ns. near: neighbouring ranks of a node. rows: most tokens of a rank.
    """
    held = -(-lengths // rows)
    found: list[tuple[float, int, Schedule]] = []
    for share in SHARES:
        parts = np.ceil(work / (share * work.sum() / num_ranks)).astype(np.int64)
        for wider in WIDER:
            wide = np.where(held > 1, np.rint(held * wider).astype(np.int64), 1)
            degree = np.clip(np.maximum(parts, wide), 1, num_ranks)
            # Ranks of another node cost more than they save, unless one node cannot hold a sample.
            degree = np.where(held <= near, np.minimum(degree, near), degree)
            made = _schedule(
                lengths, work, degree, price, num_ranks=num_ranks, near=near, rows=rows
            )
            ends = finished_ns(made, price, num_ranks=num_ranks, barrier=False)
            found.append((float(ends.max()), len(found), made))
    return min(found, key=lambda one: one[:2])[2]


def _schedule(
    lengths: IntArray,
    work: FloatArray,
    degree: IntArray,
    price: Callable[[Call, int], float],
    *,
    num_ranks: int,
    near: int,
    rows: int,
) -> Schedule:
    """Samples on `degree` ranks each, shape [num_samples]."""
    at = np.zeros(num_ranks)
    out: list[list[SubGroup]] = []
    order = np.lexsort((-work, -degree))
    for i in order[degree[order] > 1].tolist():
        size = int(degree[i])
        first = min(_starts(num_ranks, near, size), key=lambda s: (at[s : s + size].max(), s))
        at[first : first + size] = at[first : first + size].max() + price((i,), size)
        out.append([SubGroup(tuple(range(first, first + size)), ((i,),))])
    mine: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in order[degree[order] == 1].tolist():
        rank = int(at.argmin())
        mine[rank].append(i)
        at[rank] += work[i]
    for rank, samples in enumerate(mine):
        calls = _calls(lengths, samples, rows)
        if calls:
            out.append([SubGroup((rank,), calls)])
    return out


def _calls(lengths: IntArray, samples: Sequence[int], rows: int) -> tuple[Call, ...]:
    """Calls of at most `rows` tokens: samples from long to short, each in the first with room."""
    room: list[int] = []
    calls: list[list[int]] = []
    for i in sorted(samples, key=lambda i: (-int(lengths[i]), i)):
        size = int(lengths[i])
        at = next((k for k, left in enumerate(room) if left >= size), len(calls))
        if at == len(calls):
            calls.append([])
            room.append(rows)
        calls[at].append(i)
        room[at] -= size
    return tuple(map(tuple, calls))


def _starts(num_ranks: int, near: int, degree: int) -> Sequence[int]:
    """First ranks that a sub-group of so many may have."""
    if degree > near:
        return range(0, num_ranks - degree + 1, near)
    return [s for s in range(num_ranks - degree + 1) if s % near + degree <= near]
