"""bounded: long documents wait until their step is balanced, under bounds on delay and memory.

A step takes some of the waiting documents. Unlike Algorithm 1, which releases long documents when a
queue holds N, it looks at the predicted times of the whole step:

1. Sort by work. Documents of at least `OUTLIER` of a typical micro-batch are outliers, about which
   it decides one by one; of all others (ordinary documents) only how many. Outliers of nearly equal
   work are a size class, of which the oldest comes first.
2. Documents that have waited `max_delay` steps must leave, oldest first, as the caps allow.
3. List candidates: an interval of the sorted outliers, and all those behind a second position.
4. Bound from below what each one costs: the wait for its slowest micro-batch, and the delay of what
   it holds back.
5. Pack the outliers of the `NUM_PACKED` candidates with the lowest bounds, fill up with ordinary
   documents as a fluid (water-filling), and take the one that then costs least.
6. Place what it takes by Algorithm 1, then exchange documents (`refine`).

Guarantees: at most S_max tokens a micro-batch, `step_tokens` a step (in the flush too) and
`most_held_tokens` held after a global batch. Documents leave within `max_delay` steps if the caps
permit, else they are counted. Equal on all hosts (integers and single IEEE operations).
Cost: O(n log n) in the documents that wait; 0.8 ms for 200, 0.1 s for 51,000.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from wlb.packing.base import (
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
    FloatArray,
    GlobalBatch,
    IntArray,
    IntLike,
    PackingPlan,
    Pieces,
    UserError,
    convert_to_ints,
    offsets_of,
)

# Each constant says what it trades and what chose it (LOG is experiments/LOG.md). Imbalance and
# mean delay in steps of N = 4 at T 1.5, S_max 2, D 10 and one price, 400 steps of each stream:
#
#                    fitted          ProLong         library
# as they stand      1.0064  0.272   1.0059  0.116   1.0038  0.143
# DELAY_PRICE / 2    1.0039  0.341   1.0053  0.136   1.0022  0.166
#             * 2    1.0117  0.220   1.0068  0.092   1.0056  0.126
# CURVATURE / 2      1.0055  0.325   1.0054  0.134   1.0030  0.163
#           * 2      1.0086  0.246   1.0060  0.098   1.0050  0.119
# URGENCY / 2        1.0057  0.276   1.0070  0.122   1.0044  0.145
#         * 2        1.0070  0.265   1.0056  0.111   1.0038  0.119
# LEAST / 2          1.0050  0.276   1.0042  0.117   1.0038  0.143
#       * 2          1.0743  0.173   1.0148  0.058   1.0040  0.141
# OUTLIER / 2        1.0073  0.267   1.0055  0.118   1.0038  0.142
#         * 2        1.0071  0.279   1.0067  0.114   1.0062  0.134
# CLASS 0.985        1.0062  0.269   1.0059  0.116   1.0038  0.143
#       0.94         1.0064  0.272   1.0059  0.116   1.0038  0.143
# NUM_PACKED 4, 16   1.0064  0.272   1.0059  0.116   1.0038  0.143

DELAY_PRICE, DELAY_PRICE_IN_RANGE = 0.15, 0.1
"""Price of a global batch held for a step, in typical micro-batch times, times sqrt(N): more means
less delay and more imbalance. With many micro-batches some imbalance is always on offer, which a
price that does not fall with N would take (LOG, "bounded: what lost": 1.013 instead of 1.008 at N =
16). The first is of one price of attention; a range needs more company, and has the second (LOG,
"balance over a range of prices")."""
CURVATURE = 0.1
"""Wait, in typical micro-batch times, whose square counts as much as itself: less avoids the worst
steps, at the price of delay. One step of 1.10 is dearer than ten of 1.01 (LOG, "bounded: what
lost": the 95th percentile on the library from 1.10 to 1.02)."""
URGENCY = 2.0
"""Weight of the company that a tall held document still lacks when it must leave: more lets
documents of nearly its work wait for it (LOG, "bounded: what lost": 1.008 on the library, 1.021
without)."""
LEAST = 0.35
"""Global batches that a step takes at least, if that much waits and fits. Holding nearly everything
back costs no wait, so that steps would alternate between nearly empty and full ones (LOG, "Reviews
of bounded": lengths drawn uniformly, 1.13 instead of 1.95)."""
OUTLIER = 0.2
"""Work of the smallest outlier, in typical micro-batches: less decides about more documents one by
one, which are more candidates (the table above)."""
CLASS = 0.97
"""Outliers down to this part of the tallest one's work form a size class, whose oldest leaves
first. Candidates begin at the start of a class, so that their number does not grow with n: more
and finer ones, for time. At N = 64 a step of the fitted stream has 2,178; at 0.985 and 0.94 it has
3,075 and 1,151, with the same imbalance."""
NUM_PACKED = 8
"""Most candidates that are packed: more find better ones where bounds are loose, for time. At one
price the best bound is mostly exact (1.02 packed a step at N = 4). At prices 0.7 to 1.6 and N = 16
4, 8, 16 on the fitted stream have 1.0108, 1.0107, 1.0089; without a limit it is 1.0060 at 0.06 more
delay, with 37 packed a step, and 552 at N = 64."""
ONE_BY_ONE = 8
"""Intervals of up to so many outliers are listed one by one, longer ones in powers of two and
eighths of N: more candidates, for time. 4 changes no imbalance at N = 4, 16 and 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a step may take, and what it costs to hold documents back."""

    num_micro_batches: int  # N, of all pipelines together
    tokens_per_step: int  # N x C, what a global batch brings
    s_max: int  # most tokens of a micro-batch
    step_tokens: int  # T, most tokens of the step
    max_delay: int  # D, in steps
    price: float  # of a global batch held for a step, in typical micro-batch times


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPacker(PolicyPacker):
    """The policy behind the packer protocol. Carry: slot 0 = held documents, in arrival order.

    A global batch makes one step, as a rule. It makes none while fewer documents than
    micro-batches or less than half of N x C tokens wait (less than N x C, if it brought no
    document), and several while more than `most_held_tokens` wait: a document of many windows
    arrives at once, and the batches that its tokens stand for bring nothing. The last batch is
    packed together with all that waits, after which nothing is left to flush.
    """

    policy: ClassVar[str] = "bounded"
    slots: ClassVar[CarrySlots] = CarrySlots.ONE
    batches_wait: ClassVar[bool] = False
    s_max: int  # longest micro-batch in tokens, at least the context window
    step_tokens: int | None = None  # T, most tokens of a step, above N x C; None = N x s_max
    max_delay: int = 10  # D, in steps
    delay_price: float | None = None  # in typical micro-batch times; None = DELAY_PRICE / sqrt(N)
    price_range: PriceRange = ONE_PRICE  # factors of attention's price whose worst one counts

    def __post_init__(self) -> None:
        convert_to_ints(self, s_max=None, step_tokens=None, max_delay=1)
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
        least two. Beyond that a batch makes several steps.
        """
        return max(2, self.max_delay // 2) * self.options.tokens_per_step

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        limit = min(self.s_max, self.limits.step_tokens)
        check_fits(carry.pieces, limit, name="s_max or step_tokens")
        step = carry.next_step
        waiting = Pieces.concat(carry.pieces, self.options.arrived(batch, step))
        if batch is None or batch.is_last:
            last = self._flushed(waiting, step)
            if batch is not None and len(waiting):
                # All is flushed together, so that the last batch keeps tall documents company, or a
                # usual step comes first: whichever has the faster slowest micro-batches.
                plan, rest = self._step(waiting, step, flush=False)
                apart = plan, *self._flushed(rest, step + 1)
                last = min(last, apart, key=lambda x: sum(int(p.workload_ns.max()) for p in x))
            return last, self._carry(Pieces.empty(), step + len(last))
        tokens, brought = waiting.num_tokens, self.options.tokens_per_step
        is_enough = tokens >= brought or (
            len(batch.documents) > 0
            and len(waiting) >= self.num_micro_batches
            and 2 * tokens >= brought
        )
        plans: list[PackingPlan] = []
        while is_enough:
            plan, waiting = self._step(waiting, step + len(plans), flush=False)
            plans.append(plan)
            is_enough = waiting.num_tokens > self.most_held_tokens
        return tuple(plans), self._carry(waiting, step + len(plans))

    def _flushed(self, waiting: Pieces, step: int) -> tuple[PackingPlan, ...]:
        """As many steps as it takes until nothing waits."""
        plans: list[PackingPlan] = []
        while len(waiting):
            plan, waiting = self._step(waiting, step + len(plans), flush=True)
            plans.append(plan)
        return tuple(plans)

    def _step(self, waiting: Pieces, step: int, *, flush: bool) -> tuple[PackingPlan, Pieces]:
        """The next step's plan, and what it holds back."""
        length, limits = waiting.length, self.limits
        work = self.options.workloads(waiting)
        ends = self.price_range.ends(self.options, waiting, work)
        age = step - waiting.arrival_step
        is_due = age >= self.max_delay
        if flush:
            # No company will come any more: what is due leaves, then the tallest ones together.
            order = np.lexsort((-work, ~is_due))
            order = np.sort(order[fitting(length[order], limits.step_tokens)])
        else:
            order = np.flatnonzero(choose(length, work, age, limits, ends=ends))
        order = order[np.argsort(-work[order], kind="stable")]
        rows, rest = _placed(length[order], ends[:, order], limits, exchange=True)
        if is_due[order[rest]].any():
            # S_max left out a document that must leave: such documents come first, which costs
            # some balance.
            order = order[np.argsort(~is_due[order], kind="stable")]
            rows, rest = _placed(length[order], ends[:, order], limits, exchange=True)
        taken = np.zeros(len(waiting), bool)
        taken[order] = True
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


def choose(
    length: IntArray,
    work: IntArray,
    age: IntArray,
    limits: StepLimits,
    *,
    ends: IntArray | None = None,
) -> BoolArray:
    """Choose which of the waiting documents the next step takes (steps 1 to 5).

    An example: six documents for N = 2 micro-batches of 100 tokens. Attention takes 100 / 60 times
    as long as linear work in a document of 100 tokens, as in the paper's 7B model at its window.

    >>> length = np.array([100, 96, 60, 10, 10, 10])
    >>> work = length * (length + 60)
    >>> work.tolist()
    [16000, 14976, 7200, 700, 700, 700]
    >>> limits = StepLimits(
    ...     num_micro_batches=2,
    ...     tokens_per_step=200,
    ...     s_max=200,
    ...     step_tokens=300,
    ...     max_delay=10,
    ...     price=0.1,
    ... )
    >>> chosen = choose(length, work, np.array([1, 0, 0, 0, 0, 0]), limits)
    >>> length[chosen].tolist()
    [100, 96, 10, 10, 10]

    Step 1: 100 of the 286 tokens have a work of 14,083 on average, a typical micro-batch. The
    documents of 100, 96 and 60 tokens are outliers, each a size class of its own. Step 2: none is
    10 steps old. Step 3: outliers may leave as 100, 96, 60 | 100, 96 | 100, 60 | 100 | 96, 60 | 96
    | 60. With none the step would have 30 tokens, less than 0.35 x 200.
    Step 4: of all three, two must share a micro-batch, 0.97 x (14,976 + 7,200) = 21,511 at least.
    The mean would be 20,138, so the wait is 0.098 typical micro-batches, and with its square 0.098
    + 0.098^2 / 0.1 = 0.193. If the one of 60 tokens is held, 100 and 96 with 30 others are
    balanced, and the delay costs 0.1 x (60 / 200 + 0.3^2 / (2 x 0.5)) = 0.039. Step 5 packs this
    one first: the fluid of 30 tokens levels both micro-batches at 16,538, so the cost is still
    0.039, below the bound of every other candidate.

    Args:
        length: Tokens of each waiting document, shape [n], n >= 1.
        work: Predicted time of each one in nanoseconds, shape [n].
        age: Steps that each one has waited, shape [n].
        limits: Caps on the step's tokens, a micro-batch's tokens and the delay.
        ends: Work at the ends of the range of prices, shape [num_ends, n]. Defaults to `work`.

    Returns:
        A mask of the chosen documents, shape [n].
    """
    waiting = WaitingDocuments(length, work, age, limits, work[None] if ends is None else ends)
    candidates = _candidates(waiting)
    bound = _bounds(waiting, candidates)
    least, best = np.inf, None
    for c in np.argsort(bound, kind="stable")[:NUM_PACKED].tolist():
        if not bound[c] < least:
            break
        cost, taken = _packed(waiting, candidates.at([c]))
        if cost < least or best is None:
            least, best = cost, taken
    assert best is not None
    out = np.zeros(len(length), bool)
    out[waiting.order[best]] = True
    return out


class WaitingDocuments:
    """Waiting documents in the order of step 1: outliers, then ordinary ones by descending work.

    Those ordinary ones that must leave come last. `rows` has a row each of tokens, work, tokens
    times their delay if they miss this step too, and work at each end of the range of prices: shape
    [3 + num_ends, n]. `sums` are its running sums, [3 + num_ends, n + 1], so that any interval of
    documents is summed by a difference.
    """

    def __init__(
        self, length: IntArray, work: IntArray, age: IntArray, limits: StepLimits, ends: IntArray
    ) -> None:
        self.limits = limits
        # Work of a typical micro-batch: of as many waiting tokens as a micro-batch has on average.
        total = max(1, int(length.sum()))
        per_micro_batch = limits.tokens_per_step / limits.num_micro_batches
        self.typical = max(1.0, int(work.sum()) / total * per_micro_batch)
        of_ends = [max(1.0, int(x.sum()) / total * per_micro_batch) for x in ends]
        self.typical_ends: FloatArray = np.array(of_ends)[:, None]
        # 1. Outliers by size class, the oldest of a class first; then the others by work.
        order = np.argsort(-work, kind="stable")
        heights = -work[order]
        self.num_outliers = num = int(np.searchsorted(heights, -OUTLIER * self.typical, "right"))
        starts: list[int] = []
        at = 0
        while at < num:
            starts.append(at)
            at = int(np.searchsorted(heights[:num], CLASS * float(heights[at]), "right"))
        self.class_starts = np.array(starts, np.int64)
        rank = np.arange(len(order))
        rank[:num] = np.searchsorted(self.class_starts, rank[:num], "right") - 1
        order = order[np.lexsort((-age[order], rank))]
        # 2. What must leave: oldest first, as many as both caps allow. One that finds no
        # micro-batch would keep its tokens of T from others that do.
        due = np.flatnonzero(age[order] >= limits.max_delay)
        due = order[due[np.argsort(-age[order[due]], kind="stable")]]
        due = due[fitting(length[due], limits.step_tokens)]
        by_length = due[np.argsort(-length[due], kind="stable")]
        if _placed(length[by_length], ends[:, by_length], limits)[1]:
            due = np.delete(due, _placed(length[due], ends[:, due], limits)[1])
        must_leave = np.zeros(len(order), bool)
        must_leave[due] = True
        # Sorting by a mask keeps the order and puts ordinary documents that must leave last.
        others = order[num:]
        others = others[np.argsort(must_leave[others], kind="stable")]
        self.order = order = np.concatenate([order[:num], others])
        self.must_leave = must_leave[order]
        self.num_free = num + int((~must_leave[others]).sum())
        self.length, self.age = length[order], age[order]
        self.rows = np.stack([length, work, length * (age + 1), *ends])[:, order]
        self.sums = np.stack([offsets_of(row) for row in self.rows])
        self.outlier_sums = self.sums[:, : num + 1]
        kept = self.rows[:, :num] * self.must_leave[:num]
        self.must_leave_sums = np.stack([offsets_of(row) for row in kept])
        # Ordinary documents: what must leave of them; of the others the sums, their tokens before
        # each one, the mean delay of a token if all miss this step, and work by token.
        self.ordinary_forced = (self.sums[:, -1] - self.sums[:, self.num_free])[:, None]
        self.ordinary: IntArray = self.sums[:, self.num_free] - self.sums[:, num]
        self.tokens_before: IntArray = self.sums[0, num : self.num_free + 1] - self.sums[0, num]
        tokens, work_left, delayed = map(int, self.ordinary[:3])
        self.ordinary_delay = delayed / tokens if tokens else 0.0
        per_token = self.typical / limits.tokens_per_step * limits.num_micro_batches
        self.density = work_left / tokens if tokens else per_token

    def size_class_end(self, candidates: "Candidates") -> IntArray:
        """End of the released outliers of the tallest one's size class, at most N of them."""
        ends = np.append(self.class_starts[1:], [self.num_outliers, self.num_outliers])
        own = np.searchsorted(self.class_starts, candidates.tallest, "right") - 1
        most = candidates.tallest + self.limits.num_micro_batches
        return np.minimum(np.minimum(candidates.first_stop, ends[own]), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Outliers [first, end) and those from `tail` on are released; arrays of [num_candidates].

    Of the running sums of a value over the outliers (shape [..., num_outliers + 1]) `released` and
    `held` make each candidate's sums, shape [..., num_candidates].
    """

    first: IntArray
    end: IntArray
    tail: IntArray
    num_outliers: int

    @property
    def tallest(self) -> IntArray:
        """Position of the first outlier that is released; num_outliers if none is."""
        return np.where(self.end > self.first, self.first, self.tail)

    @property
    def first_stop(self) -> IntArray:
        """End of the run of released outliers that begins with the tallest."""
        return np.where(self.end > self.first, self.end, self.num_outliers)

    def released(self, running: IntArray) -> IntArray:
        before_tail = running[..., self.end] - running[..., self.first]
        return before_tail + running[..., -1:] - running[..., self.tail]

    def held(self, running: IntArray) -> IntArray:
        return running[..., self.first] + running[..., self.tail] - running[..., self.end]

    def at(self, index: IntLike | BoolArray) -> "Candidates":
        first, end, tail = self.first[index], self.end[index], self.tail[index]
        return Candidates(first=first, end=end, tail=tail, num_outliers=self.num_outliers)


def _candidates(waiting: WaitingDocuments) -> Candidates:
    """All candidates that fit the token cap; `first` and `tail` are at the start of a class."""
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    starts = np.append(waiting.class_starts, num_outliers)
    # How many outliers the interval has: each number up to ONE_BY_ONE, then powers of two and
    # eighths of N.
    shortest = int(waiting.length[:num_outliers].min(initial=1 << 62))
    most = int(limits.step_tokens / max(1, shortest))
    counts = np.arange(min(num_outliers, most, ONE_BY_ONE) + 1)
    if num_outliers > ONE_BY_ONE:
        eighths = np.arange(1, 8 * max(1, most // num + 1)) * num // 8
        powers = 2 ** np.arange(4, num_outliers.bit_length())
        counts = np.unique(np.concatenate([counts, powers, eighths]))
    first, count, tail = (a.ravel() for a in np.meshgrid(starts, counts, starts, indexing="ij"))
    end = first + count
    # A count of 0 means all from `first` on, with tail = first. Otherwise the candidate holds
    # something back between its two parts.
    is_one = np.where(count > 0, (end < tail) & (first < num_outliers), tail == first)
    candidates = Candidates(first=first, end=end, tail=tail, num_outliers=num_outliers).at(is_one)
    taken = candidates.released(waiting.outlier_sums[0]) + waiting.ordinary_forced[0]
    taken += candidates.held(waiting.must_leave_sums[0])
    # The step has ordinary documents too, as many as fit. It takes at least LEAST batches with
    # them, unless no candidate can.
    fits = taken <= limits.step_tokens
    possible = np.minimum(taken + waiting.ordinary[0], limits.step_tokens)
    least = min(LEAST * limits.tokens_per_step, int(possible[fits].max()))
    return candidates.at(fits & (possible >= max(1.0, least)))


def _bounds(waiting: WaitingDocuments, candidates: Candidates) -> FloatArray:
    """Lower bound on what each candidate costs, in typical micro-batch times: [num_candidates].

    One end of the prices has a row in `work`, `mean`, `slowest`: shape [num_ends, num_candidates].
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    first, end, tail = candidates.first, candidates.end, candidates.tail
    # (a) What leaves in any case. A size class is sorted by age, so that the tallest document is
    # the maximum from its first one on.
    taken = candidates.released(waiting.outlier_sums) + candidates.held(waiting.must_leave_sums)
    taken += waiting.ordinary_forced
    outliers = np.append(waiting.rows[:, :num_outliers], np.zeros((len(taken), 1), np.int64), 1)
    highest = np.maximum.accumulate(outliers[:, ::-1], axis=1)[:, ::-1]
    forced = (outliers[:, :num_outliers] * waiting.must_leave[:num_outliers]).max(1, initial=0)
    height = np.maximum(highest[:, candidates.tallest], forced[:, None])
    # (b) Ordinary documents that fit: the heaviest, in part, if all of the lightest do not raise
    # the mean to the tallest document.
    room: IntArray = np.minimum(limits.step_tokens - taken[0], waiting.ordinary[0])
    before, sums = waiting.tokens_before, waiting.sums
    light = num_outliers + np.searchsorted(before, int(before[-1]) - room, "left")
    heavy = num_outliers + np.searchsorted(before, room, "right") - 1
    lightest = sums[:, [waiting.num_free]] - sums[:, light]
    heaviest = sums[:, heavy] - sums[:, [num_outliers]]
    missing = height[1] * num - taken[1]
    is_light = lightest[1] >= missing
    part = np.minimum(1.0, np.maximum(0, missing) / np.maximum(1, heaviest[1]))
    fluid = np.where(is_light, lightest[3:], heaviest[3:] * part)
    tokens: IntArray = np.where(is_light, lightest, heaviest)[0]
    mean = (taken[3:] + fluid) / num
    # (c) The slowest micro-batch has at least the mean and the tallest document. Of N + 1 outliers
    # two share a micro-batch, of 2N + 1 three; inside a class one may be lighter by CLASS.
    count = end - first

    def nth(n: int) -> IntArray:
        """Work at the ends of the n-th outlier that is released; 0 if there are fewer."""
        row = np.where(n < count, first + n, tail + n - count)
        return outliers[3:, np.minimum(row, num_outliers)]

    two = np.where(nth(num) > 0, nth(num) + nth(num - 1), 0)
    three = np.where(nth(2 * num) > 0, nth(2 * num) + nth(2 * num - 1) + nth(2 * num - 2), 0)
    slowest = np.maximum(np.maximum(mean, height[3:]), CLASS * np.maximum(two, three))
    # (d) The tallest documents have a micro-batch each, and something must go on top of them.
    all_tokens = taken[0] + tokens
    if len(mean) == 1:
        crowded = _crowded(waiting, candidates, all_tokens, num * mean[0])
        wait = _wait(waiting, np.maximum(slowest, crowded) - mean)
    else:
        wait = _skewed(waiting, candidates, slowest, mean, fluid)
    # (e) What is held: outliers exactly, ordinary documents at their mean delay.
    held = (waiting.outlier_sums[:, -1:] + waiting.ordinary_forced - taken)[[0, 2]]
    left = waiting.ordinary[0] - tokens
    delayed = held[1] + left * waiting.ordinary_delay
    return wait + _holding(waiting, candidates, held[0] + left, delayed)


def _wait(waiting: WaitingDocuments, over: FloatArray) -> FloatArray:
    """What waiting for the slowest micro-batch costs, in typical micro-batch times: [n].

    over: slowest micro-batch - mean at each end of the prices, shape [num_ends, n]. x + x^2 /
    CURVATURE at the worse end: the square makes one step of 1.10 dearer than ten of 1.01.
    """
    x = (over / waiting.typical_ends).max(0)
    return x + x * x / CURVATURE


def _crowded(
    waiting: WaitingDocuments, candidates: Candidates, tokens: IntArray, work: FloatArray
) -> FloatArray:
    """Work of the slowest micro-batch at least, where S_max crowds it: shape [num_candidates].

    The first k outliers have a micro-batch each, and what does not fit the other N - k under S_max
    comes on top of them; k is once the tallest size class, once N. tokens, work: of the step.
    """
    num, s_max, first = waiting.limits.num_micro_batches, waiting.limits.s_max, candidates.tallest
    out = np.zeros(len(tokens))
    tallest_n = np.minimum(candidates.first_stop, first + num)
    for end in (tallest_n, waiting.size_class_end(candidates)):
        k = end - first
        top = waiting.sums[:2, end] - waiting.sums[:2, first]
        rest = tokens - top[0]
        over = np.maximum(0, rest - (num - k) * s_max)
        # Divided first: tokens times ns would not fit 64 bits.
        on_top = over / np.maximum(1, rest) * (work - top[1])
        out = np.maximum(out, np.where(k > 0, (top[1] + on_top) / np.maximum(1, k), 0.0))
    return out


def _skewed(
    waiting: WaitingDocuments,
    candidates: Candidates,
    slowest: FloatArray,
    mean: FloatArray,
    fluid: FloatArray,
) -> FloatArray:
    """`_wait`, with what no share of tokens can level at both ends of the prices: [num_candidates].

    The k tallest documents have a micro-batch each. With few ordinary documents beside them these
    are the slowest where attention is dear, and with many where it is cheap. Of the shares that
    make their micro-batches average at one end, and of none, the best counts. fluid: work of the
    ordinary documents.
    """
    num, start = waiting.limits.num_micro_batches, candidates.tallest
    end = waiting.size_class_end(candidates)
    k = end - start
    top = waiting.sums[3:, end] - waiting.sums[3:, start]
    even = np.clip((k * mean - top) / np.maximum(1.0, fluid), 0.0, 1.0)
    best = np.full(len(k), np.inf)
    for share in (np.zeros(len(k)), *even):
        work = top + share * fluid
        others = np.where(k < num, (mean * num - work) / np.maximum(1, num - k), 0.0)
        highest = np.maximum(slowest, np.maximum(work / np.maximum(1, k), others))
        best = np.minimum(best, _wait(waiting, highest - mean))
    return np.where(k > 0, best, _wait(waiting, slowest - mean))


def _holding(
    waiting: WaitingDocuments, candidates: Candidates, tokens: IntArray, delayed: FloatArray
) -> FloatArray:
    """What holding back costs, in typical micro-batch times, shape [num_candidates].

    tokens: that are held. delayed: the sum of their delays if they miss this step too.
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    # Delay, and the area under the time it takes to catch up: with a backlog of B batches, of which
    # a step catches up T - 1, that is B^2 / (2 (T - 1)).
    batch = float(limits.tokens_per_step)
    backlog = tokens / batch
    spare = (limits.step_tokens - limits.tokens_per_step) / batch
    delay = limits.price * (delayed / batch + backlog * backlog / (2 * spare))
    # Shortfall: the work that the tallest held document, if it is above the mean, still lacks as
    # company, the more urgent the older it is. Without it a rare one leaves alone at its last
    # moment. A size class is sorted by age: its first held document is its oldest.
    first, end, tail = candidates.first, candidates.end, candidates.tail
    tallest_held = np.where(first > 0, 0, end)
    is_held = (first > 0) | (tail > end)
    work = np.append(waiting.rows[1, :num_outliers], 0)
    height = np.where(is_held, work[tallest_held], 0)
    # The company: held outliers, tallest first, up to the token cap; then ordinary documents.
    sum_tokens: IntArray = waiting.outlier_sums[0]
    sum_work: IntArray = waiting.outlier_sums[1]
    cap = np.minimum(candidates.held(sum_tokens), limits.step_tokens)
    rest = np.maximum(0, cap - sum_tokens[first])
    stop = np.searchsorted(sum_tokens, sum_tokens[end] + rest, "right") - 1
    stop_below = np.searchsorted(sum_tokens, np.minimum(cap, sum_tokens[first]), "right") - 1
    company = sum_work[stop_below] + np.maximum(0, sum_work[stop] - sum_work[end])
    # At most 1.2 batches of them count. This and the margin of 1.02 below change balance by at most
    # 0.002 and delay by 0.03 steps (LOG, "the way from lengths to loss").
    fill = np.minimum(limits.step_tokens - cap, limits.tokens_per_step * 6 // 5)
    reached = (company + fill * waiting.density) / limits.num_micro_batches
    lacking = np.maximum(0.0, height - reached) / waiting.typical
    age = np.append(waiting.age[:num_outliers], 0)[tallest_held]
    urgency = np.minimum(1.0, (age + 1) / limits.max_delay)
    is_tall = is_held & (height > 1.02 * waiting.typical)
    return delay + np.where(is_tall, URGENCY * urgency * urgency * urgency * lacking, 0.0)


def _packed(waiting: WaitingDocuments, candidate: Candidates) -> tuple[float, IntArray]:
    """What a single candidate costs with its outliers really packed, and the positions it takes."""
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    # (a) Place the outliers as Algorithm 1 does; sums of each micro-batch, [3 + num_ends, N].
    released = waiting.must_leave[:num_outliers].copy()
    released[int(candidate.first[0]) : int(candidate.end[0])] = True
    released[int(candidate.tail[0]) :] = True
    outliers = np.flatnonzero(released)
    length, ends = waiting.rows[0, outliers], waiting.rows[3:, outliers]
    placed, rest = _placed(length, ends, limits)
    micro_batch = np.repeat(np.arange(num), [len(members) for members in placed])
    index = np.concatenate([np.array(members, np.int64) for members in placed])
    loads = np.zeros((num, len(waiting.rows)), np.int64)
    np.add.at(loads, micro_batch, waiting.rows[:, outliers[index]].T)
    loads = loads.T
    # (b) Of the ordinary documents, by descending work, take an interval that fills T or what there
    # is: the lightest ones whose work raises the mean to the slowest micro-batch. Light documents
    # spread evenly, heavy ones do not.
    forced = waiting.ordinary_forced[:, 0]
    room = limits.step_tokens - int(length.sum()) - int(forced[0])
    missing = int(loads[1].max()) * num - int(loads[1].sum()) - int(forced[1])
    first, stop = _lightest_with(waiting, min(room, int(waiting.ordinary[0])), missing)
    fluid = waiting.sums[:, stop] - waiting.sums[:, first] + forced
    must_leave = np.arange(waiting.num_free, len(waiting.order))
    taken = np.concatenate([outliers, np.arange(first, stop), must_leave])
    # (c) Fill up with them, and cost it as in step 4.
    level = water_filled(loads[3:], loads[0], int(fluid[0]), fluid[3:], limits.s_max)
    if rest or level is None:
        return np.inf, taken
    mean = (loads[3:].sum(1) + fluid[3:]) / num
    wait = _wait(waiting, (level.max(1) - mean)[:, None])
    held = waiting.sums[:, -1] - waiting.rows[:, taken].sum(1)
    cost = wait + _holding(waiting, candidate, held[:1], held[2:3].astype(float))
    return float(cost[0]), taken


def _lightest_with(waiting: WaitingDocuments, tokens: int, work: int) -> tuple[int, int]:
    """[first, stop) of at most `tokens` tokens: the lightest ordinary documents with at least
    `work` of work.
    """
    at, end = waiting.num_outliers, waiting.num_free
    before, sum_work = waiting.tokens_before, waiting.sums[1, at : end + 1]
    stop = np.searchsorted(before, before + tokens, "right") - 1
    first = int(np.searchsorted(before, int(before[-1]) - tokens, "left"))
    if int(sum_work[-1] - sum_work[first]) >= work:
        return at + first, end
    enough = np.flatnonzero(sum_work[stop[:first]] - sum_work[:first] >= work)
    first = int(enough[-1]) if enough.size else 0
    return at + first, at + int(stop[first])


def water_filled(
    loads: IntArray, sizes: IntArray, tokens: int, work: IntArray, s_max: int
) -> FloatArray | None:
    """Loads at each end of the prices, shape [num_ends, N], once a fluid is levelled over all.

    Water-filling: each token goes where the load at the worst price, as a part of the step, is
    lowest. Up to level x micro-batch j takes the least of (x - base[p, j]) * slope[p] over prices
    p, and at most its room. A sweep over the levels at which one of these functions bends finds the
    level at which all tokens are placed, in O(N log N).

    Args:
        loads: Work of the micro-batches at each end before, shape [num_ends, N], one end or two.
        sizes: Tokens of the micro-batches, shape [N].
        tokens: Tokens of the fluid.
        work: Work of the fluid at each end, shape [num_ends].
        s_max: Most tokens of a micro-batch.

    Returns:
        None if the fluid does not fit under s_max tokens a micro-batch.
    """
    room = s_max - sizes
    if int(room.sum()) < tokens:
        return None
    # An end at which the fluid costs nothing says nothing about where to pour it.
    counts = np.flatnonzero(work > 0)
    if not tokens or not counts.size:
        return loads.astype(float)
    step = (loads.sum(1) + work)[counts]
    slope = step / (work[counts] / tokens)
    base = loads[counts] / step[:, None]
    # Where each micro-batch's function bends, and by how many tokens a level: it begins at the
    # price at which the load is highest, goes on at a flatter one, and ends where no room is left.
    bends: list[tuple[float, float]] = []
    for own, most in zip(base.T.tolist(), room.tolist(), strict=True):
        lines = list(zip(own, slope.tolist(), strict=True))
        start, rate = max(lines)
        bends.append((start, rate))
        for other, flatter in lines:
            if flatter < rate:
                crossing = (start * rate - other * flatter) / (rate - flatter)
                if (crossing - start) * rate < most:
                    bends.append((crossing, flatter - rate))
                    start, rate = other, flatter
        bends.append((start + most / rate, -rate))
    # Raise the level from bend to bend until all tokens are placed.
    bends.sort()
    level, rate, left = bends[0][0], 0.0, float(tokens)
    for at, change in bends:
        takes = (at - level) * rate
        if takes >= left:
            level += left / rate
            break
        left, level, rate = left - takes, at, rate + change
    taken = np.clip(((level - base) * slope[:, None]).min(0), 0.0, room)
    return loads + taken * (work / tokens)[:, None]


def fitting(length: IntArray, tokens: int) -> IntArray:
    """Positions, ascending, of the documents (lengths of shape [n]) that fit `tokens` together when
    each in turn is taken if it still fits.
    """
    out: list[IntArray] = [np.zeros(0, np.int64)]
    rows = np.flatnonzero(length <= tokens)
    while rows.size:
        sums = np.cumsum(length[rows])
        num = int(np.searchsorted(sums, tokens, "right"))
        out.append(rows[:num])
        tokens -= int(sums[num - 1])
        rows = rows[num:]
        rows = rows[length[rows] <= tokens]
    return np.concatenate(out)


def _placed(
    length: IntArray, ends: IntArray, limits: StepLimits, *, exchange: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Place documents by Algorithm 1 in the given order: indices by micro-batch, and what S_max
    leaves over. exchange: improve the result by `refine`.
    """
    lengths, works = length.tolist(), comparable(ends)
    num, s_max = limits.num_micro_batches, limits.s_max
    first, second = works[0], works[-1]
    rows, rest = place(lengths, first, second=second, num_micro_batches=num, s_max=s_max)
    if exchange:
        rows = refine(rows, lengths, first, second=second, s_max=s_max)
    return rows, rest


# -- Step 6: exchanges of documents after placement ------------------------------------------------

Exchange = tuple[int, int, int, int | None]
"""(new maximum of the two, fast micro-batch, document for it, document that comes back or None)."""

# These three bound the time of a round and the number of rounds. Halved and doubled none changes
# the imbalance of `bounded` by more than 0.0001 (fitted stream, ProLong, library, N = 4).
MOST_OTHERS = 8
"""Fastest micro-batches with which the slowest one tries exchanges."""
MOST_SWAPPED = 16
"""Documents of most work in the slowest micro-batch that are tried for a swap."""
WORTHWHILE = 2e-4
"""An exchange that gains less, in parts of the mean, is the last one."""


def refine(
    rows: list[list[int]],
    lengths: list[int],
    work: list[int],
    *,
    s_max: int,
    second: list[int] | None = None,
    max_rounds: int = 32,
    good_enough: float = 1.0005,
) -> list[list[int]]:
    """Moves and swaps single documents until the slowest micro-batch cannot be lowered.

    Between the slowest micro-batch and each of the fastest, the ideal exchange moves half of the
    difference; documents of about that work are moved, or swapped with the nearest to ideal there.
    The exchange with the lowest maximum of the two is made while it lowers it and S_max holds. With
    two prices a micro-batch's load is the larger of its two, and differences are taken at the price
    that makes the slowest one slow. Cost: at most `max_rounds` rounds of some 300 exchanges, 0.2 ms
    each.

    Returns `rows[j]` = documents of micro-batch j. lengths, work: tokens and ns by document.

    second: work at another price, in units of the same sum (`comparable`). good_enough: stop
    once slowest / mean is at most that.
    """
    packing = _Packing.of(rows, lengths, [work] if second is None else [work, second])
    mean = max(sum(loads) for loads in packing.loads) / len(rows)
    for rounds in range(max_rounds):
        slowest = packing.slowest
        top = slowest.index(max(slowest))
        if slowest[top] <= good_enough * mean or len(packing.rows[top]) < 2:
            break
        found = packing.best_exchange(top, s_max)
        if found is None or (slowest[top] - found[0] < WORTHWHILE * mean and rounds):
            break
        packing.exchange(top, *found[1:])
    return packing.rows


@dataclass(frozen=True, slots=True)
class _Packing:
    """Documents of each micro-batch, and micro-batches' tokens (sizes).

    works: of each document, by price. loads: of each micro-batch, by price.
    """

    rows: list[list[int]]
    lengths: list[int]
    works: list[list[int]]
    loads: list[list[int]]
    sizes: list[int]

    @classmethod
    def of(cls, rows: list[list[int]], lengths: list[int], works: list[list[int]]) -> "_Packing":
        loads = [[sum(map(work.__getitem__, members)) for members in rows] for work in works]
        sizes = [sum(map(lengths.__getitem__, members)) for members in rows]
        return cls([list(members) for members in rows], lengths, works, loads, sizes)

    @property
    def slowest(self) -> list[int]:
        """Each micro-batch's load at its worst price."""
        return [max(loads) for loads in zip(*self.loads, strict=True)]

    def best_exchange(self, top: int, s_max: int) -> Exchange | None:
        """The exchange with `top`, the slowest, that lowers the maximum most; None if none does."""
        price = max(range(len(self.loads)), key=lambda p: self.loads[p][top])
        rows, loads, work = self.rows, self.loads[price], self.works[price]
        best: Exchange | None = None
        lowest = loads[top]
        mine = sorted(rows[top], key=work.__getitem__)
        my_heights = [work[d] for d in mine]
        fastest = sorted((j for j in range(len(rows)) if j != top), key=lambda j: (loads[j], j))
        for j in fastest[:MOST_OTHERS]:
            there = sorted(rows[j], key=work.__getitem__)
            heights = [work[e] for e in there]
            half = (loads[top] - loads[j]) // 2
            at = bisect_left(my_heights, half)
            tried: list[tuple[int, int | None]] = [(d, None) for d in mine[max(0, at - 1) : at + 1]]
            for d in mine[-MOST_SWAPPED:]:
                at = bisect_left(heights, work[d] - half)
                tried += [(d, e) for e in there[max(0, at - 1) : at + 1]]
            for d, e in tried:
                highest = self._highest(top, j, d, e)
                if highest < lowest:
                    tokens = self.lengths[d] - (self.lengths[e] if e is not None else 0)
                    if self.sizes[j] + tokens <= s_max and self.sizes[top] - tokens <= s_max:
                        lowest, best = highest, (highest, j, d, e)
        return best

    def _highest(self, top: int, j: int, d: int, e: int | None) -> int:
        """The larger load of micro-batches `top` and j, at any price, after an exchange."""
        highest = 0
        for work, loads in zip(self.works, self.loads, strict=True):
            moved = work[d] - (work[e] if e is not None else 0)
            highest = max(highest, loads[top] - moved, loads[j] + moved)
        return highest

    def exchange(self, top: int, j: int, d: int, e: int | None) -> None:
        """Document d goes from micro-batch `top` to j; e, if there is one, comes back."""
        for document, source, target in ((d, top, j), (e, j, top)):
            if document is not None:
                self.rows[source].remove(document)
                self.rows[target].append(document)
                for work, loads in zip(self.works, self.loads, strict=True):
                    loads[source] -= work[document]
                    loads[target] += work[document]
                self.sizes[source] -= self.lengths[document]
                self.sizes[target] += self.lengths[document]
