"""capacity: bins of at most `capacity` tokens, whole documents, as fine-tuning methods pack them.

Waiting and arriving documents are packed into bins; N bins make a step, and documents of bins that
fill no step wait and are packed again. Decreasing methods let the fullest bins leave first, in a
seeded order of steps (from long to short would be a curriculum); streaming methods keep the order
of bins. Guarantees: capacity held, every piece placed once. Leftovers are placed before new
documents and their bins leave first, so at most N bins wait, and only until the next packing that
makes steps (best_fit: its oldest document). Work is not balanced. Cost: that of `pack_bins`.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wlb.packing.base import LEFTOVER, STEP_ORDER, PolicyPacker, Pushed, check_fits, permuted
from wlb.packing.bins import BinMethod, Bins, pack_bins
from wlb.packing.carry_slots import CarrySlots
from wlb.plan import Carry, GlobalBatch, IntArray, Pieces, UserError, convert_to_ints


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPacker(PolicyPacker):
    """Bin packing behind the packer protocol.

    Carry: slot 0 = left over by a packing that made steps, slot i = came with the i-th batch since.
    """

    policy: ClassVar[str] = "capacity"
    slots: ClassVar[CarrySlots] = CarrySlots.NUMBERED
    method: BinMethod = BinMethod.BEST_FIT_DECREASING
    """How bins are filled."""
    capacity: int | None = None
    """Tokens of a bin, at least the context window, which is the default."""
    pack_batches: int = 1
    """Packing waits until so many batches with documents are there."""
    open_bins: int = 32
    """Bins open at a time with best_fit. More of them pack fuller and hold more documents back."""

    def __post_init__(self) -> None:
        convert_to_ints(self, capacity=None, pack_batches=1, open_bins=1)
        if self.method not in tuple(BinMethod):
            raise UserError(f"unknown method {self.method!r}; known: {', '.join(BinMethod)}")
        object.__setattr__(self, "method", BinMethod(self.method))
        if self.bin_tokens < self.options.context_window:
            raise UserError(
                f"capacity = {self.capacity} is below the context window of "
                f"{self.options.context_window}: a piece that fills it could never be placed; "
                f"raise the capacity or shorten the window"
            )

    @property
    def bin_tokens(self) -> int:
        """Most tokens of a bin."""
        return self.options.context_window if self.capacity is None else self.capacity

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        check_fits(carry.pieces, self.bin_tokens, name="capacity")
        # The delay of a batch counts from the step in which an unpacked loader would train it: the
        # batches that wait in this window would have taken one step each.
        waiting = int(carry.slot.max(initial=LEFTOVER))
        due = carry.next_step + (waiting if self.pack_batches > 1 else 0)
        arrived = self.options.arrived(batch, due)
        num_batches = waiting + (len(arrived) > 0)
        pieces = Pieces.concat(carry.pieces, arrived)
        slot = np.concatenate([carry.slot, np.full(len(arrived), num_batches, np.int64)])
        steps: list[list[list[int]]] = []
        if batch is None or num_batches >= self.pack_batches:
            num_leftover = int((slot == LEFTOVER).sum())
            bins = pack_bins(
                pieces.length,
                self.bin_tokens,
                method=self.method,
                window=self.open_bins,
                num_first=num_leftover,
            )
            leaving = self._in_order(bins, num_leftover)
            steps = self._steps(bins, leaving, step=carry.next_step, flush=batch is None)
        used = [row for rows in steps for members in rows for row in members]
        left = np.setdiff1d(np.arange(len(pieces)), used)
        held = pieces.take(left)
        plans = self._plans(
            carry.next_step,
            pieces,
            steps,
            num_waiting_tokens=held.num_tokens,
            shuffle=not self.method.keeps_order,
        )
        # If no step was made, new documents are still new at the next packing.
        slot = None if plans else slot[left]
        return plans, self._carry(held, carry.next_step + len(plans), slot)

    def _in_order(self, bins: Bins, num_leftover: int) -> IntArray:
        """Bins in the order they may leave, shape [num_bins]."""
        if self.method.keeps_order:
            return np.arange(bins.num_bins)
        is_new = bins.order[bins.offsets[:-1]] >= num_leftover
        return np.lexsort((-bins.tokens, is_new))

    def _steps(
        self, bins: Bins, leaving: IntArray, *, step: int, flush: bool
    ) -> list[list[list[int]]]:
        """The rows of each micro-batch of each step that the bins `leaving` make."""
        num = self.num_micro_batches
        if not flush:
            # The last bin stays if it still has room for documents to come.
            stays = leaving.size > 0 and int(bins.tokens[leaving[-1]]) < self.bin_tokens
            leaving = leaving[: (leaving.size - stays) // num * num]
        if not self.method.keeps_order and leaving.size > num:
            leaving = permuted(leaving, self.options, step=step, index=STEP_ORDER)
        rows = [bins.rows(b).tolist() for b in leaving.tolist()]
        rows += [[]] * (-len(rows) % num)
        return [rows[at : at + num] for at in range(0, len(rows), num)]
