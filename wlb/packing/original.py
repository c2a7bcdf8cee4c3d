"""original (Plain-4D): the loader's own windows, as the paper's baseline packs them (Section 7.1).

Documents are concatenated in stream order and cut into windows of exactly C tokens; N consecutive
windows make a step. A document that crosses a window's end is cut there (the cut is recorded in its
pieces, no token and no label is lost). Tokens beyond N windows open the next step.

Guarantees: every micro-batch but those of the flush has exactly C tokens. Balances nothing.
Cost: a few NumPy passes over the batch.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from wlb.packing.base import PolicyPacker, build_plan
from wlb.plan import Carry, GlobalBatch, PackingPlan, Pieces, cut_at, offsets_of

POLICY = "original"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalPacker(PolicyPacker):
    """Plain-4D behind the packer protocol. Carry: slot 0 = what follows the last full step."""

    policy: ClassVar[str] = POLICY

    def push(
        self, batch: GlobalBatch | None, carry: Carry
    ) -> tuple[tuple[PackingPlan, ...], Carry]:
        window, num = self.options.context_window, self.options.num_micro_batches
        # 1. The stream, cut at every window's end.
        stream = Pieces.concat(
            carry.pieces, self.options.arrived(batch, carry.next_step, split=False)
        )
        stream = cut_at(stream, np.arange(0, stream.num_tokens + window, window))
        # 2. Full steps; at the end of data the rest is one more step, short or with empty windows.
        steps = stream.num_tokens // (window * num)
        if batch is None and stream.num_tokens > steps * window * num:
            steps += 1
        # 3. Pieces by window.
        window_of = (offsets_of(stream.length)[:-1]) // window
        edges = np.searchsorted(window_of, np.arange(steps * num + 1))
        held = stream.slice(int(edges[-1]), len(stream))
        plans = tuple(
            self._plan(stream, edges[i * num : (i + 1) * num + 1].tolist(), carry.next_step + i)
            for i in range(steps)
        )
        rest = Carry(
            policy=POLICY,
            pieces=held,
            slot=np.zeros(len(held), np.int64),
            next_step=carry.next_step + steps,
        )
        return plans, rest

    def _plan(self, stream: Pieces, edges: list[int], step: int) -> PackingPlan:
        rows = [list(range(a, b)) for a, b in pairwise(edges)]
        return build_plan(
            self.options,
            policy=POLICY,
            step=step,
            pieces=stream,
            rows=rows,
            shuffle=False,
            num_held_tokens=stream.num_tokens - int(stream.slice(0, edges[-1]).num_tokens),
        )
