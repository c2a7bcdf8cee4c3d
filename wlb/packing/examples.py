"""Policy `examples`: a fixed number of whole documents a micro-batch, as in usual fine-tuning.

It implements the baselines RandomSampling and GroupByLength of Kundu et al. (2024), "Enhancing
Training Efficiency Using Packing with Flash Attention". With `Layout.SEPARATE` it is the online
mini-batch packing of the same paper. GroupByLength works as in Hugging Face's trainer: it takes the
documents of the next 50 steps from the shuffled stream, and sorts them from long to short.

Guarantees: every micro-batch has exactly `examples` documents, except in the flush. Only documents
longer than the window are cut. Cost: a sort of the waiting documents.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wlb.packing.base import PolicyPacker, Pushed, check_fits
from wlb.packing.carry_slots import CarrySlots
from wlb.plan import Carry, GlobalBatch, IntArray, Pieces, check_at_least

STEPS_SORTED = 50
"""Number of steps whose documents are sorted together if `by_length` is set. It is the value of
LengthGroupedSampler in Hugging Face's transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesPacker(PolicyPacker):
    """Makes micro-batches of a fixed number of documents.

    Its carry has the waiting documents in slot 0, in arrival order.
    """

    policy: ClassVar[str] = "examples"
    slots: ClassVar[CarrySlots] = CarrySlots.ONE
    batches_wait: ClassVar[bool] = False
    examples: int  # documents of a micro-batch
    by_length: bool = False  # whether documents of similar length are trained together

    def __post_init__(self) -> None:
        check_at_least("examples", self.examples, 1)

    @property
    def per_step(self) -> int:
        """Number of documents in a step."""
        return self.examples * self.num_micro_batches

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` and the waiting documents; return plans of full steps, and the new carry.

        At the end of the data `batch` is None, and everything that waits is packed.
        """
        check_fits(carry.pieces, self.options.context_window, name="data.context_window")
        arrived = self.options.arrived(batch, carry.next_step)
        pieces = Pieces.concat(carry.pieces, arrived)
        at_once = self.per_step * (STEPS_SORTED if self.by_length else 1)
        ready = len(pieces) if batch is None else len(pieces) // at_once * at_once
        order = np.arange(ready)
        if self.by_length:
            order = np.lexsort((-pieces.length[:ready], order // at_once))
        held, steps = pieces.slice(ready, len(pieces)), self._steps(order)
        plans = self._plans(
            carry.next_step, pieces, steps, num_waiting_tokens=held.num_tokens, shuffle=False
        )
        return plans, self._carry(held, carry.next_step + len(plans))

    def _steps(self, order: IntArray) -> list[list[list[int]]]:
        """Divide documents into steps of N micro-batches.

        If too few documents are left for the last step, they are divided over its micro-batches,
        whose numbers of documents then differ by at most one.

        Args:
            order: Indices of the documents, in the order in which they are trained.

        Returns:
            `steps[s][i]`: indices of the documents in micro-batch i of step s.
        """
        num, size = self.num_micro_batches, self.per_step
        steps = (order[start : start + size] for start in range(0, order.size, size))
        return [[part.tolist() for part in np.array_split(step, num)] for step in steps]
