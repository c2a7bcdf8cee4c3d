"""Policy `bounded`: long documents wait for balanced steps, within bounds on delay and memory.

Each step trains some of the waiting documents. Algorithm 1 releases long documents when a queue has
N of them. This policy instead chooses the documents whose step costs least, by predicted times:

1. Sort the documents by work. Those with at least `OUTLIER` times the work of a typical micro-batch
   are outliers, and the policy chooses which of them to release. Of all others (ordinary documents)
   it only chooses how many tokens to train. Outliers of nearly equal work form a size class, in
   which the oldest comes first.
2. Train the documents that have waited `max_delay` steps, the oldest first, as far as the limits on
   tokens allow.
3. List the candidates. A candidate is a choice of the outliers that this step trains (releases); it
   holds back all others. It releases an interval of the sorted outliers, and all outliers from a
   second position to the end:

       tallest                                     smallest
       | held | first ... end | held | tail ... last |
                released                released

4. Compute a lower bound on the cost of each candidate. The cost is the time that is lost because
   other micro-batches wait for the slowest one, plus a price for the delay of what is held back.
5. Pack the `NUM_PACKED` candidates with the lowest bounds: place their outliers, then spread the
   ordinary documents as if they were a fluid that divides freely (`water_filled`). Take the
   candidate that then costs least.
6. Place the chosen documents by Algorithm 1, then move and swap single documents between
   micro-batches (`refine`).

Guarantees: at most S_max tokens a micro-batch, at most `step_tokens` a step (in the flush too), and
at most `most_held_tokens` tokens that wait after a global batch. Documents are trained within
`max_delay` steps if these limits permit; otherwise they are counted as overdue. All hosts compute
the same plan, because only integers and single IEEE operations are used.
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

# Each constant's docstring says what a larger or smaller value changes; "LOG" in them is the file
# experiments/LOG.md. The table below shows the results with the present values, and with one
# constant halved, doubled or set to another value. Columns are three streams of documents: lengths
# fitted to the paper, the corpus ProLong, and Python's standard library. Each entry has the
# imbalance and the mean delay in steps, over 400 steps with N = 4, T = 1.5 global batches,
# S_max = 2 windows, D = 10 steps and no price range.
#
#                    fitted          ProLong         library
# present values     1.0064  0.272   1.0059  0.116   1.0038  0.143
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
"""Cost of delaying a whole global batch by one step, multiplied by sqrt(N). The unit is the time of
a typical micro-batch. A larger value gives less delay and more imbalance. The cost is divided by
sqrt(N), because with a constant cost the policy would be content with unbalanced steps at large N
(LOG, "bounded: what lost": imbalance 1.013 instead of 1.008 at N = 16). The second value is used if
there is a price range, since good combinations of documents are then rarer (LOG, "balance over a
range of prices")."""
CURVATURE = 0.1
"""A step that loses time x on its slowest micro-batch costs x + x^2 / CURVATURE. The unit of x is
the time of a typical micro-batch. A smaller value avoids the worst steps, but delays more. Because
of the square, one step of imbalance 1.10 costs more than ten steps of 1.01 (LOG, "bounded: what
lost": on the library, the square lowers the 95th percentile of imbalance from 1.10 to 1.02)."""
URGENCY = 2.0
"""Weight of the shortfall in the cost of holding documents back. The shortfall is the work that the
waiting documents lack to balance the longest document that is held back. A larger value makes other
long documents wait, so that they can be trained together with it (LOG, "bounded: what lost":
imbalance 1.008 on the library, 1.021 without this term)."""
LEAST = 0.35
"""A step has at least this many tokens, in global batches, if that many wait and fit. A step that
trains almost nothing loses no time, so without this limit nearly empty steps and full steps would
alternate (LOG, "Reviews of bounded": for uniform lengths the imbalance is 1.13 with the limit and
1.95 without it)."""
OUTLIER = 0.2
"""A document is an outlier if it has at least this share of the work of a typical micro-batch. A
smaller value makes more documents outliers, so there are more candidates and planning takes
longer."""
CLASS = 0.97
"""Outliers belong to one size class if each has at least this share of the work of the largest one.
Candidates begin only where a class begins, so their number does not grow with the number of
documents. A value closer to 1 gives more candidates and takes more time. At N = 64, a step of the
fitted stream has 2,178 candidates; with 0.985 it would have 3,075 and with 0.94 it would have
1,151, at the same imbalance."""
NUM_PACKED = 8
"""At most this many candidates are packed in each step, those with the lowest bounds. Packing more
of them finds better steps if the bounds are far below the costs, but takes more time. Without a
price range the candidate with the lowest bound is nearly always the best one (on average 1.02
candidates are packed in a step at N = 4). With a price range of 0.7 to 1.6 at N = 16, limits of 4,
8 and 16 give imbalances of 1.0108, 1.0107 and 1.0089 on the fitted stream. Without a limit the
imbalance is 1.0060, the delay is 0.06 steps longer, and 37 candidates are packed in a step (552 at
N = 64)."""
ONE_BY_ONE = 8
"""Intervals with any number of outliers up to this one are tried as candidates. Longer intervals
are tried only if their number of outliers is a power of two or a multiple of N / 8, to limit the
number of candidates. With 4 instead of 8 the imbalance is the same at N = 4, 16 and 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits on the tokens and delays of a step, and the cost of delaying documents."""

    num_micro_batches: int  # N, micro-batches of a step over all pipelines
    tokens_per_step: int  # tokens of an average global batch, N x C
    s_max: int  # most tokens of a micro-batch
    step_tokens: int  # T, most tokens of the step
    max_delay: int  # D, steps that a document may wait
    # Cost of delaying a whole global batch by one step. The unit is the time of a typical
    # micro-batch.
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPacker(PolicyPacker):
    """Packs so that steps are balanced, and lets long documents wait for at most `max_delay` steps.

    Its carry has the waiting documents in slot 0, in arrival order. `push` usually returns one step
    for each global batch. The exceptions are:

    - No step, if less than half a global batch of tokens waits. If less than a whole global batch
      waits, a step also requires that the batch brought documents, and that at least as many
      documents wait as a step has micro-batches.
    - Several steps, as long as more tokens wait than max_delay / 2 global batches have, and more
      than two have. This happens when a document of many windows arrives. All its tokens come in
      one batch, and the next batches bring no documents, so that batches have N x C tokens on
      average.
    - At the end of the data, as many steps as it takes. The last batch is packed together with
      everything that waits, so that nothing is left to flush.
    """

    policy: ClassVar[str] = "bounded"
    slots: ClassVar[CarrySlots] = CarrySlots.ONE
    batches_wait: ClassVar[bool] = False
    s_max: int  # most tokens of a micro-batch, at least the context window
    step_tokens: int | None = None  # T, most tokens of a step, above N x C; None = N x s_max
    max_delay: int = 10  # D, steps that a document may wait
    # Cost of delaying a whole global batch by one step. The unit is the time of a typical
    # micro-batch. None means DELAY_PRICE / sqrt(N), or DELAY_PRICE_IN_RANGE / sqrt(N) with a price
    # range.
    delay_price: float | None = None
    # Range of factors between the true and the predicted time of attention. Micro-batches are
    # balanced for the factor in this range at which they are most unequal.
    price_range: PriceRange = ONE_PRICE

    def __post_init__(self) -> None:
        convert_to_ints(self, s_max=None, step_tokens=None, max_delay=1)
        options, step_tokens = self.options, self.limits.step_tokens
        window, brought = options.context_window, options.tokens_per_step
        check_s_max(self.s_max, options)
        if step_tokens <= brought:
            raise UserError(
                f"a step may have at most {step_tokens} tokens and a global batch brings {brought} "
                f"({brought // window} x {window}), so delayed documents could never be trained; "
                "set packing.step_tokens above 1 global batch, and packing.s_max above 1 window, "
                "because a step holds no more than its micro-batches together"
            )
        if self.delay_price is not None and not 0 < self.delay_price < np.inf:
            raise UserError(f"packing.delay_price = {self.delay_price} must be above 0 and finite")

    @property
    def limits(self) -> StepLimits:
        """The limits on a step and the cost of delay, with defaults filled in."""
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
        """Most tokens that may wait after a call of `push`.

        This limit is max_delay / 2 global batches, but at least two global batches. While more
        tokens wait, `push` makes further steps.
        """
        return max(2, self.max_delay // 2) * self.options.tokens_per_step

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Pack `batch` and the waiting documents; return plans of steps, and the new carry.

        At the end of the data `batch` is None, and everything that waits is packed.
        """
        limit = min(self.s_max, self.limits.step_tokens)
        check_fits(carry.pieces, limit, name="s_max or step_tokens")
        step = carry.next_step
        waiting = Pieces.concat(carry.pieces, self.options.arrived(batch, step))
        if batch is None or batch.is_last:
            last = self._flushed(waiting, step)
            if batch is not None and len(waiting):
                # The last batch can be packed in two ways. Flush everything together, so that this
                # batch helps to balance long documents, or make a usual step first and flush the
                # rest. Take the way whose steps are faster.
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
        """Return plans that train all `waiting` pieces; `step` is the index of the first plan."""
        plans: list[PackingPlan] = []
        while len(waiting):
            plan, waiting = self._step(waiting, step + len(plans), flush=True)
            plans.append(plan)
        return tuple(plans)

    def _step(self, waiting: Pieces, step: int, *, flush: bool) -> tuple[PackingPlan, Pieces]:
        """Make the plan of the next step.

        Args:
            waiting: All waiting pieces.
            step: Index of the step.
            flush: Whether the data has ended, so that as much as possible is trained.

        Returns:
            The plan, and the pieces that wait for later steps.
        """
        length, limits = waiting.length, self.limits
        work = self.options.workloads(waiting)
        ends = self.price_range.ends(self.options, waiting, work)
        age = step - waiting.arrival_step
        is_due = age >= self.max_delay
        if flush:
            # No more documents will come, so it does not help to wait. Train documents that have
            # waited for max_delay steps first, and then those with most work.
            order = np.lexsort((-work, ~is_due))
            order = np.sort(order[fitting(length[order], limits.step_tokens)])
        else:
            order = np.flatnonzero(choose(length, work, age, limits, ends=ends))
        order = order[np.argsort(-work[order], kind="stable")]
        rows, rest = _placed(length[order], ends[:, order], limits, exchange=True)
        if is_due[order[rest]].any():
            # A document that has waited for max_delay steps did not fit. Place all such documents
            # first, although the micro-batches are then balanced a little worse.
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
    """Choose the documents that the next step trains (steps 1 to 5 at the top of this file).

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
    Step 3: the sets of outliers that the step can train (the candidates) are
    100, 96, 60 | 100, 96 | 100, 60 | 100 | 96, 60 | 96 | 60.
    Without outliers the step would have 30 tokens, which is less than LEAST = 0.35 of the 200
    tokens of a global batch.
    Step 4: if all three are trained, two of them must share a micro-batch. Its work is at least
    0.97 x (14,976 + 7,200) = 21,511, where 0.97 is CLASS. The mean would be 20,138, so the time
    lost is x = 0.098 typical micro-batches, and costs x + x^2 / CURVATURE = 0.193. If the document
    of 60 tokens is held back, the other two are balanced with the help of the 30 ordinary tokens.
    The delay of 60 / 200 = 0.3 global batches then costs 0.1 x (0.3 + 0.3^2 / (2 x 0.5)) = 0.039,
    where 0.1 is `limits.price` (`_holding` has the formula).
    Step 5 packs this candidate first: the 30 ordinary tokens raise both micro-batches to 16,538.
    The cost is still 0.039, less than the bounds of all other candidates, so they are not packed.

    Args:
        length: Tokens of each waiting document, shape [n], n >= 1.
        work: Predicted time of each document in ns, shape [n].
        age: Steps that each document has waited, shape [n].
        limits: Caps on the step, and the price of delay.
        ends: Work of each document in ns at both ends of the price range, shape [2, n], or [1, n]
            without a price range. Defaults to `work`.

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
    """The waiting documents in sorted order, with running sums of their tokens, work and delay.

    Outliers (documents with much work) come first, by size class and then by age. All others, the
    ordinary documents, follow by descending work. Ordinary documents that have waited for the
    maximum delay, and so must leave in this step, come last.

    Each document has 3 + num_ends values. num_ends is 2 with a price range and 1 without:

    0. its tokens,
    1. its work in ns,
    2. its tokens times the steps by which they are delayed if this step does not train it,
    3. and following: its work in ns at each end of the price range.

    `rows` has these values, shape [3 + num_ends, n]. `sums` has their running sums over the
    documents, shape [3 + num_ends, n + 1], so the difference of two columns is the sum over an
    interval of documents.
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
        # 1. Sort outliers by size class, with the oldest of a class first, and other documents by
        # work.
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
        # 2. Find the documents that must leave in this step: the oldest first, as many as T and
        # S_max allow. Those that fit into no micro-batch are left out, so that they take up no part
        # of T.
        due = np.flatnonzero(age[order] >= limits.max_delay)
        due = order[due[np.argsort(-age[order[due]], kind="stable")]]
        due = due[fitting(length[due], limits.step_tokens)]
        by_length = due[np.argsort(-length[due], kind="stable")]
        if _placed(length[by_length], ends[:, by_length], limits)[1]:
            due = np.delete(due, _placed(length[due], ends[:, due], limits)[1])
        must_leave = np.zeros(len(order), bool)
        must_leave[due] = True
        # Move the ordinary documents that must leave to the end, and keep the order otherwise.
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
        # 3. Sum `rows` over the ordinary documents that must leave (`ordinary_forced`) and over the
        # other ordinary documents (`ordinary`). Of these others, also compute:
        # - `tokens_before`: running sums of their tokens
        # - `ordinary_delay`: the mean delay of their tokens if this step trains none of them
        # - `density`: their work per token
        self.ordinary_forced = (self.sums[:, -1] - self.sums[:, self.num_free])[:, None]
        self.ordinary: IntArray = self.sums[:, self.num_free] - self.sums[:, num]
        self.tokens_before: IntArray = self.sums[0, num : self.num_free + 1] - self.sums[0, num]
        tokens, work_left, delayed = map(int, self.ordinary[:3])
        self.ordinary_delay = delayed / tokens if tokens else 0.0
        per_token = self.typical / limits.tokens_per_step * limits.num_micro_batches
        self.density = work_left / tokens if tokens else per_token

    def size_class_end(self, candidates: "Candidates") -> IntArray:
        """Return where the run of a step's largest outliers ends, for each candidate.

        The run begins with the first outlier that the step trains (`Candidates.tallest`), because
        outliers are sorted by size class. It ends with the size class of this outlier, or earlier:
        before the first outlier that the step does not train, or after N outliers, because the
        caller assumes that each outlier of the run has a micro-batch to itself.

        Args:
            candidates: The sets of outliers that the step may train.

        Returns:
            Index after the last outlier of the run, shape [num_candidates].
        """
        ends = np.append(self.class_starts[1:], [self.num_outliers, self.num_outliers])
        size_class = np.searchsorted(self.class_starts, candidates.tallest, "right") - 1
        most = candidates.tallest + self.limits.num_micro_batches
        return np.minimum(np.minimum(candidates.first_stop, ends[size_class]), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates for the next step. Each says which outliers the step trains (releases).

    A candidate releases the outliers [first, end) and [tail, num_outliers), and holds back all
    others. The step also trains all outliers that have waited for the maximum delay, but methods of
    this class ignore that. Outliers are numbered as `WaitingDocuments` sorts them: by size class,
    from most to least work, and then by age. All arrays have shape [num_candidates].
    """

    first: IntArray  # first outlier of the interval [first, end)
    end: IntArray  # end of this interval
    tail: IntArray  # first outlier of the interval [tail, num_outliers)
    num_outliers: int  # number of waiting outliers

    @property
    def tallest(self) -> IntArray:
        """For each candidate the index of the first outlier that it releases; num_outliers if none.

        It is in the largest size class of which the candidate releases an outlier, because outliers
        are sorted by size class.
        """
        return np.where(self.end > self.first, self.first, self.tail)

    @property
    def first_stop(self) -> IntArray:
        """For each candidate, the end of the first range of consecutive outliers that it releases.

        The range begins at `tallest`. Its end is the index of the next outlier after it, or
        num_outliers.
        """
        return np.where(self.end > self.first, self.end, self.num_outliers)

    def released(self, running: IntArray) -> IntArray:
        """Sum a value, such as tokens, over the outliers that each candidate releases.

        Args:
            running: Running sums of one or several values over all outliers, shape
                [..., num_outliers + 1].

        Returns:
            The sums, with the same leading axes, shape [..., num_candidates].
        """
        before_tail = running[..., self.end] - running[..., self.first]
        return before_tail + running[..., -1:] - running[..., self.tail]

    def held(self, running: IntArray) -> IntArray:
        """Sum a value, such as tokens, over the outliers that each candidate holds back.

        Args:
            running: Running sums of one or several values over all outliers, shape
                [..., num_outliers + 1].

        Returns:
            The sums, with the same leading axes, shape [..., num_candidates].
        """
        return running[..., self.first] + running[..., self.tail] - running[..., self.end]

    def at(self, index: IntLike | BoolArray) -> "Candidates":
        """Return the candidates at these indices, or those for which a mask is true."""
        first, end, tail = self.first[index], self.end[index], self.tail[index]
        return Candidates(first=first, end=end, tail=tail, num_outliers=self.num_outliers)


def _candidates(waiting: WaitingDocuments) -> Candidates:
    """List the candidates: the sets of outliers that the next step could train.

    Outliers are sorted by size class (outliers of nearly equal work). A candidate trains one or two
    ranges of this order, or none; each range begins where a size class begins. The step of a
    candidate has at most T tokens. It also has at least LEAST global batches of tokens, unless no
    candidate reaches that.
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    starts = np.append(waiting.class_starts, num_outliers)
    # The interval [first, end) may have any number of outliers up to ONE_BY_ONE. Above that, only
    # powers of two and multiples of N / 8 are tried.
    shortest = int(waiting.length[:num_outliers].min(initial=1 << 62))
    most = int(limits.step_tokens / max(1, shortest))
    counts = np.arange(min(num_outliers, most, ONE_BY_ONE) + 1)
    if num_outliers > ONE_BY_ONE:
        eighths = np.arange(1, 8 * max(1, most // num + 1)) * num // 8
        powers = 2 ** np.arange(4, num_outliers.bit_length())
        counts = np.unique(np.concatenate([counts, powers, eighths]))
    first, count, tail = (a.ravel() for a in np.meshgrid(starts, counts, starts, indexing="ij"))
    end = first + count
    # List no choice twice. A choice with one interval, [tail, num_outliers), has a count of 0 and
    # first = tail. A choice with two intervals must hold something back between them; otherwise
    # they would be one interval.
    is_one = np.where(count > 0, (end < tail) & (first < num_outliers), tail == first)
    candidates = Candidates(first=first, end=end, tail=tail, num_outliers=num_outliers).at(is_one)
    taken = candidates.released(waiting.outlier_sums[0]) + waiting.ordinary_forced[0]
    taken += candidates.held(waiting.must_leave_sums[0])
    # Together with the ordinary documents that fit, a candidate must reach LEAST global batches of
    # tokens. If no candidate can, take those with most tokens.
    fits = taken <= limits.step_tokens
    possible = np.minimum(taken + waiting.ordinary[0], limits.step_tokens)
    least = min(LEAST * limits.tokens_per_step, int(possible[fits].max()))
    return candidates.at(fits & (possible >= max(1.0, least)))


def _bounds(waiting: WaitingDocuments, candidates: Candidates) -> FloatArray:
    """Return a lower bound on the cost of each candidate (set of outliers), without packing it.

    The cost is the time lost on the slowest micro-batch (`_wait`) plus the cost of what is held
    back (`_holding`).

    Returns:
        Lower bounds, in multiples of a typical micro-batch's time, shape [num_candidates].
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    first, end, tail = candidates.first, candidates.end, candidates.tail
    # Arrays of work such as `mean` and `slowest` have shape [num_ends, num_candidates]: one row for
    # each end of the price range.
    # (a) Sum tokens and work of the documents that a candidate trains in any case, and find the
    # work of the one with most work (`height`). This document need not be the first released
    # outlier, because a size class is sorted by age. So take the maximum over all released
    # outliers.
    taken = candidates.released(waiting.outlier_sums) + candidates.held(waiting.must_leave_sums)
    taken += waiting.ordinary_forced
    outliers = np.append(waiting.rows[:, :num_outliers], np.zeros((len(taken), 1), np.int64), 1)
    highest = np.maximum.accumulate(outliers[:, ::-1], axis=1)[:, ::-1]
    forced = (outliers[:, :num_outliers] * waiting.must_leave[:num_outliers]).max(1, initial=0)
    height = np.maximum(highest[:, candidates.tallest], forced[:, None])
    # (b) Choose the ordinary documents that fill the step. If those with least work can raise the
    # mean work of a micro-batch to that of the largest document (`height`), take them. Otherwise
    # take some of those with most work.
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
    # (c) The slowest micro-batch has at least the mean work, and at least the work of the largest
    # document (`height`). If there are more than N outliers, two of them must share a micro-batch,
    # and if there are more than 2N, three must. Outliers are sorted by size class, and within a
    # class by age. So the n-th one may have less work than a later one, but at least CLASS times as
    # much.
    count = end - first

    def nth(n: int) -> IntArray:
        """Return the work of the n-th outlier (from 0) in each candidate; 0 if there are fewer."""
        row = np.where(n < count, first + n, tail + n - count)
        return outliers[3:, np.minimum(row, num_outliers)]

    two = np.where(nth(num) > 0, nth(num) + nth(num - 1), 0)
    three = np.where(nth(2 * num) > 0, nth(2 * num) + nth(2 * num - 1) + nth(2 * num - 2), 0)
    slowest = np.maximum(np.maximum(mean, height[3:]), CLASS * np.maximum(two, three))
    # (d) Raise the bound where the other documents do not fit into those micro-batches that hold no
    # large outlier (`_crowded`), or where no packing is balanced at both ends of the price range
    # (`_skewed`).
    all_tokens = taken[0] + tokens
    if len(mean) == 1:
        crowded = _crowded(waiting, candidates, all_tokens, num * mean[0])
        wait = _wait(waiting, np.maximum(slowest, crowded) - mean)
    else:
        wait = _skewed(waiting, candidates, slowest, mean, fluid)
    # (e) Sum the tokens and delays of what is held back. Which ordinary documents are held back is
    # not known yet, so use their mean delay.
    held = (waiting.outlier_sums[:, -1:] + waiting.ordinary_forced - taken)[[0, 2]]
    left = waiting.ordinary[0] - tokens
    delayed = held[1] + left * waiting.ordinary_delay
    return wait + _holding(waiting, candidates, held[0] + left, delayed)


def _wait(waiting: WaitingDocuments, over: FloatArray) -> FloatArray:
    """Return the cost of waiting for the slowest micro-batch, for each of n possible steps.

    The cost is x + x^2 / CURVATURE. x is the time of the slowest micro-batch minus the mean, as a
    multiple of a typical micro-batch's time, at the end of the price range where it is larger.

    Args:
        waiting: The waiting documents, which say what a typical micro-batch's time is.
        over: Slowest micro-batch minus mean in ns, at each end of the price range, shape
            [num_ends, n].

    Returns:
        Costs, shape [n].
    """
    x = (over / waiting.typical_ends).max(0)
    return x + x * x / CURVATURE


def _crowded(
    waiting: WaitingDocuments, candidates: Candidates, tokens: IntArray, work: FloatArray
) -> FloatArray:
    """Return a lower bound on the slowest micro-batch's work if S_max leaves little room.

    Suppose that each of k large outliers has a micro-batch of its own. The other N - k
    micro-batches hold at most S_max tokens each. Tokens that do not fit there must go to the k
    micro-batches with outliers, whose mean work is the bound. It is computed for two values of k,
    and the larger result is returned:

    - The first k counts the outliers, in the order of size classes, from the first one that the
      candidate releases to the last one before an outlier that it holds back, but at most N.
    - The second k counts those of them in the size class of the first one (`size_class_end`).

    Args:
        waiting: The waiting documents.
        candidates: The sets of outliers that this step may train (release).
        tokens: Tokens of each candidate's step, shape [num_candidates].
        work: Work of each candidate's step in ns, shape [num_candidates].

    Returns:
        Lower bounds in ns, shape [num_candidates].
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
    """Return a lower bound on the cost of waiting for the slowest micro-batch (`_wait`).

    This bound is for a price range with two different ends. Often no packing is balanced at both
    ends. Suppose that the k outliers with most work have a micro-batch each. If few ordinary
    documents are added to these micro-batches, they are the slowest ones when attention is
    expensive. If many are added, they are the slowest ones when attention is cheap.

    The function tries three amounts of ordinary documents for these k micro-batches: none, as many
    as bring them to the mean work at the low end of the range, and as many as bring them to the
    mean work at the high end. It returns the lowest of the three costs.

    Args:
        waiting: The waiting documents.
        candidates: The sets of outliers that this step may train (release).
        slowest: Lower bounds on the slowest micro-batch in ns, shape [num_ends, num_candidates].
        mean: Mean work of a micro-batch in ns, shape [num_ends, num_candidates].
        fluid: Work of all ordinary documents of the step in ns, shape [num_ends, num_candidates].

    Returns:
        Lower bounds on the cost that `_wait` returns, shape [num_candidates].
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
    """Return the cost of holding documents back, in multiples of a typical micro-batch's time.

    Args:
        waiting: The waiting documents.
        candidates: The sets of outliers that this step may train (release).
        tokens: Tokens that each candidate holds back, shape [num_candidates].
        delayed: Sum of the delays of these tokens, in steps, if all of them are trained in the next
            step; shape [num_candidates].

    Returns:
        Costs, shape [num_candidates].
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    # (a) The delay so far, and the delay until the held documents (the backlog) are trained. A step
    # can train T - 1 global batches more than arrive, so a backlog of B batches shrinks linearly to
    # zero in B / (T - 1) steps. The area under that line, B^2 / (2 (T - 1)), is the further delay.
    batch = float(limits.tokens_per_step)
    backlog = tokens / batch
    spare = (limits.step_tokens - limits.tokens_per_step) / batch
    delay = limits.price * (delayed / batch + backlog * backlog / (2 * spare))
    # (b) The shortfall. Consider the later step that will train the held document with most work.
    # If all other documents that are held now cannot raise the mean work of that step's
    # micro-batches to the work of this document, the step will be unbalanced. The missing work
    # counts more, the older the document is. Without this term a rare long document would be
    # trained without others that balance it, when it reaches the maximum delay. A size class is
    # sorted by age, so its first held document is its oldest.
    first, end, tail = candidates.first, candidates.end, candidates.tail
    tallest_held = np.where(first > 0, 0, end)
    is_held = (first > 0) | (tail > end)
    work = np.append(waiting.rows[1, :num_outliers], 0)
    height = np.where(is_held, work[tallest_held], 0)
    # Sum the work of the documents that can share a step with the held document of most work: held
    # outliers, those with most work first, up to T tokens, and then ordinary documents.
    sum_tokens: IntArray = waiting.outlier_sums[0]
    sum_work: IntArray = waiting.outlier_sums[1]
    cap = np.minimum(candidates.held(sum_tokens), limits.step_tokens)
    rest = np.maximum(0, cap - sum_tokens[first])
    stop = np.searchsorted(sum_tokens, sum_tokens[end] + rest, "right") - 1
    stop_below = np.searchsorted(sum_tokens, np.minimum(cap, sum_tokens[first]), "right") - 1
    company = sum_work[stop_below] + np.maximum(0, sum_work[stop] - sum_work[end])
    # Assume that the later step will train at most 1.2 global batches of ordinary documents. The
    # result hardly depends on this limit, or on the factor 1.02 in `is_tall`. Without both,
    # imbalance differs by at most 0.002 and delay by 0.03 steps (LOG, "the way from lengths to
    # loss").
    fill = np.minimum(limits.step_tokens - cap, limits.tokens_per_step * 6 // 5)
    reached = (company + fill * waiting.density) / limits.num_micro_batches
    lacking = np.maximum(0.0, height - reached) / waiting.typical
    age = np.append(waiting.age[:num_outliers], 0)[tallest_held]
    urgency = np.minimum(1.0, (age + 1) / limits.max_delay)
    is_tall = is_held & (height > 1.02 * waiting.typical)
    return delay + np.where(is_tall, URGENCY * urgency * urgency * urgency * lacking, 0.0)


def _packed(waiting: WaitingDocuments, candidate: Candidates) -> tuple[float, IntArray]:
    """Pack the step of one candidate, and return the step's cost and documents.

    A candidate says which outliers the step trains. Ordinary documents are spread over the
    micro-batches like a fluid that divides freely.

    Args:
        waiting: The waiting documents.
        candidate: A single candidate.

    Returns:
        The cost in multiples of a typical micro-batch's time (infinite if the step does not fit),
        and the positions in the order of `waiting` of the documents that the step trains.
    """
    limits, num_outliers = waiting.limits, waiting.num_outliers
    num = limits.num_micro_batches
    # (a) Place the outliers by Algorithm 1. `loads` sums each row of `waiting.rows` over the
    # documents of each micro-batch, shape [3 + num_ends, N].
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
    # (b) Choose ordinary documents until the step has T tokens or all of them are chosen. They are
    # sorted by descending work; choose consecutive ones. They need enough work to raise the mean
    # work of a micro-batch to that of the slowest one, but otherwise as little as possible, because
    # light documents can be spread more evenly than heavy ones.
    forced = waiting.ordinary_forced[:, 0]
    room = limits.step_tokens - int(length.sum()) - int(forced[0])
    missing = int(loads[1].max()) * num - int(loads[1].sum()) - int(forced[1])
    first, stop = _lightest_with(waiting, min(room, int(waiting.ordinary[0])), missing)
    fluid = waiting.sums[:, stop] - waiting.sums[:, first] + forced
    must_leave = np.arange(waiting.num_free, len(waiting.order))
    taken = np.concatenate([outliers, np.arange(first, stop), must_leave])
    # (c) Spread the chosen ordinary documents over the micro-batches like a fluid, and compute the
    # cost as `_bounds` does.
    level = water_filled(loads[3:], loads[0], int(fluid[0]), fluid[3:], limits.s_max)
    if rest or level is None:
        return np.inf, taken
    mean = (loads[3:].sum(1) + fluid[3:]) / num
    wait = _wait(waiting, (level.max(1) - mean)[:, None])
    held = waiting.sums[:, -1] - waiting.rows[:, taken].sum(1)
    cost = wait + _holding(waiting, candidate, held[:1], held[2:3].astype(float))
    return float(cost[0]), taken


def _lightest_with(waiting: WaitingDocuments, tokens: int, work: int) -> tuple[int, int]:
    """Find the lightest run of ordinary documents (no outliers) that has at least `work` ns.

    Ordinary documents are sorted by descending work. A run has as many consecutive documents as
    `tokens` permits, so a run that begins later has less work. No run begins later than the first
    one that reaches the last document.

    Args:
        waiting: The waiting documents.
        tokens: Most tokens of the run.
        work: Work in ns that the run should have. If no run has that much, the run with most work
            is returned.

    Returns:
        The run [first, stop), as positions in the order of `waiting`.
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
    """Spread short documents evenly over micro-batches, and return the work of each afterwards.

    The documents are treated as a fluid that divides freely. Each token goes to the micro-batch
    whose share of the step's work is lowest. With two prices of attention, the larger of a
    micro-batch's two shares counts:

        share of work                   ___________________   level x
             |XXXX|~~~~|~~~~|~~~~|
             |XXXX|XXXX|~~~~|~~~~|      X: placed outliers
             |XXXX|XXXX|XXXX|~~~~|      ~: fluid

    If the level is x, micro-batch j takes min over prices p of (x - base[p, j]) * slope[p] tokens,
    and at most its free tokens. Here base is the share without the fluid, and slope is the number
    of tokens that raise a share by 1. As a function of x, the tokens of a micro-batch are piecewise
    linear. The function visits all levels at which such a line bends, in ascending order, until all
    tokens are placed. This takes O(N log N).

    Args:
        loads: Work of each micro-batch without the fluid in ns, at one price or two, shape
            [num_ends, N].
        sizes: Tokens of each micro-batch without the fluid, shape [N].
        tokens: Tokens of the fluid.
        work: Work of the fluid at each price in ns, shape [num_ends].
        s_max: Most tokens of a micro-batch.

    Returns:
        Work of each micro-batch with the fluid in ns, at each price, shape [num_ends, N]. None if
        the fluid does not fit into micro-batches of `s_max` tokens.
    """
    room = s_max - sizes
    if int(room.sum()) < tokens:
        return None
    # Ignore a price at which the fluid costs nothing: it changes no load, wherever it is placed.
    counts = np.flatnonzero(work > 0)
    if not tokens or not counts.size:
        return loads.astype(float)
    step = (loads.sum(1) + work)[counts]
    slope = step / (work[counts] / tokens)
    base = loads[counts] / step[:, None]
    # The tokens that a micro-batch takes are a piecewise linear function of the level. List the
    # levels at which its slope (tokens per unit of the level) changes, and by how much. The slope
    # is first that of the price with the highest load. It may then become the smaller slope of
    # another price, and is 0 once the micro-batch is full.
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
    # Raise the level from one change of slope to the next until all tokens are placed.
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
    """Take each document in turn if it still fits, and return the indices of those taken.

    Args:
        length: Tokens of each document, shape [n].
        tokens: Most tokens of all documents that are taken together.

    Returns:
        Indices into `length`, ascending.
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
        ends: Work of each document in ns at each end of the price range, shape [num_ends, n].
        limits: Caps on the step.
        exchange: Whether `refine` improves the result by moving and swapping documents.

    Returns:
        The indices of each micro-batch's documents, and the indices of documents that do not fit
        because of S_max.
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
"""An exchange between the slowest micro-batch and a faster one: (the larger load of the two
afterwards, the faster micro-batch, the document that moves to it, the document that moves back or
None)."""

# The next three constants limit the time of `refine`. If one of them is halved or doubled, the
# imbalance of `bounded` changes by at most 0.0001 (on three streams of documents, at N = 4).
MOST_OTHERS = 8
"""The slowest micro-batch tries exchanges with at most this many others, the fastest ones."""
MOST_SWAPPED = 16
"""Swaps are tried with at most this many documents of the slowest micro-batch: those with most
work."""
WORTHWHILE = 2e-4
"""`refine` stops when the best exchange gains less than this share of the mean load."""


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
    """Repeatedly move or swap single documents, to make the slowest micro-batch faster.

    A load is the work of a micro-batch. If `second` is given, it is the larger one of the sums of
    `work` and of `second`. Documents are then compared by the one of the two that is larger for the
    slowest micro-batch.

    The ideal exchange between the slowest micro-batch and a faster one moves half of the difference
    of their loads. So each round tries to move a document with about that much work, or to swap two
    documents that differ by about that much. Of the exchanges that S_max permits, it makes the one
    after which the larger of the two loads is lowest, if that is an improvement.
    Cost: at most `max_rounds` rounds of 0.2 ms, with about 300 exchanges tried in each.

    Args:
        rows: Indices of the documents in each micro-batch.
        lengths: Tokens of each document, shape [n].
        work: Work of each document, shape [n].
        s_max: Most tokens of a micro-batch.
        second: Work of each document at a second price of attention, scaled so that its sum equals
            the sum of `work` (`wlb.packing.base.comparable`). None = one price.
        max_rounds: Most exchanges that are made.
        good_enough: Stop once the largest load divided by the mean load is at most this.

    Returns:
        Indices of the documents in each micro-batch after the exchanges.
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
    """Micro-batches and their loads, which `refine` changes by moving and swapping documents.

    Work is given at one or two prices of attention, the ends of the price range.
    """

    rows: list[list[int]]  # indices of the documents in each micro-batch
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
        """Work of each micro-batch, at the price of attention that makes it larger, shape [N]."""
        return [max(loads) for loads in zip(*self.loads, strict=True)]

    def best_exchange(self, top: int, s_max: int) -> Exchange | None:
        """Return the exchange after which the slower of its two micro-batches has least work.

        An exchange moves a document from the slowest micro-batch to another one, or swaps a
        document of each.

        Args:
            top: The slowest micro-batch.
            s_max: Most tokens of a micro-batch.

        Returns:
            The exchange, or None if no exchange helps.
        """
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
            # Try to move one document, whose work is closest to half of the difference of the
            # loads, either from below or from above.
            at = bisect_left(top_work, half)
            moved = top_documents[max(0, at - 1) : at + 1]
            tried: list[tuple[int, int | None]] = [(d, None) for d in moved]
            # Try to swap each of the largest documents with either of two documents of micro-batch
            # j, such that about half of the difference of the loads moves.
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
        """Return the larger load of micro-batches `top` and j after an exchange of documents.

        The result is the maximum over all prices of the price range.

        Args:
            top: The slowest micro-batch.
            j: The other micro-batch.
            d: The document that moves from `top` to j.
            e: The document that moves from j to `top`, or None.
        """
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
