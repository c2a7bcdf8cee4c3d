"""Places documents into micro-batches by least work, as Algorithm 1 does.

`place` takes documents in the given order, with heaps that find the least work and the fewest
tokens. A heap takes microseconds for each document, but a global batch may have hundreds of
thousands of tiny documents of equal length. Runs of equal documents are therefore placed together.
For such a run, a list has the load (work) that each micro-batch would have before it takes its
first, second, ... document of the run. The smallest loads of this list, in ascending order, say
which micro-batch takes each document:

    two micro-batches with loads 0 and 5, four documents of work 2:
    loads before each placement: 0, 2, 4, ... in the first one, 5, 7, ... in the second one
    sorted: 0 (first), 2 (first), 4 (first), 5 (second)
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from wlb.plan import IntArray

LEAST = 64
"""Equal documents are placed together if there are at least this many, and at least twice as many
as micro-batches. Fewer are placed faster one by one."""
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
    """Place documents in the given order (lines 22-37 of Algorithm 1).

    A document goes to the micro-batch with least work, or, if it does not fit there, to the one
    with the fewest tokens. If it does not fit there either, it is left over.

    Heaps with one entry for each micro-batch find the least work and the fewest tokens, in O(log N)
    a document. Work and tokens of a micro-batch only grow, so an outdated entry is a lower bound.
    It is updated when it reaches the top.

    Args:
        lengths: Tokens of each document, shape [n].
        workloads: Work of each document, shape [n].
        num_micro_batches: N, the number of micro-batches.
        s_max: Most tokens of a micro-batch.
        step_tokens: Most tokens of all micro-batches together. None = no cap.
        second: Work of each document at a second price of attention, scaled so that its sum equals
            the sum of `workloads` (`wlb.packing.base.comparable`). The work of a micro-batch is
            then the larger of its two sums. None = one price.

    Returns:
        The indices of the documents in each micro-batch, and those of the documents left over.
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
    """Micro-batches that are being filled with documents, as `place` describes.

    Args:
        lengths: Tokens of each document.
        one: Work of each document at the first price of attention.
        two: Work of each document at the second price. Equal to `one` if there is one price.
        num: Number of micro-batches.
        s_max: Most tokens of a micro-batch.
    """

    def __init__(
        self, lengths: list[int], one: list[int], two: list[int], *, num: int, s_max: int
    ) -> None:
        self.lengths, self.one, self.two, self.s_max = lengths, one, two, s_max
        self.rows: list[list[int]] = [[] for _ in range(num)]  # documents in each micro-batch
        self.rest: list[int] = []  # documents left over
        self.room = 0  # tokens that the step may still take
        # For each micro-batch: its work at both prices of attention (`one` and `two`), the larger
        # of the two, and its tokens.
        self._loads = [0] * num, [0] * num
        self._work, self._size = [0] * num, [0] * num
        # Heaps of (work, micro-batch) and (tokens, micro-batch), whose entries may be outdated.
        self._by_work = [(0, i) for i in range(num)]
        self._by_size = [(0, i) for i in range(num)]
        # Tokens of the shortest document that is still to be placed, by index of the next document.
        # If even this one fits nowhere, no other document does.
        backwards = np.array([*lengths, s_max + 1], np.int64)[::-1]
        self._shortest = np.minimum.accumulate(backwards)[::-1].tolist()

    def each(self, first: int, stop: int) -> None:
        """Place the documents with indices [first, stop) one by one, as `place` describes."""
        # Locals are faster than attributes in this loop.
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
        """Place documents of equal length and work at once, and return how many were placed.

        Each goes to the micro-batch that then has least work. The method stops before the first
        document that does not fit there, because such a document goes to the micro-batch with the
        fewest tokens instead. It also stops when the step has no room for another document, and
        places none if the sums of work could exceed 64 bits.

        Args:
            first: Index of the first document.
            num: Number of equal documents that begin with this one.
        """
        length, a, b = self.lengths[first], self.one[first], self.two[first]
        num = min(num, self.room // length)
        one, two = self._loads
        if not num or not fits_64_bits([*one, *two], max(a, b), num):
            return 0
        # Find each document's micro-batch as if there were no S_max. Then drop the first document
        # that would exceed S_max, and all after it.
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
    """Yield (first, stop) of each run of consecutive equal documents that is worth placing at once.

    Args:
        columns: Properties of the n documents, such as lengths and work, shape [n] each. Documents
            are equal if they are equal in all properties.
        num_bins: Number of bins into which the documents will be placed. A run is worth placing at
            once if it has at least 2 * num_bins documents, and at least LEAST.
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
    """Put equal documents, one after the other, into the bin that has least load at that moment.

    Bins without room are left out. Sums must fit 64-bit integers (`fits_64_bits`).

    Args:
        loads: Work in each bin so far.
        work: Work of each document.
        num: Number of documents.
        room: Number of documents that each bin may still take.
        other: A pair: the load of each bin, and the work of a document, at a second price. A bin's
            load is then the larger of its two loads. None = one price.

    Returns:
        The bin of each document, fewer than `num` entries if all bins become full. Among equally
        loaded bins the first one is taken.
    """
    begin, steps = [np.array(loads, np.int64)], [work]
    if other is not None:
        begin.append(np.array(other[0], np.int64))
        steps.append(other[1])
    free = np.minimum(np.array(room, np.int64), num)
    # As long as all bins have room, the least loaded bin never has more than the final mean. So no
    # document is put into a bin whose load exceeds this level.
    level = (sum(np.max(begin, axis=0).tolist()) + num * max(steps)) // len(free) + 1
    bins, load = _by_load(begin, steps, _entries(begin, steps, free, level))
    # If some bins become full, the others take more than an even share, and their loads may exceed
    # `level`. Then list all placements for which bins have room, which takes longer.
    if bins.size < min(num, int(free.sum())) or (load[:num] > level).any():
        bins, _ = _by_load(begin, steps, free)
    return bins[:num]


def _by_load(
    begin: list[IntArray], steps: list[int], counts: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the bins into which equal documents go, if each goes to the bin with the lowest load.

    Bin i has counts[i] places for documents. The load at its first place is the bin's load so far.
    The load at its second place also includes the work of the first document, and so on. Places are
    filled in the order of their loads, the lowest first.

    Args:
        begin: Load of each bin so far: one array of shape [num_bins] for each price of attention.
        steps: Work of one document at each price.
        counts: Most documents that each bin takes, shape [num_bins].

    Returns:
        The bin of each place in this order, and the load at the place (the largest one over all
        prices of attention). Both have shape [sum of counts].
    """
    bins = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(bins.size) - np.repeat(np.cumsum(counts) - counts, counts)
    load = np.max([x[bins] + nth * step for x, step in zip(begin, steps, strict=True)], axis=0)
    order = np.lexsort((nth, bins, load))
    return bins[order], load[order]


def _entries(begin: list[IntArray], steps: list[int], free: IntArray, level: int) -> IntArray:
    """Return how many of several equal documents each bin takes, shape [num_bins].

    A bin takes documents as long as its load (the work that it has) is at most `level`.

    Args:
        begin: Load of each bin so far: one array of shape [num_bins] for each price of attention.
        steps: Work of one document at each price.
        free: Most documents that each bin takes, shape [num_bins].
        level: A bin with a higher load, at any of the prices, takes no further document.
    """
    counts = free
    for load, step in zip(begin, steps, strict=True):
        if step:
            counts = np.minimum(counts, np.maximum(0, (level - load) // step + 1))
    return counts


def fits_64_bits(loads: Sequence[int], work: int, num: int) -> bool:
    """Return whether all bins stay below 2^61 if one takes `num` more documents of this work.

    Then sums of loads fit 64-bit integers.

    Args:
        loads: Work that each bin has so far.
        work: Work of a document.
        num: Number of documents that one bin may still take.
    """
    return max(loads) + num * work < _MOST_LOAD
