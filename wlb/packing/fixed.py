"""Policy `fixed`: greedy packing into windows of C tokens over W global batches (Section 3.2).

With W = 1 this is the paper's Fixed-4D. The policy collects W * N * C tokens of the stream and
divides them into W * N micro-batches of exactly C tokens:

1. Sort the documents by descending length.
2. Put each one into the micro-batch with the least predicted attention that has room for it.
3. Cut a document that fits into no micro-batch, and fill up several micro-batches with its parts.
   Without cuts, windows would not be exactly full.

The paper does not say which micro-batches share a step. Here micro-batches of similar work do, and
the steps come in a seeded random order.

Guarantees: micro-batches have exactly C tokens, except in the flush. Every token is trained within
2 W steps. Cost: O(n log n + n log(W * N)).
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wlb.packing.base import STEP_ORDER, PolicyPacker, Pushed, permuted
from wlb.packing.carry_slots import CarrySlots
from wlb.packing.placement import fits_64_bits, least_loaded, runs_of
from wlb.plan import (
    Carry,
    GlobalBatch,
    IntArray,
    PackingPlan,
    Pieces,
    UserError,
    convert_to_ints,
    cut_at,
)

Part = tuple[int, int, int]
"""A part of a document: (index of the document, first token of the part, micro-batch of the part).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches into which the documents of W global batches were packed."""

    pieces: Pieces  # whole documents, and the parts of those that were cut
    rows: list[list[int]]  # rows[j]: indices of the pieces in micro-batch j

    def loads(self, cost_ns: IntArray) -> list[int]:
        """Return the cost of each micro-batch, given the cost of each piece in ns."""
        return [int(cost_ns[members].sum()) for members in self.rows]

    def by_load(self, cost_ns: IntArray) -> "Window":
        """Return a copy whose micro-batches are sorted by cost, given the cost of each piece in ns.

        The most expensive micro-batch comes first.
        """
        load = self.loads(cost_ns)
        order = sorted(range(len(load)), key=lambda j: -load[j])
        return Window(pieces=self.pieces, rows=[self.rows[j] for j in order])


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPacker(PolicyPacker):
    """Packs W global batches at a time into micro-batches of exactly C tokens.

    Its carry has the documents that are not packed yet. Slot 1 has the pieces that were held back
    from the last W global batches to make their tokens exactly W * N * C (`take_tokens`). Slot 0
    has all others.
    """

    policy: ClassVar[str] = "fixed"
    slots: ClassVar[CarrySlots] = CarrySlots.HELD
    window_batches: int = 1  # W, global batches packed together

    def __post_init__(self) -> None:
        convert_to_ints(self, window_batches=1)

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` and the waiting documents; return plans of full steps, and the new carry.

        At the end of the data `batch` is None, and everything that waits is packed.
        """
        size = self.options.tokens_per_step * self.window_batches
        due = carry.next_step + carry.num_tokens // self.options.tokens_per_step
        stream = Pieces.concat(carry.pieces, self.options.arrived(batch, due))
        # Pieces that were held back before are always the first ones of the stream.
        num_held = int((carry.slot > 0).sum())
        plans: list[PackingPlan] = []
        step = carry.next_step
        while len(stream) and (batch is None or stream.num_tokens >= size):
            longest_cut = self.options.context_window // 8
            window, stream, num_held = take_tokens(
                stream, size, longest_cut=longest_cut, num_held=num_held
            )
            made = self._steps(window, step, stream.num_tokens)
            plans += made
            step += len(made)
        slot = (np.arange(len(stream)) < num_held).astype(np.int64)
        return tuple(plans), self._carry(stream, step, slot)

    def pack(self, pieces: Pieces, num_micro_batches: int) -> Window:
        """Pack `pieces` into `num_micro_batches` windows of C tokens.

        Subclasses override this method to pack in another way.
        """
        return greedy(
            pieces,
            self.options.attention(pieces),
            num_micro_batches=num_micro_batches,
            capacity=self.options.context_window,
        )

    def _steps(self, pieces: Pieces, step: int, waiting: int) -> tuple[PackingPlan, ...]:
        """Pack the pieces of W global batches, and return the plans of their steps.

        Args:
            pieces: The pieces to pack.
            step: Index of the first step.
            waiting: Number of tokens that still wait after these steps.
        """
        num = self.num_micro_batches
        num_steps = -(-pieces.num_tokens // self.options.tokens_per_step)
        packed = self.pack(pieces, num_steps * num)
        window = packed.by_load(self.options.workloads(packed.pieces))
        order = permuted(list(range(num_steps)), self.options, step=step, index=STEP_ORDER)
        steps = [window.rows[i * num : (i + 1) * num] for i in order.tolist()]
        return self._plans(step, window.pieces, steps, num_waiting_tokens=waiting)


def take_tokens(
    stream: Pieces, size: int, *, longest_cut: int, num_held: int = 0
) -> tuple[Pieces, Pieces, int]:
    """Take the first `size` tokens of a stream, and cut a short document where a cut is needed.

    The document in which the first `size` tokens end is taken whole. So the documents have too many
    tokens (a surplus), and some of these must be held back. The function goes through the taken
    documents from the last to the first:

    1. A document with no more tokens than the remaining surplus is held back whole.
    2. The first document that has more tokens than the remaining surplus, and no more than
       `longest_cut`, is cut: the surplus is cut off its end. If there is no such document, the
       shortest document that has enough tokens is cut.

    A simpler rule would be to cut the document in which the first `size` tokens end. But at W = 1
    that rule would cut one in four documents that are as long as the window.

    Args:
        stream: The pieces that wait, in order.
        size: Tokens to take. A shorter stream is taken as a whole.
        longest_cut: Documents of at most this many tokens are preferred for cutting.
        num_held: Number of pieces at the beginning of the stream that were held back before. They
            are not held back again.

    Returns:
        The pieces that are taken, the rest of the stream, and how many pieces at the head of the
        rest were held back.
    """
    lengths = stream.length
    ends = np.cumsum(lengths)
    if not len(stream) or int(ends[-1]) <= size:
        return stream, Pieces.empty(), 0
    taken = int(np.searchsorted(ends, size)) + 1
    surplus = int(ends[taken - 1]) - size
    held = np.arange(len(stream)) >= taken
    row = taken - 1
    while surplus and row >= num_held:
        length = int(lengths[row])
        if length <= surplus:
            held[row] = True
            surplus -= length
        elif length <= longest_cut:
            break
        row -= 1
    if surplus:
        if row < num_held:
            # At least one document is longer than the surplus: the one that contains the end of the
            # first `size` tokens.
            is_new = np.arange(len(stream)) >= min(num_held, taken - 1)
            left = np.flatnonzero(~held & is_new & (lengths > surplus))
            row = int(left[np.argmin(lengths[left])])
        stream = cut_at(stream, [int(ends[row]) - surplus])
        held = np.insert(held, row + 1, True)
        taken += 1
    rest = np.flatnonzero(held)
    return stream.take(np.flatnonzero(~held)), stream.take(rest), int((rest < taken).sum())


def greedy(
    pieces: Pieces, attention_ns: IntArray, *, num_micro_batches: int, capacity: int
) -> Window:
    """Assign pieces, from long to short, to the micro-batch with least attention that has room.

    A piece that fits into no micro-batch is cut, and its parts fill up several of them.

    Args:
        pieces: The pieces to pack.
        attention_ns: Predicted attention time of each piece, shape [num_pieces]. A part of a cut
            piece is assumed to take a share of this time in proportion to its tokens, which is more
            than it really takes.
        num_micro_batches: Number of micro-batches.
        capacity: Tokens of a micro-batch.

    Raises:
        UserError: If the pieces have more tokens than fit.
    """
    if pieces.num_tokens > num_micro_batches * capacity:
        raise UserError(
            f"{pieces.num_tokens} tokens do not fit into {num_micro_batches} micro-batches of at "
            f"most {capacity} tokens; use more micro-batches, or a larger context window"
        )
    order = np.argsort(-pieces.length, kind="stable")
    rows, lengths, work = (x.tolist() for x in (order, pieces.length[order], attention_ns[order]))
    micro_batches = _LeastWorkFirst(num_micro_batches, capacity)
    parts: list[Part] = []
    at = 0
    # Long runs of equal documents are placed together, which is faster; all others one by one.
    for first, stop in (*runs_of(lengths, work, num_bins=num_micro_batches), (len(rows), 0)):
        for i in range(at, first):
            parts += [(rows[i], begin, j) for begin, j in micro_batches.add(lengths[i], work[i])]
        at = first
        if stop:
            target = micro_batches.add_equal(stop - first, lengths[first], work[first])
            at += len(target)
            parts += [(row, 0, j) for row, j in zip(rows[first:at], target, strict=True)]
    return cut_into(pieces, parts, num_micro_batches=num_micro_batches)


def cut_into(pieces: Pieces, parts: list[Part], *, num_micro_batches: int) -> Window:
    """Cut pieces into parts, and return the micro-batches that have these parts.

    Args:
        pieces: The pieces.
        parts: All parts of all pieces, each with its micro-batch. A piece that is not cut is a
            single part.
        num_micro_batches: Number of micro-batches.
    """
    begins = np.cumsum(pieces.length) - pieces.length
    parts = sorted(parts)
    cuts = [int(begins[row]) + begin for row, begin, _ in parts if begin]
    rows: list[list[int]] = [[] for _ in range(num_micro_batches)]
    for i, (_, _, j) in enumerate(parts):
        rows[j].append(i)
    return Window(pieces=cut_at(pieces, cuts) if cuts else pieces, rows=rows)


def parts_that_fill(
    length: int, room: Sequence[int], order: Iterable[int]
) -> list[tuple[int, int, int]]:
    """Cut a document so that its parts fill up micro-batches that are not full.

    Args:
        length: Tokens of the document.
        room: Free tokens of each micro-batch.
        order: Micro-batches in the order in which they are filled.

    Returns:
        (first token, micro-batch, tokens) of each part. All parts but the last one fill up their
        micro-batch.
    """
    parts: list[tuple[int, int, int]] = []
    begin = 0
    for j in order:
        tokens = min(room[j], length - begin)
        if tokens:
            parts.append((begin, j, tokens))
            begin += tokens
    return parts


class _LeastWorkFirst:
    """Puts each document into the micro-batch of least work that has room for it.

    Documents come in descending length. A micro-batch that has too little room for one document is
    put aside until documents are short enough for it, so each placement looks at few micro-batches.
    """

    def __init__(self, num: int, capacity: int) -> None:
        # Free tokens of each micro-batch, and its work so far in ns.
        self.room, self.work = [capacity] * num, [0] * num
        self.by_work = [(0, j) for j in range(num)]  # heap of (work, micro-batch)
        # Heap of (-room, micro-batch) for micro-batches without room for the last document.
        self.parked: list[tuple[int, int]] = []

    def add(self, length: int, work: int) -> Iterator[tuple[int, int]]:
        """Place a document and yield (first token, micro-batch) of each of its parts.

        The document is a single part, unless it fits into no micro-batch and must be cut.
        """
        while self.parked and -self.parked[0][0] >= length:
            j = heapq.heappop(self.parked)[1]
            heapq.heappush(self.by_work, (self.work[j], j))
        while self.by_work:
            _, j = heapq.heappop(self.by_work)
            if self.room[j] >= length:
                self._put(j, length, work)
                heapq.heappush(self.by_work, (self.work[j], j))
                yield 0, j
                return
            heapq.heappush(self.parked, (-self.room[j], j))
        # No micro-batch has room for the whole document, so cut it.
        order = sorted((j for _, j in self.parked), key=lambda j: (self.work[j], j))
        for begin, j, tokens in parts_that_fill(length, self.room, order):
            self._put(j, tokens, -(-work * tokens // length))
            yield begin, j
        self.parked = [(-self.room[j], j) for _, j in self.parked]
        heapq.heapify(self.parked)

    def add_equal(self, num: int, length: int, work: int) -> list[int]:
        """Place up to `num` equal documents, none of which is cut, and return their micro-batches.

        They go where calls of `add` would put them.

        Args:
            num: Number of documents.
            length: Tokens of each document.
            work: Predicted time of each document in ns.

        Returns:
            The micro-batch of each document that was placed; fewer than `num` if no more fit.
        """
        if not fits_64_bits(self.work, work, num):
            return []
        room = [tokens // length for tokens in self.room]
        target = least_loaded(self.work, work, num, room=room)
        for j, count in enumerate(np.bincount(target, minlength=len(room)).tolist()):
            self._put(j, count * length, count * work)
        free = [j for j, tokens in enumerate(self.room) if tokens >= length]
        self.by_work = [(self.work[j], j) for j in free]
        self.parked = [(-tokens, j) for j, tokens in enumerate(self.room) if tokens < length]
        heapq.heapify(self.by_work)
        heapq.heapify(self.parked)
        return target.tolist()

    def _put(self, j: int, length: int, work: int) -> None:
        self.room[j] -= length
        self.work[j] += work
