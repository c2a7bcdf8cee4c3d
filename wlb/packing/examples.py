"""examples: so many whole documents a micro-batch, as fine-tuning batches them.

RandomSampling and GroupByLength of Kundu et al. (2024), "Enhancing Training Efficiency Using
Packing with Flash Attention"; with `Layout.SEPARATE` their online mini-batch packing. GroupByLength
is Hugging Face's: 50 steps' documents are sorted from long to short (of the shuffled stream here).
Guarantees: every micro-batch but those of the flush has exactly `examples` documents, and only
those longer than the window are cut. Cost: a sort of what waits.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wlb.packing.base import PolicyPacker, build_plans, check_fits
from wlb.plan import Carry, GlobalBatch, IntArray, PackingPlan, Pieces, check_at_least

POLICY = "examples"
STEPS_SORTED = 50
"""Steps whose documents are sorted together (transformers' LengthGroupedSampler)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesPacker(PolicyPacker):
    """The policy behind the packer protocol. Carry: slot 0, in arrival order.

    examples: documents of a micro-batch. by_length: whether documents of like length come together.
    """

    policy: ClassVar[str] = POLICY
    examples: int
    by_length: bool = False

    def __post_init__(self) -> None:
        check_at_least("examples", self.examples, 1)

    @property
    def per_step(self) -> int:
        return self.examples * self.num_micro_batches

    def push(
        self, batch: GlobalBatch | None, carry: Carry
    ) -> tuple[tuple[PackingPlan, ...], Carry]:
        check_fits(carry.pieces, self.options.context_window, name="the context window")
        arrived = self.options.arrived(batch, carry.next_step)
        pieces = Pieces.concat(carry.pieces, arrived)
        at_once = self.per_step * (STEPS_SORTED if self.by_length else 1)
        ready = len(pieces) // at_once * at_once
        if batch is None:
            ready = len(pieces)
        order = self._order(pieces.length[:ready], at_once)
        held = pieces.slice(ready, len(pieces))
        plans = build_plans(
            self.options,
            policy=POLICY,
            first_step=carry.next_step,
            pieces=pieces,
            steps=self._steps(order),
            num_waiting_tokens=held.num_tokens,
            shuffle=False,
        )
        slot = np.zeros(len(held), np.int64)
        next_step = carry.next_step + len(plans)
        return plans, Carry(policy=POLICY, pieces=held, slot=slot, next_step=next_step)

    def _order(self, lengths: IntArray, at_once: int) -> IntArray:
        if not self.by_length:
            return np.arange(lengths.size)
        group = np.arange(lengths.size) // at_once
        return np.lexsort((-lengths, group))

    def _steps(self, order: IntArray) -> list[list[list[int]]]:
        """Rows of each micro-batch of each step; those of a short last step are dealt evenly."""
        steps: list[list[list[int]]] = []
        for start in range(0, order.size, self.per_step):
            members = order[start : start + self.per_step]
            parts = np.array_split(members, self.num_micro_batches)
            steps.append([part.tolist() for part in parts])
        return steps
