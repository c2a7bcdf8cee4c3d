"""var_len: variable-length packing with delayed outlier documents (Algorithm 1, Sections 4.1-4.3).

(1) Documents of L_i <= d < L_{i+1} tokens go to outlier queue i; (2) a queue that holds N releases
N, one for each micro-batch; (3) leftovers come first, then new documents from long to short; (4)
each goes to the micro-batch with the least W_a + W_l (Eq. 2) if it fits, else to the shortest, else
it is left over. Deviations, because the printed algorithm loses or starves documents: `<= S_max`,
queues release as often as they can, batches that leave nothing make no step, the end flushes.
Guarantees: at most S_max tokens a micro-batch, `step_tokens` a step. Cost: O(n log n + n log N).

The printed algorithm makes starved steps, which is kept here. A batch whose documents are nearly
all outliers fills queues that are not yet released, and its step trains the few tokens that are
left: 250 of 4,000 in a test, on one micro-batch of four (imbalance 4.0). Nothing in it bounds a
step from below, and `step_tokens` only bounds it from above. Such a step updates the weights like
a full one; in a run its gradient norm was three times the others'. Summaries of runs and `wlb plan`
warn of such steps. What avoids them:

- `packing.policy = "bounded"` makes a step only where enough waits for one.
- Empty `packing.queue_thresholds` hold nothing back, at the price of balance.
- `training.loss_normalizer = "constant"` leaves such steps, but makes their gradients as small as
  their tokens are few.
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
    """Algorithm 1 behind the packer protocol. Carry: slot 0 = leftovers, slot i = queue i.

    options: what all policies are told. s_max: longest micro-batch in tokens, at least the context
    window. queue_thresholds: L_1 < L_2 < ... in tokens; empty = no document is delayed.
    step_tokens: most tokens of a step; the paper has no such cap (None). literal: line by line as
    the paper has it (`<`, one release a queue and batch, a step for every batch, no shuffling),
    except that the end flushes. hold: steps that every queued document waits, to study delay alone;
    0 = until N are there. Where nothing else could be trained, the oldest leave earlier.
    price_range: each document goes to the micro-batch that is fastest at its worst price in it.
    """

    policy: ClassVar[str] = "var_len"
    slots: ClassVar[CarrySlots] = CarrySlots.BY_LENGTH
    batches_wait: ClassVar[bool] = False
    s_max: int
    queue_thresholds: tuple[int, ...]
    step_tokens: int | None = None
    literal: bool = False
    hold: int = 0
    price_range: PriceRange = ONE_PRICE

    def __post_init__(self) -> None:
        convert_to_ints(self, s_max=None, step_tokens=None, hold=0)
        check_s_max(self.s_max, self.options)
        if self.literal and self.s_max == self.options.context_window:
            raise UserError(
                f"s_max = {self.s_max} is the context window, and Algorithm 1 taken literally "
                f"places a document only where it stays below s_max: use {self.s_max + 1} or more"
            )
        if self.literal and not self.price_range.is_one_price:
            raise UserError(
                f"price_range = {self.price_range.low}, {self.price_range.high} is not Algorithm "
                f"1, which has one price; leave out literal"
            )
        window = self.options.context_window
        if self.step_tokens is not None and self.step_tokens < window:
            raise UserError(
                f"step_tokens = {self.step_tokens} is below the context window of {window}: a "
                f"document that fills it could never be placed"
            )
        thresholds = int_array("queue_thresholds", self.queue_thresholds)
        check_minimum("queue_thresholds", thresholds, 1)
        if bool(np.any(np.diff(thresholds) <= 0)):
            raise UserError(f"queue_thresholds {thresholds.tolist()} must increase")
        if self.hold and self.literal:
            raise UserError(f"hold = {self.hold} is not Algorithm 1; leave out literal")
        if self.hold and not self.queue_thresholds:
            raise UserError(f"hold = {self.hold} holds nothing without queue_thresholds; give one")

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        longest = min(self.s_max - self.literal, self.step_tokens or self.s_max)
        name = "s_max or step_tokens" if self.step_tokens else "s_max"
        check_fits(carry.pieces, longest, name=name)
        step = carry.next_step
        arrived = self.options.arrived(batch, step)
        pieces = Pieces.concat(carry.pieces, arrived)
        # Queues are read off the lengths, so that a carry stays valid when thresholds change: 0 for
        # an ordinary piece, i where L_i <= length < L_{i+1}.
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
            if batch is not None:
                break
        waiting = np.concatenate([now, queued])
        slot = np.concatenate([np.full(len(now), LEFTOVER), queue[queued]])
        return tuple(plans), self._carry(pieces.take(waiting), step, slot)

    def _due(self, pieces: Pieces, queue: IntArray, step: int, *, has_come: bool) -> BoolArray:
        """Outliers that have waited for `hold` steps, shape [num_pieces]; has_come: any document.

        The oldest ones are due at once where nothing else could be trained.
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
        """Rows to pack now (leftovers, then new ones by length), and rows that stay queued.

        is_due: outliers that leave whatever their number, if `hold` says so.
        """
        num = self.num_micro_batches
        # Ordinary pieces in stream order: the carry may hold some from before thresholds changed.
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
        """The plan of the rows `now`, and those of them that are left over."""
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
