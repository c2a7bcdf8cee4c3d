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

import heapq
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
from wlb.packing.runs import fits_64_bits, least_loaded, runs_of
from wlb.plan import (
    BoolArray,
    Carry,
    GlobalBatch,
    IntArray,
    PackingPlan,
    Pieces,
    UserError,
    check_minimum,
    hold_whole,
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
        hold_whole(self, s_max=None, step_tokens=None, hold=0)
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


def place(
    lengths: list[int],
    workloads: list[int],
    *,
    num_micro_batches: int,
    s_max: int,
    step_tokens: int | None = None,
    second: list[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Lines 22-37 of Algorithm 1: (rows of each micro-batch, rows left over), in the given order.

    step_tokens: a document that would bring the sum over all micro-batches above it is left over.
    second: work at another price, in units of the same sum (`prices.comparable`); a micro-batch's
    work is then the larger of its two sums.
    Both minima come from heaps of one entry a micro-batch, O(log N) a document: work and size only
    grow, so an old entry is a lower bound and is brought up to date when it comes to the top. Runs
    of equal documents are placed together (`runs`), with the same result.
    """
    others = workloads if second is None else second
    placed = _Placement(lengths, workloads, others, num=num_micro_batches, s_max=s_max)
    placed.room = num_micro_batches * s_max if step_tokens is None else step_tokens
    at = 0
    for first, stop in runs_of(lengths, workloads, others, num_bins=num_micro_batches):
        placed.each(at, first)
        at = first + placed.together(first, stop - first)
    placed.each(at, len(lengths))
    return placed.rows, placed.rest


class _Placement:
    """Micro-batches being filled with documents, whose columns are of [n]. rows: of each
    micro-batch; rest: rows left over; room: tokens that the step may still take."""

    def __init__(
        self, lengths: list[int], one: list[int], two: list[int], *, num: int, s_max: int
    ) -> None:
        self.lengths, self.one, self.two, self.s_max = lengths, one, two, s_max
        self.rows: list[list[int]] = [[] for _ in range(num)]
        self.rest: list[int] = []
        self.room = 0
        # Loads at both prices, the larger of them, and tokens, by micro-batch.
        self._loads = [0] * num, [0] * num
        self._work, self._size = [0] * num, [0] * num
        self._by_work = [(0, i) for i in range(num)]
        self._by_size = [(0, i) for i in range(num)]
        # The shortest document from each row on: where even that fits nowhere, nothing more does.
        backwards = np.array([*lengths, s_max + 1], np.int64)[::-1]
        self._shortest = np.minimum.accumulate(backwards)[::-1].tolist()

    def each(self, first: int, stop: int) -> None:
        """Place rows [first, stop) one by one: where the least work is, if they fit there, else
        where the fewest tokens are."""
        rows, rest, (one, two), work = self.rows, self.rest, self._loads, self._work
        size, by_work, by_size, s_max = self._size, self._by_work, self._by_size, self.s_max
        room = self.room
        columns = (self.lengths[first:stop], self.one[first:stop], self.two[first:stop])
        for row, (length, a, b) in enumerate(zip(*columns, strict=True), first):
            if length > room:
                rest.append(row)
                continue
            while by_work[0][0] != work[target := by_work[0][1]]:
                heapq.heapreplace(by_work, (work[target], target))
            if size[target] + length > s_max:
                while by_size[0][0] != size[target := by_size[0][1]]:
                    heapq.heapreplace(by_size, (size[target], target))
                if size[target] + length > s_max:
                    if size[target] + self._shortest[row] > s_max:
                        rest += range(row, stop)
                        break
                    rest.append(row)
                    continue
            rows[target].append(row)
            one[target] += a
            two[target] += b
            work[target] = max(one[target], two[target])
            size[target] += length
            room -= length
        self.room = room

    def together(self, first: int, num: int) -> int:
        """Place equal documents from row `first` on, up to the first that does not go where the
        least work is; how many were placed."""
        length, a, b = self.lengths[first], self.one[first], self.two[first]
        num = min(num, self.room // length)
        one, two = self._loads
        if not num or not fits_64_bits([*one, *two], max(a, b), num):
            return 0
        target = least_loaded(one, a, num, room=[num] * len(one), other=(two, b))
        for i, size in enumerate(self._size):
            over = np.flatnonzero(target == i)[(self.s_max - size) // length :]
            if over.size:
                target = target[: int(over[0])]
        for i in np.flatnonzero(np.bincount(target, minlength=len(one))).tolist():
            taken = (first + np.flatnonzero(target == i)).tolist()
            self.rows[i] += taken
            one[i] += len(taken) * a
            two[i] += len(taken) * b
            self._work[i] = max(one[i], two[i])
            self._size[i] += len(taken) * length
        self.room -= target.size * length
        self._by_work = [(work, i) for i, work in enumerate(self._work)]
        heapq.heapify(self._by_work)
        return target.size
