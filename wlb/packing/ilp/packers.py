"""ilp: packing by integer linear program, the paper's Fixed-Len Solver (Eq. 1) and its Eq. 2.

`ilp_fixed` packs windows of `fixed`, `ilp_var_len` whole documents of W batches under S_max. The
solver starts from the greedy packing; short documents are a fluid (divisible totals). Deviations:
`Objective.SUM_OF_STEP_MAX` by default (one maximum is degenerate once a document dominates), CBC or
HiGHS for a limited time. Guarantees: never slower than greedy by the objective;
`IlpReport.bound_ns` is a lower bound. Solves stopped by time differ between hosts: solve on one.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from wlb.packing.base import (
    LEFTOVER,
    STEP_ORDER,
    PackerOptions,
    PolicyPacker,
    Pushed,
    check_fits,
    check_s_max,
    permuted,
)
from wlb.packing.carry_slots import CarrySlots
from wlb.packing.fixed import FixedPacker, Window, greedy
from wlb.packing.ilp.fluid import Shape, items_of, placed
from wlb.packing.ilp.model import Objective, solve
from wlb.packing.ilp.solvers import Solver, SolverLimits
from wlb.packing.placement import place
from wlb.plan import Carry, GlobalBatch, IntArray, PackingPlan, Pieces, UserError, check_at_least

OPTIMAL_GAP = 1e-5
"""Gaps up to this are rounding errors: solvers and bounds work to 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpOptions:
    """How windows are solved.

    time_limit_s: for each window, in the solver. gap_limit: relative gap at which it stops.
    divisible_below: tokens; shorter documents are placed as divisible totals, longer ones by a
    binary each. None = C // 16, 0 = every document has binaries.
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
            raise UserError(f"time_limit_s = {self.time_limit_s} must be a positive number")
        if not 0 <= self.gap_limit < 1:
            raise UserError(f"gap_limit = {self.gap_limit} must be in [0, 1), e.g. 1e-4 for 0.01%")
        check_at_least("threads", self.threads, 1)
        if self.divisible_below is not None:
            check_at_least("divisible_below", self.divisible_below, 0)

    def below(self, context_window: int) -> int:
        """`divisible_below`, in tokens."""
        return context_window // 16 if self.divisible_below is None else self.divisible_below


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpReport:
    """Quality of a window's packing.

    objective_ns: of the packing that was returned, by its true cost; greedy_objective_ns: of the
    greedy one. bound_ns: lower bound on the objective of every packing that cuts at most
    num_micro_batches - 1 pieces, none more expensive than the most expensive one that this packing
    cuts (the parts into which greedy cuts a long document are pieces of their own). status: how the
    solver ended: "optimal" (to gap_limit, for the fluid problem), "feasible" (out of time),
    "nothing_found", or "infeasible", which would be an error of the solver. kept_greedy: the greedy
    packing was returned, because the solver's is not better once its fluid is replaced by
    documents.
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
        """No packing that `bound_ns` covers is better."""
        return self.gap <= OPTIMAL_GAP


ReportSink = Callable[[IlpReport], None]


def solve_fixed(
    pieces: Pieces, *, options: PackerOptions, ilp: IlpOptions, num_micro_batches: int
) -> tuple[Window, IlpReport]:
    """Eq. 1: pack `pieces` into windows of C tokens; UserError if they do not fit."""
    window, work = options.context_window, options.attention(pieces)
    start = greedy(pieces, work, num_micro_batches=num_micro_batches, capacity=window)
    return _solve(pieces, start, options, ilp, options.attention, capacity=window, may_cut=True)


def solve_var_len(
    pieces: Pieces, *, options: PackerOptions, ilp: IlpOptions, num_micro_batches: int, s_max: int
) -> tuple[Window, IlpReport]:
    """Eq. 2: pack `pieces`, none of them cut, into micro-batches of at most S_max tokens.

    UserError if the greedy packing, from which the solver starts, cannot place them all.
    """
    start, rest = _greedy_var_len(pieces, options, num_micro_batches, s_max)
    if len(rest):
        raise UserError(
            f"{len(rest)} of {len(pieces)} pieces ({pieces.num_tokens} tokens) do not fit "
            f"{num_micro_batches} micro-batches of s_max = {s_max} tokens; use more micro-batches "
            f"or a larger s_max"
        )
    cost = options.workloads
    return _solve(start.pieces, start, options, ilp, cost, capacity=s_max, may_cut=False)


def _greedy_var_len(
    pieces: Pieces,
    options: PackerOptions,
    num_micro_batches: int,
    s_max: int,
    *,
    num_leftovers: int = 0,
) -> tuple[Window, Pieces]:
    """Algorithm 1's placement (leftovers first, then longest first), and the pieces that do not
    fit.
    """
    check_s_max(s_max, options)
    check_fits(pieces, s_max)
    is_new = np.arange(len(pieces)) >= num_leftovers
    pieces = pieces.take(np.lexsort((-pieces.length, is_new)))
    work = options.workloads(pieces).tolist()
    rows, rest = place(
        pieces.length.tolist(), work, num_micro_batches=num_micro_batches, s_max=s_max
    )
    kept = np.setdiff1d(np.arange(len(pieces)), rest)
    rows = [np.searchsorted(kept, members).tolist() for members in rows]
    return Window(pieces=pieces.take(kept), rows=rows), pieces.take(rest)


def _solve(
    pieces: Pieces,
    start: Window,
    options: PackerOptions,
    ilp: IlpOptions,
    cost: Callable[[Pieces], IntArray],
    *,
    capacity: int,
    may_cut: bool,
) -> tuple[Window, IlpReport]:
    """Return the better of `start`, which is a packing of `pieces`, and the solver's improvement of
    it.
    """
    began = time.perf_counter()
    num, per_step = len(start.rows), options.num_micro_batches
    if num < 1 or num % per_step:
        raise UserError(f"num_micro_batches = {num} is not a multiple of the {per_step} per step")
    if ilp.objective == Objective.MAX:
        per_step = num
    shape = Shape(num_micro_batches=num, per_step=per_step, capacity=capacity, may_cut=may_cut)
    below = ilp.below(options.context_window)
    items = items_of(pieces, start, shape=shape, divisible_below=below, cost=cost)
    limits = SolverLimits(
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
    return window.by_load(cost(window.pieces)), report


def _objective_ns(window: Window, cost: Callable[[Pieces], IntArray], per_step: int) -> int:
    """Sum over steps of the slowest micro-batch; steps group micro-batches by load, which is
    optimal.
    """
    return sum(sorted(window.loads(cost(window.pieces)), reverse=True)[::per_step])


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpFixedPacker(FixedPacker):
    """`solve_fixed` behind the packer protocol; windows, steps and carry are those of `fixed`.

    on_report: called with each window's report. The report is no part of the result, because a plan
    must not depend on how long a solver took, and is not kept here, because `push` is pure.
    """

    policy: ClassVar[str] = "ilp_fixed"
    ilp: IlpOptions = field(default_factory=IlpOptions)
    on_report: ReportSink | None = field(default=None, compare=False, repr=False)

    def pack(self, pieces: Pieces, num_micro_batches: int) -> Window:
        window, report = solve_fixed(
            pieces, options=self.options, ilp=self.ilp, num_micro_batches=num_micro_batches
        )
        if self.on_report is not None:
            self.on_report(report)
        return window


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpVarLenPacker(PolicyPacker):
    """`solve_var_len` behind the packer protocol: W batches become W steps, in a seeded order.

    Carry: slot 0 = leftovers of the last window, slot i = the i-th batch of the next one. Batches
    without documents do not count; steps without documents are left out. Documents that greedy
    cannot place within S_max are left over and come first in the next window. s_max: longest
    micro-batch in tokens, at least the context window. on_report: as in `IlpFixedPacker`.
    """

    policy: ClassVar[str] = "ilp_var_len"
    slots: ClassVar[CarrySlots] = CarrySlots.NUMBERED
    s_max: int
    window_batches: int = 1
    ilp: IlpOptions = field(default_factory=IlpOptions)
    on_report: ReportSink | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_at_least("window_batches", self.window_batches, 1)
        check_s_max(self.s_max, self.options)

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        step, num_batches = carry.next_step, int(carry.slot.max(initial=LEFTOVER))
        arrived = self.options.arrived(batch, step + num_batches)
        num_batches += len(arrived) > 0
        stream = Pieces.concat(carry.pieces, arrived)
        slot = np.concatenate([carry.slot, np.full(len(arrived), num_batches, np.int64)])
        plans: list[PackingPlan] = []
        while len(stream) and (batch is None or num_batches >= self.window_batches):
            # Only leftovers remain, at the end of the data.
            if not num_batches:
                num_batches = -(-stream.num_tokens // self.options.tokens_per_step)
            made, stream = self._steps(stream, int((slot == LEFTOVER).sum()), num_batches, step)
            plans += made
            step, num_batches = step + len(made), 0
            slot = np.full(len(stream), LEFTOVER, np.int64)
        return tuple(plans), self._carry(stream, step, slot)

    def _steps(
        self, pieces: Pieces, num_leftovers: int, num_steps: int, step: int
    ) -> tuple[tuple[PackingPlan, ...], Pieces]:
        """Return a window's plans and the pieces left over."""
        num = self.num_micro_batches
        start, rest = _greedy_var_len(
            pieces, self.options, num_steps * num, self.s_max, num_leftovers=num_leftovers
        )
        options, cost = self.options, self.options.workloads
        window, report = _solve(
            start.pieces, start, options, self.ilp, cost, capacity=self.s_max, may_cut=False
        )
        if self.on_report is not None:
            self.on_report(report)
        steps = [window.rows[i * num : (i + 1) * num] for i in range(num_steps)]
        # `window.rows` are sorted by load: without this permutation the heaviest step would always
        # come first.
        mixed = permuted(range(num_steps), self.options, step=step, index=STEP_ORDER)
        steps = [steps[int(i)] for i in mixed if any(steps[int(i)])]
        return self._plans(step, window.pieces, steps, num_waiting_tokens=rest.num_tokens), rest
