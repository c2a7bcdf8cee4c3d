"""var_len: variable-length packing with delayed outlier documents (Algorithm 1, Sections 4.1-4.3).

Each global batch: (1) documents of at least L_1 tokens go to outlier queue i, L_i <= d < L_{i+1};
(2) a queue that holds N documents releases N of them, one for each micro-batch; (3) leftovers of
the step before come first, then the new documents sorted by length, descending; (4) each document
goes to the micro-batch with the least predicted workload if it fits there, else to the shortest
one, else it is left over for the next step. Workload is W_a + W_l of Eq. 2, additive over pieces;
ties go to the lowest index.

Deviations from the paper, each because the printed algorithm loses or starves documents:
- `<= S_max` instead of `<`: a document of exactly S_max tokens would never be placed.
- A queue releases N documents as often as it can (`while`, not `if`): with a low L_1 more than N
  outliers arrive in a batch and the delay would grow without bound.
- A batch that leaves nothing to pack (an empty one, or outliers only) makes no step.
- At the end of data everything that waits is released and packed, in as many steps as it takes.
- Documents longer than the context window are split into pieces first; a piece is the unit here.
- Documents are shuffled (seeded) inside a micro-batch after packing: pushed in descending order
  they would bias per-sequence sharding.

Guarantees: a micro-batch never exceeds S_max tokens; every piece is placed exactly once or waits in
the carry. Cost: O(n log n + n log N) for n documents.
"""

import heapq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wlb.packing.base import PolicyPacker, build_plan
from wlb.plan import Carry, GlobalBatch, PackingPlan, Pieces, check_minimum, int_array

POLICY = "var_len"
LEFTOVER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VarLenPacker(PolicyPacker):
    """Algorithm 1 behind the packer protocol. Carry: slot 0 = leftovers, slot i = queue i.

    s_max: longest micro-batch in tokens, at least the context window. queue_thresholds: L_1 < L_2 <
    ... in tokens; empty = no document is delayed.
    """

    policy: ClassVar[str] = POLICY
    s_max: int
    queue_thresholds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.s_max < self.options.context_window:
            raise ValueError(
                f"s_max = {self.s_max} is below the context window of "
                f"{self.options.context_window}: a document that fills it could never be placed"
            )
        thresholds = int_array("queue_thresholds", self.queue_thresholds)
        check_minimum("queue_thresholds", thresholds, 1)
        if bool(np.any(np.diff(thresholds) <= 0)):
            raise ValueError(f"queue_thresholds {thresholds.tolist()} must increase")

    def push(
        self, batch: GlobalBatch | None, carry: Carry
    ) -> tuple[tuple[PackingPlan, ...], Carry]:
        check_fits(carry, self.s_max)
        step = carry.next_step
        arrived = self.options.arrived(batch, step)
        leftover, new, queues = self._admit(arrived, carry, flush=batch is None)
        plans: list[PackingPlan] = []
        while len(leftover) + len(new):
            plan, leftover = self._step(leftover, new, queues.num_tokens, step)
            plans.append(plan)
            step, new = step + 1, Pieces.empty()
            if batch is not None:
                break
        waiting = Pieces.concat(leftover, queues)
        slot = np.concatenate([np.zeros(len(leftover), np.int64), self._queue_of(queues)])
        return tuple(plans), Carry(policy=POLICY, pieces=waiting, slot=slot, next_step=step)

    def _queue_of(self, pieces: Pieces) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """0 for an ordinary piece, i where L_i <= length < L_{i+1}; shape [num_pieces]."""
        thresholds = np.array(self.queue_thresholds, np.int64)
        return np.searchsorted(thresholds, pieces.length, side="right").astype(np.int64)

    def _admit(
        self, arrived: Pieces, carry: Carry, *, flush: bool
    ) -> tuple[Pieces, Pieces, Pieces]:
        """Leftovers, pieces to pack now (sorted), and what stays in the queues (queue by queue)."""
        num = self.options.num_micro_batches
        level = self._queue_of(arrived)
        packed_now = [arrived.take(np.flatnonzero(level == 0))]
        still_queued: list[Pieces] = []
        # Queues are read off the lengths, so that a carry stays valid when thresholds change.
        leftover = carry.in_slot(LEFTOVER)
        delayed = carry.pieces.take(np.flatnonzero(carry.slot != LEFTOVER))
        delayed_level = self._queue_of(delayed)
        packed_now.append(delayed.take(np.flatnonzero(delayed_level == 0)))
        for i in range(1, len(self.queue_thresholds) + 1):
            queue = Pieces.concat(
                delayed.take(np.flatnonzero(delayed_level == i)),
                arrived.take(np.flatnonzero(level == i)),
            )
            released = len(queue) if flush else len(queue) // num * num
            packed_now.append(queue.slice(0, released))
            still_queued.append(queue.slice(released, len(queue)))
        new = Pieces.concat(*packed_now)
        new = new.take(np.argsort(-new.length, kind="stable"))
        return leftover, new, Pieces.concat(*still_queued)

    def _step(
        self, leftover: Pieces, new: Pieces, queued_tokens: int, step: int
    ) -> tuple[PackingPlan, Pieces]:
        pieces = Pieces.concat(leftover, new)
        rows, rest = place(
            pieces.length.tolist(),
            self.options.workloads(pieces).tolist(),
            num_micro_batches=self.options.num_micro_batches,
            s_max=self.s_max,
        )
        left = pieces.take(rest)
        plan = build_plan(
            self.options,
            policy=POLICY,
            step=step,
            pieces=pieces,
            rows=rows,
            num_held_tokens=queued_tokens + left.num_tokens,
        )
        return plan, left


def check_fits(carry: Carry, s_max: int) -> None:
    """A piece that was cut for a larger window would wait for ever, and the flush never end."""
    over = np.flatnonzero(carry.pieces.length > s_max)
    if over.size:
        piece = carry.pieces[int(over[0])]
        raise ValueError(
            f"document {piece.document} waits as a piece of {piece.stop - piece.start} tokens, "
            f"cut for a larger context window than this packer's: it is longer than s_max = "
            f"{s_max}; go on with a larger window or s_max"
        )


def place(
    lengths: list[int], workloads: list[int], *, num_micro_batches: int, s_max: int
) -> tuple[list[list[int]], list[int]]:
    """Lines 22-37 of Algorithm 1: (rows of each micro-batch, rows left over), in the given order.

    Both minima come from heaps whose stale entries are skipped, so a document costs O(log N).
    """
    rows: list[list[int]] = [[] for _ in range(num_micro_batches)]
    work, size = [0] * num_micro_batches, [0] * num_micro_batches
    by_work = [(0, i) for i in range(num_micro_batches)]
    by_size = [(0, i) for i in range(num_micro_batches)]
    rest: list[int] = []
    # The shortest document from each row on: where even that fits nowhere, nothing more does.
    shortest = np.minimum.accumulate(np.array([*lengths, s_max + 1], np.int64)[::-1])[::-1].tolist()
    for row, (length, workload) in enumerate(zip(lengths, workloads, strict=True)):
        while by_work[0][0] != work[by_work[0][1]]:
            heapq.heappop(by_work)
        target = by_work[0][1]
        if size[target] + length > s_max:
            while by_size[0][0] != size[by_size[0][1]]:
                heapq.heappop(by_size)
            target = by_size[0][1]
            if size[target] + length > s_max:
                if size[target] + shortest[row] > s_max:
                    return rows, [*rest, *range(row, len(lengths))]
                rest.append(row)
                continue
        rows[target].append(row)
        work[target] += workload
        size[target] += length
        heapq.heappush(by_work, (work[target], target))
        heapq.heappush(by_size, (size[target], target))
    return rows, rest
