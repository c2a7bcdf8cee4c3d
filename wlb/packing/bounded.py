"""Policy `bounded`: long documents wait for balanced steps, within bounds on delay and memory.

Each step trains some of the waiting documents. Algorithm 1 releases long documents when a queue has
N of them. This policy instead chooses the documents whose step costs least, by predicted times:

1. Sort the documents by work. Those with at least `OUTLIER` times the work of a typical micro-batch
   are outliers, and the policy chooses which of them to release. Of all others (ordinary documents)
   it only chooses how many tokens to train. Outliers of nearly equal work form a size class, in
   which the oldest comes first.
2. Documents that have waited `max_delay` steps must leave, oldest first, as far as the caps allow.
3. List the candidates. A candidate releases an interval of the sorted outliers, and all outliers
   from a second position on:

       tallest                                     smallest
       | held | first ... end | held | tail ... last |
                released                released

4. Bound from below what each candidate costs: the time lost on its slowest micro-batch, and a price
   for the delay of what it holds back.
5. Pack the `NUM_PACKED` candidates with the lowest bounds: place their outliers, add ordinary
   documents as a divisible fluid (water-filling), and take the candidate that then costs least.
6. Place the chosen documents by Algorithm 1, then exchange single documents (`refine`).

Guarantees: at most S_max tokens a micro-batch, at most `step_tokens` a step (in the flush too), and
at most `most_held_tokens` tokens that wait after a global batch. Documents leave within `max_delay`
steps if the caps permit; otherwise they are counted as overdue. All hosts compute the same plan,
because only integers and single IEEE operations are used.
Cost: O(n log n) in the number of waiting documents; 0.8 ms for 200, 0.1 s for 51,000.
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

# Each constant's docstring says what it trades (LOG is experiments/LOG.md). The table shows how
# results change if one constant is halved, doubled or set to another value. Each cell has the
# imbalance and the mean delay in steps, over 400 steps of each stream of documents, with N = 4,
# T 1.5, S_max 2, D 10 and a single price.
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
"""The price of holding a global batch back for one step is this constant over sqrt(N), in times of
a typical micro-batch. A higher price gives less delay and more imbalance. It falls with N because
large N always offer steps with some imbalance, which a constant price would accept (LOG, "bounded:
what lost": imbalance 1.013 instead of 1.008 at N = 16). The second value is used with a price
range, where good combinations of documents are rarer (LOG, "balance over a range of prices")."""
CURVATURE = 0.1
"""The cost of lost time x, in times of a typical micro-batch, is x + x^2 / CURVATURE. A smaller
value avoids the worst steps at the price of delay. The square makes one step of imbalance 1.10
dearer than ten of 1.01 (LOG, "bounded: what lost": it lowers the library's 95th percentile from
1.10 to 1.02)."""
URGENCY = 2.0
"""Weight of the work that is still missing to balance a long document that is held back. A higher
value makes other long documents wait for it (LOG, "bounded: what lost": imbalance 1.008 on the
library, 1.021 without this term)."""
LEAST = 0.35
"""Least tokens of a step, in global batches, if so many wait and fit. Holding nearly everything
back loses no time in this step, so without the constant, nearly empty steps and full steps would
alternate (LOG, "Reviews of bounded": imbalance 1.13 instead of 1.95 for uniform lengths)."""
OUTLIER = 0.2
"""Work of the smallest outlier, in typical micro-batches. A smaller value makes more documents
outliers, and so more candidates."""
CLASS = 0.97
"""A size class has the outliers with at least this share of the work of its tallest one. Candidates
begin at the start of a class, so their number does not grow with the number of documents. Finer
classes give more candidates and take more time. At N = 64 a step of the fitted stream has 2,178
candidates; at 0.985 and 0.94 it has 3,075 and 1,151, with the same imbalance."""
NUM_PACKED = 8
"""Most candidates that are packed. More find better steps where bounds are loose, but take time.
With a single price the lowest bound is mostly exact (1.02 candidates are packed in a step at N =
4). With prices from 0.7 to 1.6 at N = 16, packing 4, 8 or 16 candidates gives imbalances of 1.0108,
1.0107 and 1.0089 on the fitted stream. Without a limit the imbalance is 1.0060 with 0.06 steps more
delay, and 37 candidates are packed in a step (552 at N = 64)."""
ONE_BY_ONE = 8
"""Intervals of up to this many outliers are all candidates. Of longer ones only those are whose
number of outliers is a power of two or a multiple of an eighth of N. 4 instead of 8 changes no
imbalance at N = 4, 16 and 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Caps on a step, and the price of holding documents back."""

    num_micro_batches: int  # N, over all pipelines
    tokens_per_step: int  # tokens of an average global batch, N x C
    s_max: int  # most tokens of a micro-batch
    step_tokens: int  # T, most tokens of the step
    max_delay: int  # D, steps that a document may wait
    # Price of holding a global batch back for one step, in times of a typical micro-batch.
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPacker(PolicyPacker):
    """Packs so that steps are balanced, and lets long documents wait for at most `max_delay` steps.

    Its carry has the waiting documents in slot 0, in arrival order. The number of steps that a
    global batch makes:

    - One, as a rule.
    - None while fewer documents than micro-batches wait, or less than half a global batch of
      tokens (less than a whole one if the batch brought no document).
    - Several while more than `most_held_tokens` wait. A document of many windows arrives at once,
      and the batches for which its tokens count bring nothing.
    - The last batch of the data is packed together with everything that waits, so that nothing is
      left to flush.
    """

    policy: ClassVar[str] = "bounded"
    slots: ClassVar[CarrySlots] = CarrySlots.ONE
    batches_wait: ClassVar[bool] = False
    s_max: int  # most tokens of a micro-batch, at least the context window
    step_tokens: int | None = None  # T, most tokens of a step, above N x C; None = N x s_max
    max_delay: int = 10  # D, steps that a document may wait
    # Price of holding a global batch back for one step, in times of a typical micro-batch. None
    # means DELAY_PRICE / sqrt(N), or DELAY_PRICE_IN_RANGE / sqrt(N) with a price range.
    delay_price: float | None = None
    # Work is balanced at the worst price of attention in this range.
    price_range: PriceRange = ONE_PRICE

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
        """The caps on a step and the price of delay, with defaults filled in."""
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
        """Most tokens that may wait after a global batch.

        They are those of max_delay / 2 global batches, but at least of two. If more wait, a batch
        makes several steps.
        """
        return max(2, self.max_delay // 2) * self.options.tokens_per_step

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` with what waits, and return the steps that can be made and the new carry."""
        limit = min(self.s_max, self.limits.step_tokens)
        check_fits(carry.pieces, limit, name="s_max or step_tokens")
        step = carry.next_step
        waiting = Pieces.concat(carry.pieces, self.options.arrived(batch, step))
        if batch is None or batch.is_last:
            last = self._flushed(waiting, step)
            if batch is not None and len(waiting):
                # Two ways to end the data: flush everything together, so that the last batch helps
                # to balance long documents, or make a usual step first and flush the rest. Take the
                # one whose steps are faster.
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
        """Return the plans of as many steps as it takes until nothing waits."""
        plans: list[PackingPlan] = []
        while len(waiting):
            plan, waiting = self._step(waiting, step + len(plans), flush=True)
            plans.append(plan)
        return tuple(plans)

    def _step(self, waiting: Pieces, step: int, *, flush: bool) -> tuple[PackingPlan, Pieces]:
        """Return the next step's plan, and the pieces that it holds back."""
        length, limits = waiting.length, self.limits
        work = self.options.workloads(waiting)
        ends = self.price_range.ends(self.options, waiting, work)
        age = step - waiting.arrival_step
        is_due = age >= self.max_delay
        if flush:
            # No more documents will come, so waiting longer helps nothing: overdue documents leave
            # first, then the longest ones together.
            order = np.lexsort((-work, ~is_due))
            order = np.sort(order[fitting(length[order], limits.step_tokens)])
        else:
            order = np.flatnonzero(choose(length, work, age, limits, ends=ends))
        order = order[np.argsort(-work[order], kind="stable")]
        rows, rest = _placed(length[order], ends[:, order], limits, exchange=True)
        if is_due[order[rest]].any():
            # S_max left out a document that must leave. Place such documents first, which costs
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
    """Choose which of the waiting documents the next step trains (steps 1 to 5 above).

    As an example, take six documents and N = 2 micro-batches of 100 tokens. In a document of 100
    tokens attention takes 100 / 60 times as long as linear work, as in the paper's 7B model at its
    context window.

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

    Step 1: a typical micro-batch has the average work of 100 of the 286 tokens, which is 14,083.
    The documents of 100, 96 and 60 tokens are outliers, each in a size class by itself.
    Step 2: no document has waited 10 steps.
    Step 3: the released outliers can be 100, 96, 60 | 100, 96 | 100, 60 | 100 | 96, 60 | 96 | 60.
    Releasing none would leave a step of 30 tokens, which is less than 0.35 x 200.
    Step 4: if all three are released, two of them must share a micro-batch, whose work is at least
    0.97 x (14,976 + 7,200) = 21,511. The mean would be 20,138, so the time lost is that of 0.098
    typical micro-batches and costs 0.098 + 0.098^2 / 0.1 = 0.193. If the document of 60 tokens is
    held back, the other two are balanced with the help of the 30 ordinary tokens, and the delay
    costs 0.1 x (60 / 200 + 0.3^2 / (2 x 0.5)) = 0.039.
    Step 5 packs this candidate first: the 30 ordinary tokens raise both micro-batches to 16,538.
    The cost is still 0.039, which is below the bounds of all other candidates.

    Args:
        length: Tokens of each waiting document, shape [n], n >= 1.
        work: Predicted time of each document in ns, shape [n].
        age: Steps that each document has waited, shape [n].
        limits: Caps on the step, and the price of delay.
        ends: Work at the ends of the price range, shape [num_ends, n]. Defaults to `work`.

    Returns:
        A mask of the chosen documents, shape [n].
    """
    waiting = WaitingDocuments(length, work, age, limits, work[None] if ends is None else ends)
    candidates = _candidates(waiting)
    bound = _bounds(waiting, candidates)
    least, best = np.inf, None
    # Branch and bound: try candidates by ascending bound until no bound is below the best cost.
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
    """The waiting documents in the order of step 1, with sums over any interval of them.

    Outliers come first, then ordinary documents by descending work. Ordinary documents that must
    leave come last.

    `rows` has shape [3 + num_ends, n]. Its rows are tokens, work, tokens times the delay that they
    have if they miss this step too, and work at each end of the price range. `sums` are the running
    sums of the rows, shape [3 + num_ends, n + 1], so that the difference of two columns is the sum
    over an interval of documents.
    """

    def __init__(
        self, length: IntArray, work: IntArray, age: IntArray, limits: StepLimits, ends: IntArray
    ) -> None:
        self.limits = limits
        # The work of a typical micro-batch is the average work of as many waiting tokens as a
        # micro-batch has on average.
        total = max(1, int(length.sum()))
        per_micro_batch = limits.tokens_per_step / limits.num_micro_batches
        self.typical = max(1.0, int(work.sum()) / total * per_micro_batch)
        of_ends = [max(1.0, int(x.sum()) / total * per_micro_batch) for x in ends]
        self.typical_ends: FloatArray = np.array(of_ends)[:, None]
        # 1. Sort outliers by size class, the oldest of a class first, and the others by work.
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
        # 2. Find the documents that must leave: the oldest first, as many as T and S_max allow. A
        # document that fits no micro-batch is dropped, so that it uses up no part of T.
        due = np.flatnonzero(age[order] >= limits.max_delay)
        due = order[due[np.argsort(-age[order[due]], kind="stable")]]
        due = due[fitting(length[due], limits.step_tokens)]
        by_length = due[np.argsort(-length[due], kind="stable")]
        if _placed(length[by_length], ends[:, by_length], limits)[1]:
            due = np.delete(due, _placed(length[due], ends[:, due], limits)[1])
        must_leave = np.zeros(len(order), bool)
        must_leave[due] = True
        # A stable sort by the mask puts ordinary documents that must leave last.
        others = order[num:]
        others = others[np.argsort(must_leave[others], kind="stable")]
        self.order = order = np.concatenate([order[:num], others])
        self.must_leave = must_leave[order]
        self.num_free = num + int((~must_leave[others]).sum())
        self.length, self.age = length[order], age[order]
        self.rows = np.stack([length, work, length * (age + 1), *ends])[:, order]
        self.sums = np.stack([offsets_of(row) for row in self.rows])
        self.outlier_sums = self.sums[:, : num + 1]
        forced = self.rows[:, :num] * self.must_leave[:num]
        self.must_leave_sums = np.stack([offsets_of(row) for row in forced])
        # 3. Sum the ordinary documents: those that must leave (`ordinary_forced`), and all others
        # (`ordinary`). Of the others also: running sums of tokens, the mean delay of a token if all
        # of them miss this step, and work per token.
        self.ordinary_forced = (self.sums[:, -1] - self.sums[:, self.num_free])[:, None]
        self.ordinary: IntArray = self.sums[:, self.num_free] - self.sums[:, num]
        self.tokens_before: IntArray = self.sums[0, num : self.num_free + 1] - self.sums[0, num]
        tokens, work_left, delayed = map(int, self.ordinary[:3])
        self.ordinary_delay = delayed / tokens if tokens else 0.0
        per_token = self.typical / limits.tokens_per_step * limits.num_micro_batches
        self.density = work_left / tokens if tokens else per_token

    def size_class_end(self, candidates: "Candidates") -> IntArray:
        """Return, for each candidate, where the released part of its tallest size class ends.

        At most N outliers count, since each is assumed to have a micro-batch to itself. The result
        has shape [num_candidates].
        """
        ends = np.append(self.class_starts[1:], [self.num_outliers, self.num_outliers])
        size_class = np.searchsorted(self.class_starts, candidates.tallest, "right") - 1
        most = candidates.tallest + self.limits.num_micro_batches
        return np.minimum(np.minimum(candidates.first_stop, ends[size_class]), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates: each releases outliers [first, end) and all outliers from `tail` on.

    Positions refer to the order of `WaitingDocuments`. All arrays have shape [num_candidates].
    """

    first: IntArray  # first outlier of the interval
    end: IntArray  # end of the interval
    tail: IntArray  # the second position
    num_outliers: int  # number of waiting outliers

    @property
    def tallest(self) -> IntArray:
        """Position of the tallest released outlier, or num_outliers if none is released."""
        return np.where(self.end > self.first, self.first, self.tail)

    @property
    def first_stop(self) -> IntArray:
        """End of the run of released outliers that begins with the tallest one."""
        return np.where(self.end > self.first, self.end, self.num_outliers)

    def released(self, running: IntArray) -> IntArray:
        """Sum a value over the outliers that each candidate releases.

        Args:
            running: Running sums of the value, shape [..., num_outliers + 1].

        Returns:
            Sums, shape [..., num_candidates].
        """
        before_tail = running[..., self.end] - running[..., self.first]
        return before_tail + running[..., -1:] - running[..., self.tail]

    def held(self, running: IntArray) -> IntArray:
        """Sum a value over the outliers that each candidate holds back, as `released` does."""
        return running[..., self.first] + running[..., self.tail] - running[..., self.end]

    def at(self, index: IntLike | BoolArray) -> "Candidates":
        """Select candidates by indices or by a mask."""
        first, end, tail = self.first[index], self.end[index], self.tail[index]
        return Candidates(first=first, end=end, tail=tail, num_outliers=self.num_outliers)


def _candidates(waiting: WaitingDocuments) -> Candidates:
    """List all candidates that fit the token cap, with `first` and `tail` at starts of classes."""
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    starts = np.append(waiting.class_starts, num_outliers)
    # The interval may have any number of outliers up to ONE_BY_ONE, then powers of two and
    # multiples of an eighth of N.
    shortest = int(waiting.length[:num_outliers].min(initial=1 << 62))
    most = int(limits.step_tokens / max(1, shortest))
    counts = np.arange(min(num_outliers, most, ONE_BY_ONE) + 1)
    if num_outliers > ONE_BY_ONE:
        eighths = np.arange(1, 8 * max(1, most // num + 1)) * num // 8
        powers = 2 ** np.arange(4, num_outliers.bit_length())
        counts = np.unique(np.concatenate([counts, powers, eighths]))
    first, count, tail = (a.ravel() for a in np.meshgrid(starts, counts, starts, indexing="ij"))
    end = first + count
    # A count of 0 encodes "release everything from `first` on", with tail = first. Every other
    # candidate must hold something back between its two parts, so that none is listed twice.
    is_one = np.where(count > 0, (end < tail) & (first < num_outliers), tail == first)
    candidates = Candidates(first=first, end=end, tail=tail, num_outliers=num_outliers).at(is_one)
    taken = candidates.released(waiting.outlier_sums[0]) + waiting.ordinary_forced[0]
    taken += candidates.held(waiting.must_leave_sums[0])
    # With the ordinary documents that fit, the step must reach LEAST global batches, unless no
    # candidate can.
    fits = taken <= limits.step_tokens
    possible = np.minimum(taken + waiting.ordinary[0], limits.step_tokens)
    least = min(LEAST * limits.tokens_per_step, int(possible[fits].max()))
    return candidates.at(fits & (possible >= max(1.0, least)))


def _bounds(waiting: WaitingDocuments, candidates: Candidates) -> FloatArray:
    """Bound from below what each candidate costs.

    Arrays of work, such as `mean` and `slowest`, have shape [num_ends, num_candidates], one row for
    each end of the price range.

    Returns:
        Lower bounds in times of a typical micro-batch, shape [num_candidates].
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    first, end, tail = candidates.first, candidates.end, candidates.tail
    # (a) Sum what leaves in any case, and find the tallest document of it. A size class is sorted
    # by age, so the tallest is a maximum over the released outliers rather than the first one.
    taken = candidates.released(waiting.outlier_sums) + candidates.held(waiting.must_leave_sums)
    taken += waiting.ordinary_forced
    outliers = np.append(waiting.rows[:, :num_outliers], np.zeros((len(taken), 1), np.int64), 1)
    highest = np.maximum.accumulate(outliers[:, ::-1], axis=1)[:, ::-1]
    forced = (outliers[:, :num_outliers] * waiting.must_leave[:num_outliers]).max(1, initial=0)
    height = np.maximum(highest[:, candidates.tallest], forced[:, None])
    # (b) Choose the ordinary documents that fit. If the lightest ones have enough work to raise the
    # mean to the tallest document, take them. Otherwise take a part of the heaviest ones.
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
    # (c) The slowest micro-batch has at least the mean work, and at least the tallest document's.
    # Two of N + 1 outliers share a micro-batch, and three of 2N + 1. Inside a size class an outlier
    # may be lighter than the order suggests, by a factor of CLASS.
    count = end - first

    def nth(n: int) -> IntArray:
        """Return the work of each candidate's n-th released outlier; 0 if it releases fewer."""
        row = np.where(n < count, first + n, tail + n - count)
        return outliers[3:, np.minimum(row, num_outliers)]

    two = np.where(nth(num) > 0, nth(num) + nth(num - 1), 0)
    three = np.where(nth(2 * num) > 0, nth(2 * num) + nth(2 * num - 1) + nth(2 * num - 2), 0)
    slowest = np.maximum(np.maximum(mean, height[3:]), CLASS * np.maximum(two, three))
    # (d) Each of the tallest documents has a micro-batch to itself. What does not fit into the
    # other micro-batches goes on top of them.
    all_tokens = taken[0] + tokens
    if len(mean) == 1:
        crowded = _crowded(waiting, candidates, all_tokens, num * mean[0])
        wait = _wait(waiting, np.maximum(slowest, crowded) - mean)
    else:
        wait = _skewed(waiting, candidates, slowest, mean, fluid)
    # (e) Sum what is held back: outliers exactly, ordinary documents at their mean delay.
    held = (waiting.outlier_sums[:, -1:] + waiting.ordinary_forced - taken)[[0, 2]]
    left = waiting.ordinary[0] - tokens
    delayed = held[1] + left * waiting.ordinary_delay
    return wait + _holding(waiting, candidates, held[0] + left, delayed)


def _wait(waiting: WaitingDocuments, over: FloatArray) -> FloatArray:
    """Return the cost of the time lost on the slowest micro-batch, shape [n].

    The cost is x + x^2 / CURVATURE, where x is the time lost at the worse end of the price range,
    in times of a typical micro-batch. The square makes one step of imbalance 1.10 dearer than ten
    of 1.01.

    Args:
        waiting: The waiting documents.
        over: Slowest micro-batch minus mean at each end of the price range, shape [num_ends, n].
    """
    x = (over / waiting.typical_ends).max(0)
    return x + x * x / CURVATURE


def _crowded(
    waiting: WaitingDocuments, candidates: Candidates, tokens: IntArray, work: FloatArray
) -> FloatArray:
    """Bound the slowest micro-batch's work from below where S_max leaves little room.

    The k tallest outliers have a micro-batch each. What does not fit into the other N - k
    micro-batches under S_max is added to these k. The bound is the larger one of two choices of k:
    the outliers of the tallest size class, and N.

    Args:
        waiting: The waiting documents.
        candidates: The candidates.
        tokens: Tokens of each candidate's step, shape [num_candidates].
        work: Work of each candidate's step, shape [num_candidates].

    Returns:
        Lower bounds on work, shape [num_candidates].
    """
    num, s_max, first = waiting.limits.num_micro_batches, waiting.limits.s_max, candidates.tallest
    out = np.zeros(len(tokens))
    tallest_n = np.minimum(candidates.first_stop, first + num)
    for end in (tallest_n, waiting.size_class_end(candidates)):
        k = end - first
        top = waiting.sums[:2, end] - waiting.sums[:2, first]
        rest = tokens - top[0]
        over = np.maximum(0, rest - (num - k) * s_max)
        # Divide before multiplying, because tokens times ns may not fit 64 bits.
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
    """Bound the cost of lost time from below if no packing is balanced at both ends of the prices.

    The k tallest documents have a micro-batch each. With few ordinary documents on top, these
    micro-batches are the slowest where attention is dear. With many on top, they are the slowest
    where attention is cheap. The function tries the shares of ordinary documents that make these
    micro-batches average at one of the ends, and a share of zero, and takes the best.

    Args:
        waiting: The waiting documents.
        candidates: The candidates.
        slowest: Lower bounds on the slowest micro-batch, shape [num_ends, num_candidates].
        mean: Mean work of a micro-batch, shape [num_ends, num_candidates].
        fluid: Work of the ordinary documents, shape [num_ends, num_candidates].

    Returns:
        Lower bounds on the cost, as of `_wait`, shape [num_candidates].
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
    """Return what it costs to hold documents back, in times of a typical micro-batch.

    Args:
        waiting: The waiting documents.
        candidates: The candidates.
        tokens: Tokens that each candidate holds back, shape [num_candidates].
        delayed: Sum of the delays of these tokens if they miss this step too, [num_candidates].
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    # (a) The delay so far, and the delay until the backlog is made up for. A step can make up for
    # T - 1 global batches, so a backlog of B batches shrinks linearly to zero in B / (T - 1) steps,
    # and the area under that line is B^2 / (2 (T - 1)).
    batch = float(limits.tokens_per_step)
    backlog = tokens / batch
    spare = (limits.step_tokens - limits.tokens_per_step) / batch
    delay = limits.price * (delayed / batch + backlog * backlog / (2 * spare))
    # (b) The shortfall. Consider the step in which the tallest held document will leave. If all
    # that is held now cannot raise the mean of that step to the document's work, it will be
    # unbalanced. The missing work counts more the older the document is. Without this term a rare
    # long document would leave alone at the last moment. A size class is sorted by age, so its
    # first held document is its oldest.
    first, end, tail = candidates.first, candidates.end, candidates.tail
    tallest_held = np.where(first > 0, 0, end)
    is_held = (first > 0) | (tail > end)
    work = np.append(waiting.rows[1, :num_outliers], 0)
    height = np.where(is_held, work[tallest_held], 0)
    # The work that can be trained with it: held outliers, tallest first, up to the token cap, then
    # ordinary documents.
    sum_tokens: IntArray = waiting.outlier_sums[0]
    sum_work: IntArray = waiting.outlier_sums[1]
    cap = np.minimum(candidates.held(sum_tokens), limits.step_tokens)
    rest = np.maximum(0, cap - sum_tokens[first])
    stop = np.searchsorted(sum_tokens, sum_tokens[end] + rest, "right") - 1
    stop_below = np.searchsorted(sum_tokens, np.minimum(cap, sum_tokens[first]), "right") - 1
    company = sum_work[stop_below] + np.maximum(0, sum_work[stop] - sum_work[end])
    # At most 1.2 global batches of ordinary documents count. This and the margin of 1.02 below
    # change imbalance by at most 0.002 and delay by 0.03 steps (LOG, "the way from lengths to
    # loss").
    fill = np.minimum(limits.step_tokens - cap, limits.tokens_per_step * 6 // 5)
    reached = (company + fill * waiting.density) / limits.num_micro_batches
    lacking = np.maximum(0.0, height - reached) / waiting.typical
    age = np.append(waiting.age[:num_outliers], 0)[tallest_held]
    urgency = np.minimum(1.0, (age + 1) / limits.max_delay)
    is_tall = is_held & (height > 1.02 * waiting.typical)
    return delay + np.where(is_tall, URGENCY * urgency * urgency * urgency * lacking, 0.0)


def _packed(waiting: WaitingDocuments, candidate: Candidates) -> tuple[float, IntArray]:
    """Pack one candidate's outliers, and return its cost and the positions that it takes."""
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    # (a) Place the outliers by Algorithm 1. `loads` sums `waiting.rows` over each micro-batch,
    # shape [3 + num_ends, N].
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
    # (b) Take an interval of the ordinary documents, sorted by descending work, that fills T or
    # takes all of them: the lightest interval whose work raises the mean to the slowest
    # micro-batch. Light documents can be spread evenly, heavy ones cannot.
    forced = waiting.ordinary_forced[:, 0]
    room = limits.step_tokens - int(length.sum()) - int(forced[0])
    missing = int(loads[1].max()) * num - int(loads[1].sum()) - int(forced[1])
    first, stop = _lightest_with(waiting, min(room, int(waiting.ordinary[0])), missing)
    fluid = waiting.sums[:, stop] - waiting.sums[:, first] + forced
    must_leave = np.arange(waiting.num_free, len(waiting.order))
    taken = np.concatenate([outliers, np.arange(first, stop), must_leave])
    # (c) Spread them over the micro-batches, and compute the cost as in step 4.
    level = water_filled(loads[3:], loads[0], int(fluid[0]), fluid[3:], limits.s_max)
    if rest or level is None:
        return np.inf, taken
    mean = (loads[3:].sum(1) + fluid[3:]) / num
    wait = _wait(waiting, (level.max(1) - mean)[:, None])
    held = waiting.sums[:, -1] - waiting.rows[:, taken].sum(1)
    cost = wait + _holding(waiting, candidate, held[:1], held[2:3].astype(float))
    return float(cost[0]), taken


def _lightest_with(waiting: WaitingDocuments, tokens: int, work: int) -> tuple[int, int]:
    """Find the lightest interval of ordinary documents that has enough work.

    Args:
        waiting: The waiting documents.
        tokens: Most tokens of the interval.
        work: Work that the interval should have. If none has so much, the heaviest is taken.

    Returns:
        The interval [first, stop) of positions.
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
    """Spread short documents over micro-batches like water, and return the loads afterwards.

    The documents count as a fluid that divides freely. Each token goes to the micro-batch whose
    load, as a share of the step's work at the worst price, is lowest:

        load                            ___________________   level x
             |XXXX|~~~~|~~~~|~~~~|
             |XXXX|XXXX|~~~~|~~~~|      X: placed outliers
             |XXXX|XXXX|XXXX|~~~~|      ~: fluid

    Up to level x, micro-batch j takes min over prices p of (x - base[p, j]) * slope[p] tokens, and
    at most its room. These functions are piecewise linear. A sweep over the levels at which one of
    them bends finds the level at which all tokens are placed, in O(N log N).

    Args:
        loads: Work of the micro-batches before, shape [num_ends, N], with one price or two.
        sizes: Tokens of the micro-batches before, shape [N].
        tokens: Tokens of the fluid.
        work: Work of the fluid at each price, shape [num_ends].
        s_max: Most tokens of a micro-batch.

    Returns:
        Work of the micro-batches at each price, shape [num_ends, N]. None if the fluid does not fit
        under `s_max`.
    """
    room = s_max - sizes
    if int(room.sum()) < tokens:
        return None
    # A price at which the fluid has no work does not matter for where it goes.
    counts = np.flatnonzero(work > 0)
    if not tokens or not counts.size:
        return loads.astype(float)
    step = (loads.sum(1) + work)[counts]
    slope = step / (work[counts] / tokens)
    base = loads[counts] / step[:, None]
    # List where each micro-batch's function bends, and by how much its slope (tokens per level)
    # changes there. It begins at the price at which the load is highest, continues at a price with
    # a flatter slope, and ends where no room is left.
    bends: list[tuple[float, float]] = []
    for load_shares, most in zip(base.T.tolist(), room.tolist(), strict=True):
        lines = list(zip(load_shares, slope.tolist(), strict=True))
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
    """Take each document in turn if it still fits, and return the positions of those taken.

    Args:
        length: Tokens of each document, shape [n].
        tokens: Most tokens of all documents together.

    Returns:
        Ascending positions.
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
    """Place documents by Algorithm 1 in the given order.

    Args:
        length: Tokens of each document, shape [n].
        ends: Work at each end of the price range, shape [num_ends, n].
        limits: Caps on the step.
        exchange: Whether `refine` improves the result.

    Returns:
        The documents of each micro-batch, and the documents that S_max leaves over.
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
"""(larger load of the two micro-batches afterwards, the fast micro-batch, the document that moves
to it, the document that comes back or None)."""

# These three constants bound the time and number of rounds. Halving or doubling one of them changes
# the imbalance of `bounded` by at most 0.0001 (fitted stream, ProLong, library, N = 4).
MOST_OTHERS = 8
"""The slowest micro-batch tries exchanges with this many of the fastest ones."""
MOST_SWAPPED = 16
"""This many documents of the slowest micro-batch, those with most work, are tried for a swap."""
WORTHWHILE = 2e-4
"""Exchanges end when one gains less than this share of the mean load."""


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
    """Move and swap single documents until the slowest micro-batch cannot be made faster.

    The ideal exchange between the slowest micro-batch and a fast one moves half of their
    difference. So each round tries to move a document of about that work, or to swap two documents
    with about that difference. It makes the exchange after which the larger of the two loads is
    lowest, if that is an improvement and S_max permits it.

    With two prices, a micro-batch's load is the larger of its two, and differences are taken at the
    price at which the slowest one is slowest. Cost: at most `max_rounds` rounds of 0.2 ms, with
    about 300 exchanges tried in each.

    Args:
        rows: Documents of each micro-batch.
        lengths: Tokens of each document.
        work: Work of each document.
        s_max: Most tokens of a micro-batch.
        second: Work of each document at another price, scaled to the same sum (`comparable`).
        max_rounds: Most exchanges that are made.
        good_enough: Stop once slowest / mean is at most this.

    Returns:
        The documents of each micro-batch after the exchanges.
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
    """Micro-batches and their loads, updated as `refine` exchanges documents."""

    rows: list[list[int]]  # documents of each micro-batch
    lengths: list[int]  # tokens of each document
    works: list[list[int]]  # works[p][d]: work of document d at price p
    loads: list[list[int]]  # loads[p][j]: work of micro-batch j at price p
    sizes: list[int]  # tokens of each micro-batch

    @classmethod
    def of(cls, rows: list[list[int]], lengths: list[int], works: list[list[int]]) -> "_Packing":
        loads = [[sum(map(work.__getitem__, members)) for members in rows] for work in works]
        sizes = [sum(map(lengths.__getitem__, members)) for members in rows]
        return cls([list(members) for members in rows], lengths, works, loads, sizes)

    @property
    def slowest(self) -> list[int]:
        """Load of each micro-batch at the price at which it is slowest."""
        return [max(loads) for loads in zip(*self.loads, strict=True)]

    def best_exchange(self, top: int, s_max: int) -> Exchange | None:
        """Return the exchange that helps the slowest micro-batch `top` most; None if none helps."""
        price = max(range(len(self.loads)), key=lambda p: self.loads[p][top])
        rows, loads, work = self.rows, self.loads[price], self.works[price]
        best: Exchange | None = None
        lowest = loads[top]
        top_documents = sorted(rows[top], key=work.__getitem__)
        top_work = [work[d] for d in top_documents]
        fastest = sorted((j for j in range(len(rows)) if j != top), key=lambda j: (loads[j], j))
        for j in fastest[:MOST_OTHERS]:
            other_documents = sorted(rows[j], key=work.__getitem__)
            other_work = [work[e] for e in other_documents]
            half = (loads[top] - loads[j]) // 2
            # Try to move the two documents whose work is closest to half of the difference.
            at = bisect_left(top_work, half)
            moved = top_documents[max(0, at - 1) : at + 1]
            tried: list[tuple[int, int | None]] = [(d, None) for d in moved]
            # Try to swap each of the largest documents with two documents of micro-batch j, such
            # that about half of the difference moves.
            for d in top_documents[-MOST_SWAPPED:]:
                at = bisect_left(other_work, work[d] - half)
                tried += [(d, e) for e in other_documents[max(0, at - 1) : at + 1]]
            for d, e in tried:
                highest = self._highest(top, j, d, e)
                if highest < lowest:
                    tokens = self.lengths[d] - (self.lengths[e] if e is not None else 0)
                    if self.sizes[j] + tokens <= s_max and self.sizes[top] - tokens <= s_max:
                        lowest, best = highest, (highest, j, d, e)
        return best

    def _highest(self, top: int, j: int, d: int, e: int | None) -> int:
        """Return the larger load of micro-batches `top` and j at any price after an exchange."""
        highest = 0
        for work, loads in zip(self.works, self.loads, strict=True):
            moved = work[d] - (work[e] if e is not None else 0)
            highest = max(highest, loads[top] - moved, loads[j] + moved)
        return highest

    def exchange(self, top: int, j: int, d: int, e: int | None) -> None:
        """Move document d from micro-batch `top` to j, and document e (if not None) back."""
        for document, source, target in ((d, top, j), (e, j, top)):
            if document is not None:
                self.rows[source].remove(document)
                self.rows[target].append(document)
                for work, loads in zip(self.works, self.loads, strict=True):
                    loads[source] -= work[document]
                    loads[target] += work[document]
                self.sizes[source] -= self.lengths[document]
                self.sizes[target] += self.lengths[document]
