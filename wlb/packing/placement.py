"""Algorithm 1's placement: each document to the micro-batch that has least work, if it fits there.

`place` takes documents in order. Files of tiny documents have hundreds of thousands of equal
lengths in a global batch, and a heap takes microseconds for each, so runs of equal documents are
placed together: the choices of a loop over them follow from sorting.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from wlb.plan import IntArray

LEAST = 64
"""Equal documents in a row, and twice the bins, from which placing them together is faster."""
_MOST_LOAD = 1 << 61


def place(
    lengths: list[int],
    workloads: list[int],
    *,
    num_micro_batches: int,
    s_max: int,
    step_tokens: int | None = None,
    second: list[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Lines 22-37 of Algorithm 1: (rows of each micro-batch, rows left over), in the given order.

    step_tokens: a document that would bring the sum over all micro-batches above it is left over.
    second: work at another price, in units of the same sum (`prices.comparable`); a micro-batch's
    work is then the larger of its two sums.
    Both minima come from heaps of one entry a micro-batch, O(log N) a document: work and size only
    grow, so an old entry is a lower bound and is brought up to date when it comes to the top. Runs
    of equal documents are placed together (`runs_of`), with the same result.
    """
    others = workloads if second is None else second
    placed = _Placement(lengths, workloads, others, num=num_micro_batches, s_max=s_max)
    placed.room = num_micro_batches * s_max if step_tokens is None else step_tokens
    at = 0
    for first, stop in runs_of(lengths, workloads, others, num_bins=num_micro_batches):
        placed.each(at, first)
        at = first + placed.together(first, stop - first)
    placed.each(at, len(lengths))
    return placed.rows, placed.rest


class _Placement:
    """Micro-batches being filled with documents, whose columns are of [n]. rows: of each
    micro-batch; rest: rows left over; room: tokens that the step may still take.
    """

    def __init__(
        self, lengths: list[int], one: list[int], two: list[int], *, num: int, s_max: int
    ) -> None:
        self.lengths, self.one, self.two, self.s_max = lengths, one, two, s_max
        self.rows: list[list[int]] = [[] for _ in range(num)]
        self.rest: list[int] = []
        self.room = 0
        # Loads at both prices, the larger of them, and tokens, by micro-batch.
        self._loads = [0] * num, [0] * num
        self._work, self._size = [0] * num, [0] * num
        self._by_work = [(0, i) for i in range(num)]
        self._by_size = [(0, i) for i in range(num)]
        # The shortest document from each row on: where even that fits nowhere, nothing more does.
        backwards = np.array([*lengths, s_max + 1], np.int64)[::-1]
        self._shortest = np.minimum.accumulate(backwards)[::-1].tolist()

    def each(self, first: int, stop: int) -> None:
        """Place rows [first, stop) one by one: where the least work is, if they fit there, else
        where the fewest tokens are.
        """
        rows, rest, (one, two), work = self.rows, self.rest, self._loads, self._work
        size, by_work, by_size, s_max = self._size, self._by_work, self._by_size, self.s_max
        room = self.room
        columns = (self.lengths[first:stop], self.one[first:stop], self.two[first:stop])
        for row, (length, a, b) in enumerate(zip(*columns, strict=True), first):
            if length > room:
                rest.append(row)
                continue
            while by_work[0][0] != work[target := by_work[0][1]]:
                heapq.heapreplace(by_work, (work[target], target))
            if size[target] + length > s_max:
                while by_size[0][0] != size[target := by_size[0][1]]:
                    heapq.heapreplace(by_size, (size[target], target))
                if size[target] + length > s_max:
                    if size[target] + self._shortest[row] > s_max:
                        rest += range(row, stop)
                        break
                    rest.append(row)
                    continue
            rows[target].append(row)
            one[target] += a
            two[target] += b
            work[target] = max(one[target], two[target])
            size[target] += length
            room -= length
        self.room = room

    def together(self, first: int, num: int) -> int:
        """Place equal documents from row `first` on, up to the first that does not go where the
        least work is; how many were placed.
        """
        length, a, b = self.lengths[first], self.one[first], self.two[first]
        num = min(num, self.room // length)
        one, two = self._loads
        if not num or not fits_64_bits([*one, *two], max(a, b), num):
            return 0
        target = least_loaded(one, a, num, room=[num] * len(one), other=(two, b))
        for i, size in enumerate(self._size):
            over = np.flatnonzero(target == i)[(self.s_max - size) // length :]
            if over.size:
                target = target[: int(over[0])]
        for i in np.flatnonzero(np.bincount(target, minlength=len(one))).tolist():
            taken = (first + np.flatnonzero(target == i)).tolist()
            self.rows[i] += taken
            one[i] += len(taken) * a
            two[i] += len(taken) * b
            self._work[i] = max(one[i], two[i])
            self._size[i] += len(taken) * length
        self.room -= target.size * length
        self._by_work = [(work, i) for i, work in enumerate(self._work)]
        heapq.heapify(self._by_work)
        return target.size


def runs_of(*columns: Sequence[int], num_bins: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of runs of equal rows that are long enough to be placed together; columns: of
    [n] each.
    """
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
    when it takes it, at the worse price; least loads first, both of shape [sum of counts].
    """
    bins = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(bins.size) - np.repeat(np.cumsum(counts) - counts, counts)
    load = np.max([x[bins] + nth * step for x, step in zip(begin, steps, strict=True)], axis=0)
    order = np.lexsort((nth, bins, load))
    return bins[order], load[order]


def _entries(begin: list[IntArray], steps: list[int], free: IntArray, level: int) -> IntArray:
    """Upper bound on the documents that each bin takes, shape [num_bins]: those that it takes while
    its load is at most `level`. The least loaded bin never exceeds the final mean, which is below
    `level`, as long as all bins have room.
    """
    counts = free
    for load, step in zip(begin, steps, strict=True):
        if step:
            counts = np.minimum(counts, np.maximum(0, (level - load) // step + 1))
    return counts


def fits_64_bits(loads: Sequence[int], work: int, num: int) -> bool:
    """Whether loads of bins after `num` more documents of `work` stay far from overflow."""
    return max(loads) + num * work < _MOST_LOAD
