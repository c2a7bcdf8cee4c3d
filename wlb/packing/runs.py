"""Equal documents placed together: the bins that a loop over single documents would choose.

Files of tiny documents have hundreds of thousands of equal lengths in a global batch, and a heap
takes microseconds for each. The choices of a run of equal documents follow from sorting.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from wlb.plan import IntArray

LEAST = 64
"""Equal documents in a row, and twice the bins, from which placing them together is faster."""
_MOST_LOAD = 1 << 61


def runs_of(*columns: Sequence[int], num_bins: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of runs of equal rows that are long enough to be placed together; columns: of
    [n] each."""
    least = max(LEAST, 2 * num_bins)
    if len(columns[0]) < least:
        return
    table = np.array(columns, np.int64)
    changes = np.flatnonzero((np.diff(table, axis=1) != 0).any(0)) + 1
    for first, stop in pairwise([0, *changes.tolist(), table.shape[1]]):
        if stop - first >= least:
            yield first, stop


def least_loaded(
    loads: Sequence[int],
    work: int,
    num: int,
    *,
    room: Sequence[int],
    other: tuple[Sequence[int], int] | None = None,
) -> IntArray:
    """The bin of each of `num` documents of equal `work`, each put into the least loaded bin that
    still has room (the first of several), shape [at most num]; it ends where no bin has room.

    loads: work of each bin so far. room: documents that each bin may still take. other: loads and
    work at another price; a bin's load is then the larger of the two. Totals must fit 64 bits.
    """
    begin, steps = [np.array(loads, np.int64)], [work]
    if other is not None:
        begin.append(np.array(other[0], np.int64))
        steps.append(other[1])
    free = np.minimum(np.array(room, np.int64), num)
    level = (sum(np.max(begin, axis=0).tolist()) + num * max(steps)) // len(free) + 1
    bins, load = _by_load(begin, steps, _entries(begin, steps, free, level))
    # Bins without room leave more to the others than an even share, which may pass the level.
    if bins.size < min(num, int(free.sum())) or (load[:num] > level).any():
        bins, _ = _by_load(begin, steps, free)
    return bins[:num]


def _by_load(
    begin: list[IntArray], steps: list[int], counts: IntArray
) -> tuple[IntArray, IntArray]:
    """The bin of each document, of which bins take at most `counts`, and the load that the bin has
    when it takes it, at the worse price; least loads first, both of shape [sum of counts]."""
    bins = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(bins.size) - np.repeat(np.cumsum(counts) - counts, counts)
    load = np.max([x[bins] + nth * step for x, step in zip(begin, steps, strict=True)], axis=0)
    order = np.lexsort((nth, bins, load))
    return bins[order], load[order]


def _entries(begin: list[IntArray], steps: list[int], free: IntArray, level: int) -> IntArray:
    """Upper bound on the documents that each bin takes, shape [num_bins]: those that it takes while
    its load is at most `level`. The least loaded bin never exceeds the final mean, which is below
    `level`, as long as all bins have room."""
    counts = free
    for load, step in zip(begin, steps, strict=True):
        if step:
            counts = np.minimum(counts, np.maximum(0, (level - load) // step + 1))
    return counts


def fits_64_bits(loads: Sequence[int], work: int, num: int) -> bool:
    """Whether loads of bins after `num` more documents of `work` stay far from overflow."""
    return max(loads) + num * work < _MOST_LOAD
