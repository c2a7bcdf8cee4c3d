"""Bin packing: assigns whole documents to bins of at most `capacity` tokens, by five methods.

Every document is in exactly one bin. A document longer than a bin is an error. Of equally long
documents the first one is placed first, and of equally good bins the first one is taken.

The decreasing methods (first fit, best fit and next fit after sorting by length) see many documents
of equal length, and many bins with equal contents. They place all documents of one length (a run)
into a group of equal bins at once. The result is the same as placing them one by one, because best
fit keeps using the same bin while the next document fits, and first fit fills one bin before the
next.

    run of five documents of length 3, group of four empty bins of capacity 8:
    two go into bin 0, two into bin 1, one into bin 2; bin 3 stays empty
    new groups: bins [0, 2) with 2 tokens free, bin [2, 3) with 5 free, bin [3, 4) with 8 free

Cost: the decreasing methods take O(n) in NumPy, and about 2 us for each pair of a run and a group.
The streaming methods loop over the documents, at 0.1 to 0.5 us each.
"""

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from wlb.plan import (
    IntArray,
    IntLike,
    UserError,
    check_at_least,
    check_minimum,
    int_array,
    offsets_of,
)
from wlb.plan.arrays import first_true
from wlb.spec import BinMethod

Group = tuple[int, int, int]
"""A group of bins with equal contents: (start, stop, filled) for the bins [start, stop), each of
which has `filled` documents so far."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """The documents of each bin.

    Bin b has the documents with indices `order[offsets[b]:offsets[b + 1]]`, in the order in which
    they were placed. Bins are numbered in the order in which they were opened.
    """

    order: IntArray  # indices of the documents, grouped by bin, shape [n]
    offsets: IntArray  # where each bin begins in `order`, shape [num_bins + 1]
    tokens: IntArray  # tokens in each bin, at most `capacity`, shape [num_bins]
    capacity: int  # most tokens of a bin

    def __post_init__(self) -> None:
        for name in ("order", "offsets", "tokens"):
            object.__setattr__(self, name, int_array(f"Bins.{name}", getattr(self, name)))
        ends_ok = self.offsets[0] == 0 and self.offsets[-1] == self.order.size
        if not ends_ok or self.tokens.size != self.num_bins:
            raise ValueError(
                f"offsets must have {self.tokens.size + 1} entries from 0 to {self.order.size}, "
                f"the number of documents, but has {self.offsets.size} entries from "
                f"{self.offsets[0]} to {self.offsets[-1]}"
            )
        if (b := first_true(self.tokens > self.capacity)) is not None:
            raise ValueError(
                f"bin {b} has {self.tokens[b]} tokens, but a bin must have at most {self.capacity}"
            )

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return self.offsets.size - 1

    @property
    def utilisation(self) -> float:
        """Share of the bins' capacity that is filled; 1 if there is no bin."""
        if self.num_bins == 0:
            return 1.0
        return float(self.tokens.sum() / (self.num_bins * self.capacity))

    def rows(self, index: int) -> IntArray:
        """Return the indices of the documents in bin `index`, in the order they were placed."""
        return self.order[int(self.offsets[index]) : int(self.offsets[index + 1])]


def pack_bins(
    lengths: IntLike,
    capacity: int,
    *,
    method: BinMethod = BinMethod.BEST_FIT_DECREASING,
    window: int = 32,
    num_first: int = 0,
) -> Bins:
    """Pack documents into bins of at most `capacity` tokens.

    Args:
        lengths: Tokens of each document, shape [n].
        capacity: Most tokens of a bin.
        method: How bins are chosen.
        window: Number of bins that best_fit keeps open. The other methods ignore it.
        num_first: The first `num_first` documents are left over from an earlier packing. The
            decreasing methods place them, in descending length, before all other documents. The
            streaming methods keep the order of documents, in which leftovers come first anyway.

    Raises:
        UserError: If a document is longer than a bin.
    """
    checked = _checked(lengths, capacity)
    check_at_least("window", window, 1)
    if not 0 <= num_first <= checked.size:
        raise UserError(
            f"num_first = {num_first} must be from 0 to the number of documents, {checked.size}"
        )
    match method:
        case BinMethod.FIRST_FIT_DECREASING | BinMethod.BEST_FIT_DECREASING:
            return _decreasing(checked, capacity, method=method, num_first=num_first)
        case BinMethod.NEXT_FIT:
            return _next_fit(checked, capacity)
        case BinMethod.NEXT_FIT_DECREASING:
            return _next_fit_decreasing(checked, capacity, num_first=num_first)
        case BinMethod.BEST_FIT:
            return _best_fit(checked, capacity, window=window)
        case _:
            raise UserError(f"method = {method!r} is unknown; use one of {', '.join(BinMethod)}")


def _checked(lengths: IntLike, capacity: int) -> IntArray:
    checked = int_array("lengths", lengths)
    check_at_least("capacity", capacity, 1)
    check_minimum("lengths", checked, 1)
    if (row := first_true(checked > capacity)) is not None:
        raise UserError(
            f"document {row} has {checked[row]} tokens, but a bin has at most {capacity}; cut long "
            "documents first with wlb.plan.split_long, or raise the capacity"
        )
    return checked


def _next_fit(lengths: IntArray, capacity: int) -> Bins:
    """Fill one bin at a time. A document that does not fit closes the bin and opens the next."""
    begins: list[int] = []
    room = 0
    for row, length in enumerate(lengths.tolist()):
        room -= length
        if room < 0:
            begins.append(row)
            room = capacity - length
    order = np.arange(lengths.size)
    return _in_order(lengths, order, np.array([*begins, lengths.size], np.int64), capacity)


def _next_fit_decreasing(lengths: IntArray, capacity: int, *, num_first: int) -> Bins:
    is_new = np.arange(lengths.size) >= num_first
    order = np.lexsort((-lengths, is_new))
    bins = _next_fit(lengths[order], capacity)
    return replace(bins, order=order[bins.order])


def _best_fit(lengths: IntArray, capacity: int, *, window: int) -> Bins:
    """Put each document into the fullest open bin that has room for it.

    At most `window` bins are open. A search takes O(log window).
    """
    # An open bin is encoded as the number room * 2^shift + bin. A sorted list of these numbers
    # finds the least room that is enough and, among bins of equal room, the lowest bin.
    shift = lengths.size.bit_length()
    mask = (1 << shift) - 1
    is_open: list[int] = []
    bins: list[int] = []
    num_bins = 0
    for length in lengths.tolist():
        at = bisect_left(is_open, length << shift)
        if at < len(is_open):
            key = is_open.pop(at)
        else:
            if len(is_open) == window:
                is_open.pop(0)  # close the fullest bin, which is the first one
            key = capacity << shift | num_bins
            num_bins += 1
        bins.append(key & mask)
        insort(is_open, key - (length << shift))
    bin_of = np.array(bins, np.int64)
    offsets = offsets_of(np.bincount(bin_of, minlength=num_bins))
    return _in_order(lengths, _stable_order(bin_of, num_bins), offsets, capacity)


def _in_order(lengths: IntArray, order: IntArray, offsets: IntArray, capacity: int) -> Bins:
    ends = offsets_of(lengths[order])
    tokens = ends[offsets[1:]] - ends[offsets[:-1]]
    return Bins(order=order, offsets=offsets, tokens=tokens, capacity=capacity)


def _decreasing(lengths: IntArray, capacity: int, *, method: BinMethod, num_first: int) -> Bins:
    # 1. Sort the documents by descending length and find the runs of equal lengths. The tables
    # below have an entry for each number of free tokens that a bin can have. To keep the tables
    # short, no bin is larger than all documents together.
    room = min(capacity, int(lengths.sum()))
    parts = (lengths[:num_first], lengths[num_first:])
    first, rest = (_stable_order(room - part, room) for part in parts)
    rows = np.concatenate([first, rest + num_first]) if num_first else rest
    in_turn = lengths[rows]
    begins = np.flatnonzero(np.diff(in_turn, prepend=0))
    runs = zip(in_turn[begins].tolist(), np.diff(begins, append=rows.size).tolist(), strict=True)
    # 2. Place each run into groups of equal bins. A "fill" says which documents of a run go to
    # which group.
    is_first_fit = method == BinMethod.FIRST_FIT_DECREASING
    fills = _place(runs, room, _FirstFitGroups() if is_first_fit else _BestFitGroups(room))
    start, num_documents, each, filled = fills.T
    # 3. Divide the fills (documents of one run that go to one group of bins) into visits. A visit
    # puts the next `each` documents into one bin.
    num_visits = num_documents // each
    each = np.repeat(each, num_visits)
    nth = np.arange(each.size) - np.repeat(offsets_of(num_visits)[:-1], num_visits)
    bin_of = np.repeat(start, num_visits) + nth
    taken = offsets_of(each)[:-1]
    # bincount sums in float64, which is exact here, as the sums are integers far below 2^53.
    offsets = offsets_of(np.bincount(bin_of, weights=each).astype(np.int64))
    tokens = np.bincount(bin_of, weights=each * in_turn[taken]).astype(np.int64)
    places = np.repeat(offsets[bin_of] + np.repeat(filled, num_visits) - taken, each)
    places += np.arange(rows.size)
    order = np.empty(rows.size, np.int64)
    order[places] = rows
    return Bins(order=order, offsets=offsets, tokens=tokens, capacity=capacity)


def _stable_order(keys: IntArray, largest: int) -> IntArray:
    """Return the indices that sort `keys` (integers from 0 to `largest`), as a stable argsort does.

    NumPy's stable sort is a radix sort for 16-bit integers, but for wider ones it is a merge sort,
    which is several times slower. This is a radix sort with digits of 16 bits.
    """
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, largest.bit_length(), 16):
        digit = (keys >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


class _BestFitGroups:
    """Groups of equal bins for best fit: `take` finds the group with the least room that is enough.

    The room of a group is the number of free tokens in each of its bins. Among groups with equal
    room, `take` returns the one whose bins were opened first.
    """

    def __init__(self, capacity: int) -> None:
        # of_room[r] is a heap of the groups whose bins have r free tokens each.
        self.of_room: dict[int, list[Group]] = {}
        # has_room[r] is 1 if some group has r tokens of room. The type is bytearray, because its
        # method `find` searches as fast as C's memchr.
        self.has_room = bytearray(capacity + 1)
        self.max_room = 0  # no group has more room than this

    def take(self, length: int) -> tuple[int, Group] | None:
        """Remove and return the group of bins, equally full, for a document of `length` tokens.

        Returns:
            The free tokens of each bin of the group, and the group; None if no group has room.
        """
        room = self.has_room.find(1, length, self.max_room + 1)
        if room < 0:
            self.max_room = min(self.max_room, length - 1)
            return None
        groups = self.of_room[room]
        group = heapq.heappop(groups)
        self.has_room[room] = bool(groups)
        return room, group

    def put(self, room: int, group: Group) -> None:
        """Add a group of equal bins, in each of which `room` tokens are free."""
        heapq.heappush(self.of_room.setdefault(room, []), group)
        self.has_room[room] = 1
        self.max_room = max(self.max_room, room)


class _FirstFitGroups:
    """Groups of equal bins for first fit.

    `take` finds, of the groups whose bins have room for a document, the one that was opened first.
    """

    def __init__(self) -> None:
        # Heap of the groups that have room for a document of the current length, as (first bin, end
        # bin, number of documents in each bin, free tokens of each bin).
        self.ready: list[tuple[int, int, int, int]] = []
        # Heap of the groups that have too little room, as (-free tokens of each bin, group). They
        # become ready when the current length is short enough.
        self.waiting: list[tuple[int, Group]] = []
        self.length = 0  # the current length: tokens of the documents that are placed now

    def take(self, length: int) -> tuple[int, Group] | None:
        """Remove and return the group of bins, equally full, for a document of `length` tokens.

        Returns:
            The free tokens of each bin of the group, and the group; None if no group has room.
        """
        # Lengths descend, except where new documents follow the leftovers. If the length is larger
        # than before, groups that had room for a document may now have too little.
        if length > self.length:
            ready, self.ready = self.ready, []
            for start, stop, filled, room in ready:
                heapq.heappush(self.waiting, (-room, (start, stop, filled)))
        self.length = length
        while self.waiting and -self.waiting[0][0] >= length:
            room, group = heapq.heappop(self.waiting)
            heapq.heappush(self.ready, (*group, -room))
        if not self.ready:
            return None
        start, stop, filled, room = heapq.heappop(self.ready)
        return room, (start, stop, filled)

    def put(self, room: int, group: Group) -> None:
        """Put back a group of equal bins, or add a new one. Each bin has `room` tokens free."""
        if room >= self.length:
            heapq.heappush(self.ready, (*group, room))
        else:
            heapq.heappush(self.waiting, (-room, group))


def _place(
    runs: Iterable[tuple[int, int]], capacity: int, groups: _BestFitGroups | _FirstFitGroups
) -> IntArray:
    """Place runs of equally long documents, one run after the other, into groups of equal bins.

    Args:
        runs: (length, number of documents) of each run.
        capacity: Most tokens of a bin.
        groups: Keeps the groups of bins. It has no group at first.

    Returns:
        An array of shape [num_fills, 4]. Each row puts the next documents of the runs into
        consecutive bins. Its columns are the first bin, the number of documents, how many of them
        go into each bin, and how many documents each bin had before.
    """
    fills = array("q")
    num_bins = 0
    for length, count in runs:
        while count:
            found = groups.take(length)
            if found is None:
                first_new = num_bins
                num_bins += -(-count // (capacity // length))
                found = capacity, (first_new, num_bins, 0)
            room, (start, stop, filled) = found
            most = room // length
            # `num_full` bins take as many documents as fit, and one more bin takes the `last` few.
            num_full, last = divmod(count, most)
            if num_full >= stop - start:
                num_full, last = stop - start, 0
            for each, end in ((most, start + num_full), (last, start + num_full + (last > 0))):
                if end > start:
                    fills.extend((start, each * (end - start), each, filled))
                    count -= each * (end - start)
                    if room > each * length:
                        groups.put(room - each * length, (start, end, filled + each))
                    start = end
            if start < stop:
                groups.put(room, (start, stop, filled))
    return np.array(fills, np.int64).reshape(-1, 4)
