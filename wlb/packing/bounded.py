"""bounded: outliers are released by predicted load, under bounds on delay, memory and backlog.

`release.choose` decides which waiting documents a step takes: the time that micro-batches wait for
the slowest one against the delay of what is held back, at the worst of a range of prices
(`prices`). Placement is Algorithm 1's over all pipelines, then `refine`. Guarantees: at most S_max
tokens a micro-batch, `step_tokens` a step (in the flush too) and `most_held_tokens` held after a
global batch; documents leave within `max_delay` steps if the caps permit, else they are counted.
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from wlb.packing.base import PolicyPacker, Pushed, check_fits, check_s_max
from wlb.packing.carry_slots import CarrySlots
from wlb.packing.price_range import ONE_PRICE, PriceRange, comparable
from wlb.packing.refine import refine
from wlb.packing.release import choose
from wlb.packing.var_len import place
from wlb.packing.waiting import StepLimits, fitting
from wlb.plan import (
    BoolArray,
    Carry,
    GlobalBatch,
    IntArray,
    PackingPlan,
    Pieces,
    UserError,
    hold_whole,
)

DELAY_PRICE, DELAY_PRICE_IN_RANGE = 0.15, 0.1
"""Price of a global batch held for a step: micro-batch times, times sqrt(N); with one price of
attention, and with a range of prices (experiments/LOG.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPacker(PolicyPacker):
    """The policy behind the packer protocol. Carry: slot 0 = held documents, in arrival order.

    A global batch makes one step, as a rule. It makes none while fewer documents than
    micro-batches or less than half of N x C tokens wait (less than N x C, if it brought no
    document), and several while more than `most_held_tokens` wait: a document of many windows
    arrives at once, and the batches that its tokens stand for bring nothing. The last batch is
    packed together with all that waits (`_end`), after which nothing is left to flush.
    Cost: O(n log n) in the documents that wait; 0.8 ms for 200, 0.1 s for 51,000.

    options: what all policies are told. s_max: longest micro-batch, in tokens, at least the context
    window. step_tokens: T, most tokens of a step, more than N x C; None = N x s_max. max_delay: D,
    in steps. delay_price: what holding a global batch for a step may cost, in typical micro-batch
    times; more means less delay and more imbalance. None = DELAY_PRICE / sqrt(N): with many
    micro-batches some imbalance is always on offer, and a constant price would take it.
    price_range: factors of attention's price at whose worst documents are chosen and placed.
    """

    policy: ClassVar[str] = "bounded"
    slots: ClassVar[CarrySlots] = CarrySlots.ONE
    batches_wait: ClassVar[bool] = False
    s_max: int
    step_tokens: int | None = None
    max_delay: int = 10
    delay_price: float | None = None
    price_range: PriceRange = ONE_PRICE

    def __post_init__(self) -> None:
        hold_whole(self, s_max=None, step_tokens=None, max_delay=1)
        options, step_tokens = self.options, self.limits.step_tokens
        window, brought = options.context_window, options.tokens_per_step
        check_s_max(self.s_max, options)
        if step_tokens <= brought:
            raise UserError(
                f"step_tokens = {step_tokens} is not more than the {brought} tokens that a global "
                f"batch brings ({brought // window} x {window}), so what is held back could never "
                f"be caught up; raise step_tokens, or s_max above the window"
            )
        if self.delay_price is not None and not 0 < self.delay_price < np.inf:
            raise UserError(f"delay_price = {self.delay_price} must be above 0 and finite")

    @property
    def limits(self) -> StepLimits:
        """Limits of a step, in tokens and steps."""
        num = self.num_micro_batches
        most = num * self.s_max
        usual = DELAY_PRICE if self.price_range.is_one_price else DELAY_PRICE_IN_RANGE
        return StepLimits(
            num_micro_batches=num,
            tokens_per_step=self.options.tokens_per_step,
            s_max=self.s_max,
            step_tokens=most if self.step_tokens is None else min(self.step_tokens, most),
            max_delay=self.max_delay,
            price=usual / sqrt(num) if self.delay_price is None else self.delay_price,
        )

    @property
    def most_held_tokens(self) -> int:
        """Most tokens that are held back after a global batch: half of `max_delay` batches, at
        least two. Beyond that a batch makes several steps."""
        return max(2, self.max_delay // 2) * self.options.tokens_per_step

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        limit = min(self.s_max, self.limits.step_tokens)
        check_fits(carry.pieces, limit, name="s_max or step_tokens")
        step = carry.next_step
        waiting = Pieces.concat(carry.pieces, self.options.arrived(batch, step))
        if batch is None or batch.is_last:
            last = self._flushed(waiting, step) if batch is None else self._end(waiting, step)
            return last, self._carry(Pieces.empty(), step + len(last))
        plans: list[PackingPlan] = []
        makes_step = self._makes_step(batch, waiting)
        while makes_step:
            plan, waiting = self._step(waiting, step + len(plans), flush=False)
            plans.append(plan)
            makes_step = waiting.num_tokens > self.most_held_tokens
        return tuple(plans), self._carry(waiting, step + len(plans))

    def _end(self, waiting: Pieces, step: int) -> tuple[PackingPlan, ...]:
        """The last steps, where the last batch is there to keep tall documents company.

        All is flushed together, or a usual step comes first: whichever makes the slowest
        micro-batches of these steps take less time.
        """
        if not len(waiting):
            return ()
        plan, rest = self._step(waiting, step, flush=False)
        apart = plan, *self._flushed(rest, step + 1)
        return min(self._flushed(waiting, step), apart, key=_slowest_ns)

    def _flushed(self, waiting: Pieces, step: int) -> tuple[PackingPlan, ...]:
        """As many steps as it takes until nothing waits."""
        plans: list[PackingPlan] = []
        while len(waiting):
            plan, waiting = self._step(waiting, step + len(plans), flush=True)
            plans.append(plan)
        return tuple(plans)

    def _makes_step(self, batch: GlobalBatch, waiting: Pieces) -> bool:
        """Whether enough waits for a step once `batch` has come."""
        tokens, brought = waiting.num_tokens, self.options.tokens_per_step
        if tokens >= brought or not len(batch.documents):
            return tokens >= brought
        return len(waiting) >= self.num_micro_batches and 2 * tokens >= brought

    def _step(self, waiting: Pieces, step: int, *, flush: bool) -> tuple[PackingPlan, Pieces]:
        work = self.options.workloads(waiting)
        ends = self.price_range.ends(self.options, waiting, work)
        limits = self.limits
        age = step - waiting.arrival_step
        is_due = age >= self.max_delay
        if flush:
            taken = _tallest_first(waiting, work, is_due, limits.step_tokens)
        else:
            taken = choose(waiting.length, work, age, limits, ends=ends)
        order = np.flatnonzero(taken)
        order = order[np.argsort(-work[order], kind="stable")]
        rows, rest = self._place(waiting.length[order], ends[:, order])
        if is_due[order[rest]].any():
            # S_max left out a document that must leave: such documents come first, which costs
            # some balance.
            order = order[np.argsort(~is_due[order], kind="stable")]
            rows, rest = self._place(waiting.length[order], ends[:, order])
        taken[order[rest]] = False
        held = waiting.take(np.flatnonzero(~taken))
        plan = self._plan(
            step,
            waiting,
            [order[members] for members in rows],
            work_ns=work,
            num_held_tokens=held.num_tokens,
            max_delay=self.max_delay,
        )
        return plan, held

    def _place(self, length: IntArray, ends: IntArray) -> tuple[list[list[int]], list[int]]:
        """Algorithm 1's placement in the given order, refined; and what S_max leaves over."""
        lengths, works = length.tolist(), comparable(ends)
        first, second, s_max = works[0], works[-1], self.s_max
        num = self.num_micro_batches
        rows, rest = place(lengths, first, second=second, num_micro_batches=num, s_max=s_max)
        return refine(rows, lengths, first, second=second, s_max=s_max), rest


def _slowest_ns(plans: tuple[PackingPlan, ...]) -> int:
    """Work of the slowest micro-batches of these steps together."""
    return sum(int(plan.workload_ns.max()) for plan in plans)


def _tallest_first(
    waiting: Pieces, work: IntArray, is_due: BoolArray, step_tokens: int
) -> BoolArray:
    """At the end of data: what is due, then the tallest documents together, each that still fits
    the token cap."""
    order = np.lexsort((-work, ~is_due))
    taken = np.zeros(len(waiting), bool)
    taken[order[fitting(waiting.length[order], step_tokens)]] = True
    return taken
