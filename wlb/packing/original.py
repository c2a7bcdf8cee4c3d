"""Policy `original`: windows of exactly C tokens in stream order, without balancing (Section 7.1).

It has two ways to cut documents:

- `WindowCut.ANYWHERE` is the usual loader of Megatron and torchtitan. It concatenates documents and
  cuts the stream every C tokens.
- `WindowCut.SHORT` is the loader of the paper's Plain-4D, as far as it can be inferred. A window is
  open until it is full. Each document goes whole to the first open window that has room for it.
  Windows are filled up by cutting short documents (at most C / 8 tokens), or documents of any
  length once four windows for each micro-batch of a step are open. Documents as long as the window
  stay whole, as in the paper's Figure 3. With this rule, packing reproduces the paper's Table 2.

Guarantees: windows have exactly C tokens, except in the flush. Cuts lose no token and no label.
Cost: a few NumPy passes. `SHORT` loops over the documents, and for each over the open windows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np

from wlb.packing.base import PolicyPacker, Pushed, check_fits
from wlb.packing.carry_slots import CarrySlots
from wlb.packing.fixed import Part, cut_into, parts_that_fill
from wlb.plan import Carry, GlobalBatch, IntArray, Pieces, cut_at, offsets_of
from wlb.spec import WindowCut

MOST_OPEN = 4
"""With `WindowCut.SHORT`, at most this many windows for each micro-batch of a step stay open. Then
documents of any length are cut to fill them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalPacker(PolicyPacker):
    """Fills windows of C tokens in stream order.

    Its carry has the pieces that come after the last full step. They are in slot 0, or, with
    `WindowCut.SHORT`, in the slot whose number is the index of their open window.
    """

    policy: ClassVar[str] = "original"
    slots: ClassVar[CarrySlots] = CarrySlots.WINDOWS
    batches_wait: ClassVar[bool] = False
    cut: WindowCut = WindowCut.ANYWHERE  # which documents may be cut (`packing.window_cut`)

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` and the waiting documents; return plans of full steps, and the new carry.

        At the end of the data `batch` is None, and everything that waits is packed.
        """
        if self.cut == WindowCut.SHORT:
            return self._push_whole(batch, carry)
        window, num = self.options.context_window, self.num_micro_batches
        # 1. Cut the stream at the end of every window.
        arrived = self.options.arrived(batch, carry.next_step, split=False)
        stream = Pieces.concat(carry.pieces, arrived)
        stream = cut_at(stream, np.arange(0, stream.num_tokens + window, window))
        # 2. Count the full steps. At the end of the data, the rest makes one more step with short
        # or empty windows.
        steps = stream.num_tokens // (window * num)
        if batch is None and stream.num_tokens > steps * window * num:
            steps += 1
        # 3. Group the pieces by window.
        window_of = (offsets_of(stream.length)[:-1]) // window
        edges = np.searchsorted(window_of, np.arange(steps * num + 1)).tolist()
        rows = [list(range(a, b)) for a, b in pairwise(edges)]
        return self._pushed(carry, stream, rows, stream.slice(edges[-1], len(stream)), None)

    def _push_whole(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` as `push` does, but cut only short documents (`WindowCut.SHORT`)."""
        num = self.num_micro_batches
        check_fits(carry.pieces, self.options.context_window, name="data.context_window")
        arrived = self.options.arrived(batch, carry.next_step)
        stream = Pieces.concat(carry.pieces, arrived)
        filling = _OpenWindows(self.options.context_window, MOST_OPEN * num)
        lengths = stream.length.tolist()
        parts: list[Part] = []
        first = 0
        # Put the pieces of the carry back into their open windows: slot i is window i. In a carry
        # that was made with `WindowCut.ANYWHERE` or with a larger context window, a slot may have
        # more tokens than a window. Pieces of such a carry are placed like new ones.
        held_tokens = np.bincount(carry.slot, carry.pieces.length)
        if (held_tokens <= self.options.context_window).all():
            for row, window in enumerate(carry.slot.tolist()):
                filling.put_into(window, lengths[row])
                parts.append((row, 0, window))
            first = len(carry.pieces)
        for row, length in enumerate(lengths[first:], first):
            parts += [(row, begin, window) for begin, window in filling.add(length)]
        cut = cut_into(stream, parts, num_micro_batches=len(filling.room))
        steps = filling.num_full // num
        if batch is None:
            steps = -(-len(filling.room) // num)
        rows = cut.rows + [[] for _ in range(steps * num - len(cut.rows))]
        left = rows[steps * num :]
        index = np.array([row for members in left for row in members], np.int64)
        slot = np.repeat(np.arange(len(left)), [len(members) for members in left])
        return self._pushed(carry, cut.pieces, rows[: steps * num], cut.pieces.take(index), slot)

    def _pushed(
        self,
        carry: Carry,
        pieces: Pieces,
        rows: list[list[int]],
        held: Pieces,
        slot: IntArray | None,
    ) -> Pushed:
        """Return the plans of steps with N windows each, and the new carry.

        Args:
            carry: The previous carry.
            pieces: The pieces of all windows.
            rows: Indices of the pieces in each window.
            held: The pieces that wait.
            slot: Index of the open window in which each waiting piece is. None = all of them are
                in the first one.
        """
        num, step = self.num_micro_batches, carry.next_step
        steps = [rows[i : i + num] for i in range(0, len(rows), num)]
        plans = self._plans(step, pieces, steps, num_waiting_tokens=held.num_tokens, shuffle=False)
        return plans, self._carry(held, step + len(plans), slot)


@dataclass(slots=True)
class _OpenWindows:
    """Windows that documents are put into, in the order in which they were opened.

    The first `num_full` windows are full. The others are called open.
    """

    size: int  # tokens of a window
    most_open: int  # once this many windows are open, documents of any length are cut
    room: list[int] = field(default_factory=list[int])  # free tokens of each window
    num_full: int = 0  # number of full windows before the first window that is not full

    def put_into(self, window: int, length: int) -> None:
        """Put `length` tokens into the window with this index, and open it if it is new."""
        self.room += [self.size] * (window + 1 - len(self.room))
        self.room[window] -= length
        while self.num_full < len(self.room) and not self.room[self.num_full]:
            self.num_full += 1

    def add(self, length: int) -> Iterator[tuple[int, int]]:
        """Place a document of `length` tokens, and yield (first token, window) of each part of it.

        A document that is not cut is a single part.
        """
        still_open = range(self.num_full, len(self.room))
        for window in still_open:
            if self.room[window] >= length:
                self.put_into(window, length)
                yield 0, window
                return
        placed = 0
        if length <= self.size // 8 or len(still_open) >= self.most_open:
            for begin, window, tokens in parts_that_fill(length, self.room, still_open):
                self.put_into(window, tokens)
                yield begin, window
                placed += tokens
        if placed < length:
            self.put_into(len(self.room), length - placed)
            yield placed, len(self.room) - 1
