"""Policy `capacity`: packs whole documents into bins of at most `capacity` tokens.

Fine-tuning libraries pack in this way. Waiting and arriving documents are packed together. N bins
make a step. If bins are left over that do not make a whole step, their documents wait and are
packed again with the next batch.

- Decreasing methods sort the documents by length before packing, and train the fullest bins first.
  The steps of one packing come in a random order, because otherwise training would go from long to
  short documents.
- Streaming methods pack the documents in the order in which they arrive, and train the bins in the
  order in which they were opened.

Guarantees: no bin exceeds the capacity, and every piece is placed once. Leftover documents are
placed before new ones, and their bins are trained first. So at most N bins wait, and they wait only
until the next packing that makes steps. With best_fit, only the oldest document is sure to be
trained by then; others may wait longer. Work is not balanced.
Cost: that of `pack_bins`.
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
    """Packs whole documents into bins (micro-batches) with a limit on tokens.

    In its carry, slot 0 has the documents that were left over when steps were last made. Slot i has
    the documents of the i-th batch that has arrived since then.
    """

    policy: ClassVar[str] = "capacity"
    slots: ClassVar[CarrySlots] = CarrySlots.NUMBERED
    method: BinMethod = BinMethod.BEST_FIT_DECREASING
    """How bins are filled."""
    capacity: int | None = None
    """Most tokens of a bin, at least the context window. None means the context window."""
    pack_batches: int = 1
    """Number of non-empty batches that are collected and packed together."""
    open_bins: int = 32
    """Number of bins that best_fit keeps open. With more open bins, bins become fuller, but more
    documents are delayed."""

    def __post_init__(self) -> None:
        convert_to_ints(self, capacity=None, pack_batches=1, open_bins=1)
        if self.method not in tuple(BinMethod):
            raise UserError(
                f"packing.method = {self.method!r} is unknown; use one of {', '.join(BinMethod)}"
            )
        object.__setattr__(self, "method", BinMethod(self.method))
        if self.bin_tokens < self.options.context_window:
            raise UserError(
                f"capacity = {self.capacity} tokens must be at least the context window, "
                f"{self.options.context_window} tokens, or a piece that fills the window could "
                "never be placed; raise the capacity (packing.bin_windows), or lower "
                "data.context_window"
            )

    @property
    def bin_tokens(self) -> int:
        """Most tokens of a bin, which becomes one micro-batch."""
        return self.options.context_window if self.capacity is None else self.capacity

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` and the waiting documents; return plans of full steps, and the new carry.

        At the end of the data `batch` is None, and everything that waits is packed.
        """
        check_fits(carry.pieces, self.bin_tokens, name="capacity")
        # Count the delay from the step in which a loader without packing would train this batch.
        # Such a loader would first make one step of each batch that waits.
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
        # If no step was made, keep the slots, so that new documents do not count as left over.
        slot = None if plans else slot[left]
        return plans, self._carry(held, carry.next_step + len(plans), slot)

    def _in_order(self, bins: Bins, num_leftover: int) -> IntArray:
        """Return the order in which bins are trained, as indices of bins, shape [num_bins].

        Args:
            bins: The bins.
            num_leftover: The first `num_leftover` documents were left over by an earlier packing.
                Bins with such documents come first.
        """
        if self.method.keeps_order:
            return np.arange(bins.num_bins)
        is_new = bins.order[bins.offsets[:-1]] >= num_leftover
        return np.lexsort((-bins.tokens, is_new))

    def _steps(
        self, bins: Bins, leaving: IntArray, *, step: int, flush: bool
    ) -> list[list[list[int]]]:
        """Divide bins into steps of N micro-batches.

        Args:
            bins: The bins.
            leaving: Indices of the bins, in the order in which they are trained.
            step: Index of the first step.
            flush: Whether all bins are used. Otherwise the last bin is left out if it is not full,
                and so are bins that fill no whole step.

        Returns:
            `steps[s][i]`: indices of the documents in micro-batch i of step s.
        """
        num = self.num_micro_batches
        if not flush:
            # Let the last bin wait if it is not full, because later documents may still fit it.
            stays = leaving.size > 0 and int(bins.tokens[leaving[-1]]) < self.bin_tokens
            leaving = leaving[: (leaving.size - stays) // num * num]
        if not self.method.keeps_order and leaving.size > num:
            leaving = permuted(leaving, self.options, step=step, index=STEP_ORDER)
        rows = [bins.rows(b).tolist() for b in leaving.tolist()]
        rows += [[]] * (-len(rows) % num)  # empty micro-batches fill up the last step of a flush
        return [rows[at : at + num] for at in range(0, len(rows), num)]
