"""Schedules of a step as sub-groups of ranks, and the time at which its slowest rank is done.

A schedule is a sequence of groups; in each, sub-groups of ranks run calls one after the other, and
a call is one micro-batch (forward and backward) of whole samples. A sub-group begins when all of
its ranks are free; with a barrier, when all ranks have finished the group before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wlb.plan import FloatArray, IntArray

Call = tuple[int, ...]
"""Samples of one micro-batch, as indices."""


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Ranks that share calls, which they run in this order; their number is the CP degree."""

    ranks: tuple[int, ...]
    calls: tuple[Call, ...]


Schedule = Sequence[Sequence[SubGroup]]


def sub_groups(samples_of_rank: Sequence[Sequence[int]], *, packed: bool) -> list[SubGroup]:
    """Returns the sub-groups of one group from what each rank has, as Megatron's schedulers say it.

    Ranks with the same samples are one sub-group. packed: whether they are one call, not one each.
    Raises ValueError for a sample of ranks that do not agree about all of theirs.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, samples in enumerate(samples_of_rank):
        if samples:
            found.setdefault(tuple(samples), []).append(rank)
    owners = [sample for samples in found for sample in samples]
    if len(set(owners)) < len(owners):
        raise ValueError("a sample is shared by ranks that do not share all their samples")
    return [
        SubGroup(tuple(ranks), (samples,) if packed else tuple((sample,) for sample in samples))
        for samples, ranks in found.items()
    ]


def check(schedule: Schedule, lengths: IntArray, *, num_ranks: int, rows: int) -> None:
    """Raises ValueError unless each sample is in one call, and a rank has `rows` tokens at most.

    A sub-group of all ranks may have more: a sample that is too long has nowhere else to go.
    """
    placed = np.zeros(lengths.size, np.int64)
    for group in schedule:
        ranks = [rank for sub in group for rank in sub.ranks]
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(num_ranks)):
            raise ValueError(f"a group has ranks {sorted(ranks)} of {num_ranks}")
        for sub in group:
            for call in sub.calls:
                np.add.at(placed, list(call), 1)
                degree, tokens = len(sub.ranks), int(lengths[list(call)].sum())
                if degree < num_ranks and -(-tokens // degree) > rows:
                    raise ValueError(f"{tokens} tokens on {degree} ranks of {rows}")
    if not (placed == 1).all():
        bad = int((placed != 1).argmax())
        raise ValueError(f"sample {bad} of {lengths.size} is in {placed[bad]} calls")


def finished_ns(
    schedule: Schedule, price: Callable[[Call, int], float], *, num_ranks: int, barrier: bool
) -> FloatArray:
    """Returns the time at which each rank has finished, shape [num_ranks]; price: of a call on a
    number of ranks."""
    at = np.zeros(num_ranks)
    for group in schedule:
        for sub in group:
            ranks = list(sub.ranks)
            at[ranks] = at[ranks].max() + sum(price(call, len(ranks)) for call in sub.calls)
        if barrier:
            at[:] = at.max()
    return at
