"""ilp: packing by integer linear program, the paper's Fixed-Len Solver and its Eq. 2.

Two policies. `ilp_fixed` (Eq. 1, Section 3.2): W * N windows of exactly C tokens from the same
tokens as `fixed`, attention balanced. `ilp_var_len` (Eq. 2, Section 4.1): the documents of W global
batches in W * N micro-batches of at most S_max tokens, W_a + W_l balanced, no document cut, none
delayed beyond the window. `solve_fixed` and `solve_var_len` pack one window.

(1) The greedy packing of the same pieces (`fixed`; Algorithm 1's placement for Eq. 2). (2) The ILP
over the long documents, with the short ones as a fluid (ilp_model.py, ilp_fluid.py), from there.
(3) Documents put where the solution says. (4) The better of (3) and (1) by its true cost.

Deviations from the paper:
- `Objective.SUM_OF_STEP_MAX` by default. The printed minimum of one maximum is degenerate once one
  document costs more than the mean load; what steps take is the sum of their maxima.
- Documents shorter than `divisible_below` have no binaries, and in Eq. 1, which asks for exactly
  full micro-batches, a few of them are cut. A longer one is cut only where greedy had to.
- CBC or HiGHS on one thread for a limited time in place of a commercial solver to the optimum.

Guarantees: never slower than greedy by the objective; every token placed once; capacity held;
`IlpReport.bound_ns` is a lower bound, fluid and cuts accounted for (it says for which packings).

Cost: seconds a window. And a solve that ends by time differs from host to host: pack offline, or on
one rank and broadcast the plan; never on each rank by itself.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import numpy as np

from wlb.packing.base import PackerOptions, PolicyPacker, build_plan
from wlb.packing.fixed import FixedPacker, Window, greedy
from wlb.packing.ilp_fluid import Shape, items_of, placed
from wlb.packing.ilp_model import Objective, solve
from wlb.packing.ilp_solvers import Limits, Solver
from wlb.packing.var_len import place
from wlb.plan import Carry, GlobalBatch, IntArray, PackingPlan, Pieces, check_at_least

FIXED_POLICY = "ilp_fixed"
VAR_LEN_POLICY = "ilp_var_len"
OPTIMAL_GAP = 1e-5
"""A gap that is rounding: solvers and bounds work to 1e-6."""
LEFTOVER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpOptions:
    """How windows are solved.

    time_limit_s: for each window, in the solver. gap_limit: relative gap at which it stops.
    divisible_below: tokens; shorter documents are a fluid. None = C // 16, 0 = no document is.
    """

    solver: Solver = Solver.HIGHS
    objective: Objective = Objective.SUM_OF_STEP_MAX
    time_limit_s: float = 10.0
    gap_limit: float = 1e-4
    divisible_below: int | None = None
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "solver", Solver(self.solver))
        object.__setattr__(self, "objective", Objective(self.objective))
        if not 0 < self.time_limit_s < math.inf:
            raise ValueError(f"time_limit_s = {self.time_limit_s} must be a positive number")
        if not 0 <= self.gap_limit < 1:
            raise ValueError(f"gap_limit = {self.gap_limit} must be in [0, 1), e.g. 1e-4 for 0.01%")
        check_at_least("threads", self.threads, 1)
        if self.divisible_below is not None:
            check_at_least("divisible_below", self.divisible_below, 0)

    def below(self, context_window: int) -> int:
        """`divisible_below`, in tokens."""
        return context_window // 16 if self.divisible_below is None else self.divisible_below


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpReport:
    """How good a window's packing is.

    objective_ns: of the packing that was returned, by its true cost; greedy_objective_ns: of the
    greedy one. bound_ns: what every packing takes that keeps documents whole but for at most
    num_micro_batches - 1, none dearer than the dearest that this one cuts. status: how the solver
    ended, "optimal" (to gap_limit, for the fluid problem), "feasible", "nothing_found" or
    "infeasible". kept_greedy: it found nothing that is better once its fluid is documents.
    """

    solver: Solver
    status: str
    objective_ns: int
    bound_ns: int
    greedy_objective_ns: int
    kept_greedy: bool
    num_binaries: int
    time_s: float

    @property
    def gap(self) -> float:
        """(objective - bound) / objective: the packing is at most this far from the best."""
        return (self.objective_ns - self.bound_ns) / max(1, self.objective_ns)

    @property
    def optimal(self) -> bool:
        """No packing of the kind that `bound_ns` speaks of is better."""
        return self.gap <= OPTIMAL_GAP


ReportSink = Callable[[IlpReport], None]


def solve_fixed(
    pieces: Pieces, *, options: PackerOptions, ilp: IlpOptions, num_micro_batches: int
) -> tuple[Window, IlpReport]:
    """Eq. 1: `pieces` in windows of C tokens; ValueError if they do not fit."""
    start = greedy(
        pieces,
        options.attention(pieces),
        num_micro_batches=num_micro_batches,
        capacity=options.context_window,
    )
    shape = _shape(options, ilp, num_micro_batches, capacity=options.context_window, may_cut=True)
    return _solve(pieces, start, shape, options.attention, ilp, options.context_window)


def solve_var_len(
    pieces: Pieces, *, options: PackerOptions, ilp: IlpOptions, num_micro_batches: int, s_max: int
) -> tuple[Window, IlpReport]:
    """Eq. 2: `pieces` whole in micro-batches of at most S_max tokens.

    ValueError if greedy, which is where the solver starts, cannot place them all.
    """
    _check_s_max(s_max, options)
    start, rest = _greedy_var_len(pieces, options, num_micro_batches, s_max)
    if rest:
        raise ValueError(
            f"{len(rest)} of {len(pieces)} pieces ({pieces.num_tokens} tokens) do not fit "
            f"{num_micro_batches} micro-batches of s_max = {s_max} tokens; use more micro-batches "
            f"or a larger s_max"
        )
    shape = _shape(options, ilp, num_micro_batches, capacity=s_max, may_cut=False)
    return _solve(pieces, start, shape, options.workloads, ilp, options.context_window)


def _check_s_max(s_max: int, options: PackerOptions) -> None:
    if s_max < options.context_window:
        raise ValueError(
            f"s_max = {s_max} is below the context window of {options.context_window}: a document "
            f"that fills it could never be placed"
        )


def _shape(
    options: PackerOptions, ilp: IlpOptions, num: int, *, capacity: int, may_cut: bool
) -> Shape:
    if num < 1 or num % options.num_micro_batches:
        raise ValueError(
            f"num_micro_batches = {num} are not whole steps of {options.num_micro_batches}"
        )
    per_step = num if ilp.objective == Objective.MAX else options.num_micro_batches
    return Shape(num_micro_batches=num, per_step=per_step, capacity=capacity, may_cut=may_cut)


def _greedy_var_len(
    pieces: Pieces, options: PackerOptions, num_micro_batches: int, s_max: int
) -> tuple[Window, list[int]]:
    """Algorithm 1's placement, longest first: the window, and rows that fit nowhere."""
    order = np.argsort(-pieces.length, kind="stable")
    rows, rest = place(
        pieces.length[order].tolist(),
        options.workloads(pieces)[order].tolist(),
        num_micro_batches=num_micro_batches,
        s_max=s_max,
    )
    window = Window(pieces=pieces, rows=[order[members].tolist() for members in rows])
    return window, order[rest].tolist()


def _solve(
    pieces: Pieces,
    start: Window,
    shape: Shape,
    cost: Callable[[Pieces], IntArray],
    ilp: IlpOptions,
    context_window: int,
) -> tuple[Window, IlpReport]:
    began = time.perf_counter()
    below = ilp.below(context_window)
    items = items_of(pieces, start, shape=shape, divisible_below=below, cost=cost)
    limits = Limits(
        time_limit_s=ilp.time_limit_s, gap=ilp.gap_limit, threads=ilp.threads, seed=ilp.seed
    )
    solution = solve(items.problem, items.start, solver=ilp.solver, limits=limits)
    found = placed(items, solution.assignment) if solution.assignment else None
    start_ns = _objective_ns(start, cost, shape.per_step)
    objective_ns = start_ns if found is None else _objective_ns(found, cost, shape.per_step)
    window = start if found is None or objective_ns >= start_ns else found
    report = IlpReport(
        solver=ilp.solver,
        status=solution.status,
        objective_ns=min(objective_ns, start_ns),
        bound_ns=max(0, solution.bound_ns - items.saved_by_cuts_ns(window)),
        greedy_objective_ns=start_ns,
        kept_greedy=window is start,
        num_binaries=items.problem.num_binaries,
        time_s=time.perf_counter() - began,
    )
    return _by_load(window, cost), report


def _loads(window: Window, cost: Callable[[Pieces], IntArray]) -> list[int]:
    cost_ns = cost(window.pieces)
    return [int(cost_ns[members].sum()) for members in window.rows]


def _objective_ns(window: Window, cost: Callable[[Pieces], IntArray], per_step: int) -> int:
    """Sum over steps of the slowest micro-batch, grouped by load, which no grouping beats."""
    return sum(sorted(_loads(window, cost), reverse=True)[::per_step])


def _by_load(window: Window, cost: Callable[[Pieces], IntArray]) -> Window:
    load = _loads(window, cost)
    order = sorted(range(len(load)), key=lambda j: (-load[j], j))
    return Window(pieces=window.pieces, rows=[window.rows[j] for j in order])
