"""original (Plain-4D): the loader's own windows, as the paper's baseline packs them (Section 7.1).

`WindowCut.ANYWHERE`, as Megatron and torchtitan: documents are concatenated and cut every C tokens.
`WindowCut.SHORT`: each document goes whole to the first open window with room, and windows are
filled up by cutting short ones (at most C / 8 tokens; any once 4 N windows are open). It keeps
documents as long as the window, as in Figure 3, and gives Table 2; the paper does not say.
Guarantees: exactly C tokens except in the flush; cuts lose no token and no label. Balances nothing.
Cost: a few NumPy passes; SHORT is a loop over documents and up to 4 N windows each.
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
"""Windows that the loader of `WindowCut.SHORT` keeps open, times N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalPacker(PolicyPacker):
    """Plain-4D behind the packer protocol.

    Carry: the pieces after the last full step; slot 0, or with SHORT the index of their open
    window. cut: where windows end, `packing.window_cut`.
    """

    policy: ClassVar[str] = "original"
    slots: ClassVar[CarrySlots] = CarrySlots.WINDOWS
    batches_wait: ClassVar[bool] = False
    cut: WindowCut = WindowCut.ANYWHERE

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        if self.cut == WindowCut.SHORT:
            return self._push_whole(batch, carry)
        window, num = self.options.context_window, self.num_micro_batches
        # 1. Cut the stream at the end of every window.
        arrived = self.options.arrived(batch, carry.next_step, split=False)
        stream = Pieces.concat(carry.pieces, arrived)
        stream = cut_at(stream, np.arange(0, stream.num_tokens + window, window))
        # 2. Count the full steps; at the end of data the rest is one more, with short or empty
        # windows.
        steps = stream.num_tokens // (window * num)
        if batch is None and stream.num_tokens > steps * window * num:
            steps += 1
        # 3. Group the pieces by window.
        window_of = (offsets_of(stream.length)[:-1]) // window
        edges = np.searchsorted(window_of, np.arange(steps * num + 1)).tolist()
        rows = [list(range(a, b)) for a, b in pairwise(edges)]
        return self._pushed(carry, stream, rows, stream.slice(edges[-1], len(stream)), None)

    def _push_whole(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        num = self.num_micro_batches
        check_fits(carry.pieces, self.options.context_window, name="the context window")
        arrived = self.options.arrived(batch, carry.next_step)
        stream = Pieces.concat(carry.pieces, arrived)
        filling = _OpenWindows(self.options.context_window, MOST_OPEN * num)
        lengths = stream.length.tolist()
        parts: list[Part] = []
        first = 0
        # Slots are the indices of open windows, unless the carry comes from `WindowCut.ANYWHERE` or
        # from a larger context window: then some slot holds more tokens than a window has, and the
        # documents are placed as if they were new.
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
        """Make plans of N windows each, and the carry; `rows` are the pieces of each window."""
        num, step = self.num_micro_batches, carry.next_step
        steps = [rows[i : i + num] for i in range(0, len(rows), num)]
        plans = self._plans(step, pieces, steps, num_waiting_tokens=held.num_tokens, shuffle=False)
        return plans, self._carry(held, step + len(plans), slot)


@dataclass(slots=True)
class _OpenWindows:
    """Windows in the order they were opened; `num_full` of them, from the first on, are full."""

    size: int
    most_open: int
    room: list[int] = field(default_factory=list[int])
    num_full: int = 0

    def put_into(self, window: int, length: int) -> None:
        """Put a part of `length` tokens into that window, which is opened if its index is new."""
        self.room += [self.size] * (window + 1 - len(self.room))
        self.room[window] -= length
        while self.num_full < len(self.room) and not self.room[self.num_full]:
            self.num_full += 1

    def add(self, length: int) -> Iterator[tuple[int, int]]:
        """(first token, window) of each part of a document: one part unless it is cut."""
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
