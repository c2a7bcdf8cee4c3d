"""Policy `var_len`: variable-length packing with delayed outliers (Algorithm 1, Sections 4.1-4.3).

1. Documents of at least L_1 tokens are outliers. One of L_i <= length < L_{i+1} tokens waits in
   outlier queue i.
2. A queue with N documents releases them, one for each micro-batch.
3. Leftovers of the previous step are placed first, then new documents from long to short.
4. Each goes to the micro-batch with the least work W_a + W_l (Eq. 2). If it does not fit there, it
   goes to the micro-batch with the fewest tokens, and if it does not fit there either, it is left
   over for the next step.

The printed algorithm can lose or starve documents. Deviations that prevent this: a micro-batch may
have exactly S_max tokens, a queue releases as often as it has N documents, a batch that leaves
nothing to pack makes no step, and the end of the data flushes what waits.

Guarantees: at most S_max tokens a micro-batch and at most `step_tokens` tokens a step.
Cost: O(n log n + n log N).

One weakness of the printed algorithm remains: steps with very few tokens. If nearly all documents
of a batch are outliers, they fill queues that are not released yet, and the step trains only the
few tokens that are left: in one test 250 of 4,000, in one micro-batch of four (imbalance 4.0).
A step has no least number of tokens. A step with few tokens updates the weights like a full one; in
one run its gradient norm was three times that of other steps. `wlb plan` and the summaries of runs
warn of such steps. To avoid them:

- `packing.policy = "bounded"` makes a step only when enough tokens wait for one.
- Empty `packing.queue_thresholds` (no outlier queues) delay nothing, but balance worse.
- `training.loss_normalizer = "constant"` keeps such steps, but scales their gradients down with
  their number of tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wlb.packing.base import (
    LEFTOVER,
    ONE_PRICE,
    PolicyPacker,
    PriceRange,
    Pushed,
    check_fits,
    check_s_max,
    comparable,
)
from wlb.packing.carry_slots import CarrySlots
from wlb.packing.placement import place
from wlb.plan import (
    BoolArray,
    Carry,
    GlobalBatch,
    IntArray,
    PackingPlan,
    Pieces,
    UserError,
    check_minimum,
    convert_to_ints,
    int_array,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarLenPacker(PolicyPacker):
    """Packs by Algorithm 1. In its carry, slot 0 has leftovers and slot i has outlier queue i."""

    policy: ClassVar[str] = "var_len"
    slots: ClassVar[CarrySlots] = CarrySlots.BY_LENGTH
    batches_wait: ClassVar[bool] = False
    s_max: int  # most tokens of a micro-batch, at least the context window
    queue_thresholds: tuple[int, ...]  # L_1 < L_2 < ... in tokens; empty = nothing is delayed
    step_tokens: int | None = None  # T, most tokens of a step; None = no cap, as in the paper
    # Follow the printed algorithm line by line: micro-batches have fewer than S_max tokens, a queue
    # releases at most N documents a batch, every batch makes a step, and pieces are not shuffled.
    # The only addition is the flush at the end of the data.
    literal: bool = False
    # Number of steps that every outlier waits, to study the effect of delay alone. If nothing else
    # could be trained, the oldest outliers leave earlier. 0 = outliers leave when their queue has N
    # documents.
    hold: int = 0
    # Range of factors by which the price of attention may be wrong. Micro-batches are balanced for
    # the price in this range at which they are most unequal.
    price_range: PriceRange = ONE_PRICE

    def __post_init__(self) -> None:
        convert_to_ints(self, s_max=None, step_tokens=None, hold=0)
        check_s_max(self.s_max, self.options)
        if self.literal and self.s_max == self.options.context_window:
            raise UserError(
                f"s_max = {self.s_max} tokens must be above the context window if literal is True, "
                "because Algorithm 1 of the paper keeps micro-batches below s_max; set s_max = "
                f"{self.s_max + 1} or more, or literal = False"
            )
        if self.literal and not self.price_range.is_one_price:
            raise UserError(
                f"price_range = ({self.price_range.low}, {self.price_range.high}) must be (1, 1) "
                "if literal = True, because Algorithm 1 of the paper balances for one price of "
                "attention; set price_range to (1, 1), or literal = False"
            )
        window = self.options.context_window
        if self.step_tokens is not None and self.step_tokens < window:
            raise UserError(
                f"step_tokens = {self.step_tokens} must be at least the context window, {window} "
                "tokens, or a document that fills the window could never be placed; raise "
                "packing.step_tokens"
            )
        thresholds = int_array("queue_thresholds", self.queue_thresholds)
        check_minimum("queue_thresholds", thresholds, 1)
        if bool(np.any(np.diff(thresholds) <= 0)):
            raise UserError(
                f"queue_thresholds = {thresholds.tolist()} must increase; sort the thresholds and "
                "remove duplicates"
            )
        if self.hold and self.literal:
            raise UserError(
                f"hold = {self.hold} must be 0 if literal is True, because Algorithm 1 of the "
                "paper has no fixed delay; set hold = 0, or literal = False"
            )
        if self.hold and not self.queue_thresholds:
            raise UserError(
                f"hold = {self.hold} delays no document, because queue_thresholds is empty; set at "
                "least one threshold, or hold = 0"
            )

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` and the waiting documents; return plans of steps, and the new carry.

        At the end of the data `batch` is None, and everything that waits is packed.
        """
        longest = min(self.s_max - self.literal, self.step_tokens or self.s_max)
        name = "s_max or step_tokens" if self.step_tokens else "s_max"
        check_fits(carry.pieces, longest, name=name)
        step = carry.next_step
        arrived = self.options.arrived(batch, step)
        pieces = Pieces.concat(carry.pieces, arrived)
        # Recompute each piece's queue from its length, so that a carry stays valid when thresholds
        # change: 0 for an ordinary piece, i where L_i <= length < L_{i+1}.
        thresholds = np.array(self.queue_thresholds, np.int64)
        queue = np.searchsorted(thresholds, pieces.length, side="right").astype(np.int64)
        is_leftover = np.zeros(len(pieces), bool)
        is_leftover[: len(carry.pieces)] = carry.slot == LEFTOVER
        queue[is_leftover] = LEFTOVER
        is_due = self._due(pieces, queue, step, has_come=len(arrived) > 0)
        now, queued = self._admit(pieces, queue, is_leftover, is_due, flush=batch is None)
        work = self.options.workloads(pieces)
        held_tokens = int(pieces.length[queued].sum())
        plans: list[PackingPlan] = []
        while len(now) or (self.literal and batch is not None):
            plan, now = self._step(pieces, work, now, held_tokens, step)
            plans.append(plan)
            step += 1
            # Make one step of each batch. Only the flush at the end of the data makes several.
            if batch is not None:
                break
        waiting = np.concatenate([now, queued])
        slot = np.concatenate([np.full(len(now), LEFTOVER), queue[queued]])
        return tuple(plans), self._carry(pieces.take(waiting), step, slot)

    def _due(self, pieces: Pieces, queue: IntArray, step: int, *, has_come: bool) -> BoolArray:
        """Return which pieces have waited for `self.hold` steps, a mask of shape [num_pieces].

        If documents arrived but all waiting pieces are outliers, the step would be empty. So the
        oldest outliers count as due then, although they have waited for fewer steps.

        Args:
            pieces: All waiting pieces.
            queue: Outlier queue of each piece, 0 for pieces that are no outliers.
            step: Index of the next step.
            has_come: Whether the global batch of this step has documents.
        """
        latest = step - self.hold
        if has_come and (queue > LEFTOVER).all():
            latest = max(latest, int(pieces.arrival_step.min()))
        return pieces.arrival_step <= latest

    def _admit(
        self,
        pieces: Pieces,
        queue: IntArray,
        is_leftover: BoolArray,
        is_due: BoolArray,
        *,
        flush: bool,
    ) -> tuple[IntArray, IntArray]:
        """Decide which of the waiting pieces are packed now.

        Args:
            pieces: All waiting pieces.
            queue: Outlier queue of each piece, 0 for pieces that are no outliers.
            is_leftover: Which pieces an earlier step left over.
            is_due: Which outliers have waited for `hold` steps. Not used if `hold` is 0.
            flush: Whether all pieces leave, because the data has ended.

        Returns:
            Indices of the pieces to pack (leftovers first, then the others from long to short), and
            indices of the pieces that stay in their queues.
        """
        num = self.num_micro_batches
        # Pack all pieces below the first threshold. Some of them may have waited in a queue, if a
        # resumed run has other thresholds.
        new = [np.flatnonzero((queue == 0) & ~is_leftover)]
        still_queued = [np.zeros(0, np.int64)]
        for i in range(1, len(self.queue_thresholds) + 1):
            waiting = np.flatnonzero(queue == i)
            released = len(waiting) // num * num
            if self.literal:
                released = min(released, num)
            leaves = is_due[waiting] if self.hold else np.arange(len(waiting)) < released
            leaves |= flush
            new.append(waiting[leaves])
            still_queued.append(waiting[~leaves])
        rows = np.concatenate(new)
        rows = rows[np.argsort(-pieces.length[rows], kind="stable")]
        return np.concatenate([np.flatnonzero(is_leftover), rows]), np.concatenate(still_queued)

    def _step(
        self, pieces: Pieces, work: IntArray, now: IntArray, queued_tokens: int, step: int
    ) -> tuple[PackingPlan, IntArray]:
        """Pack one step.

        Args:
            pieces: All waiting pieces.
            work: Work of each piece in ns.
            now: Indices of the pieces to pack, in the order in which they are placed.
            queued_tokens: Tokens that wait in the outlier queues.
            step: Index of the step.

        Returns:
            The plan of the step, and the indices of the pieces that did not fit.
        """
        length, packed = pieces.length[now], pieces.take(now)
        ends = comparable(self.price_range.ends(self.options, packed, work[now]))
        rows, rest = place(
            length.tolist(),
            ends[0],
            second=ends[-1],
            num_micro_batches=self.num_micro_batches,
            s_max=self.s_max - self.literal,
            step_tokens=self.step_tokens,
        )
        plan = self._plan(
            step,
            pieces,
            [now[members] for members in rows],
            work_ns=work,
            num_held_tokens=queued_tokens + int(length[rest].sum()),
            shuffle=not self.literal,
        )
        return plan, now[rest]
