"""Policies `ilp_fixed` and `ilp_var_len`: packing by integer linear programming (Eq. 1 and 2).

- `ilp_fixed` is the paper's Fixed-Len Solver: it packs W batches into windows of C tokens (Eq. 1).
- `ilp_var_len` packs the whole documents of W batches into micro-batches of at most S_max tokens
  (Eq. 2).

The solver starts from the greedy packing, and treats short documents as a fluid that divides
freely. There are two deviations from the paper. The default objective is
`Objective.SUM_OF_STEP_MAX`, the sum over steps of the slowest micro-batch, because the maximum over
all micro-batches is the same for nearly all packings if one document is very long. And the solver
is CBC or HiGHS with a time limit.

Guarantees: the objective of a packing is never worse than that of the greedy packing, and no
packing has an objective below `IlpReport.bound_ns`. If the solver stops at its time limit, hosts
may find different packings, so pack offline or on one rank.
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
"""A packing whose relative gap to the lower bound is at most this counts as optimal. Solvers and
bounds are accurate to 1e-6, so smaller gaps may be rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpOptions:
    """Options of packing by integer linear programming."""

    solver: Solver = Solver.HIGHS  # the software that solves the integer linear program
    objective: Objective = Objective.SUM_OF_STEP_MAX  # what is minimised
    time_limit_s: float = 10.0  # most time that the solver may take for one packing
    gap_limit: float = 1e-4  # stop at this relative gap between objective and lower bound
    # Documents of at least this many tokens have a binary variable for each micro-batch. To save
    # variables, the solver may divide shorter ones over micro-batches; afterwards they are placed
    # whole. None = C // 16; 0 = all documents have binary variables.
    divisible_below: int | None = None
    threads: int = 1  # threads of the solver
    seed: int = 0  # seed of the solver's random decisions

    def __post_init__(self) -> None:
        object.__setattr__(self, "solver", Solver(self.solver))
        object.__setattr__(self, "objective", Objective(self.objective))
        if not 0 < self.time_limit_s < math.inf:
            raise UserError(
                f"time_limit_s = {self.time_limit_s} must be a finite number of seconds above 0"
            )
        if not 0 <= self.gap_limit < 1:
            raise UserError(
                f"gap_limit = {self.gap_limit} must be at least 0 and below 1; set for example "
                "1e-4 to stop within 0.01% of the optimum"
            )
        check_at_least("threads", self.threads, 1)
        if self.divisible_below is not None:
            check_at_least("divisible_below", self.divisible_below, 0)

    def below(self, context_window: int) -> int:
        """Return the length in tokens below which the solver may divide documents freely.

        It is `divisible_below`, or 1/16 of the context window if `divisible_below` is None.
        """
        return context_window // 16 if self.divisible_below is None else self.divisible_below


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpReport:
    """The quality of a packing that the solver made of W global batches."""

    solver: Solver  # the solver that was used
    # How the solver ended: "optimal" (within gap_limit of the best packing in which short documents
    # may be divided freely), "feasible" (the time limit came first), "nothing_found", or
    # "infeasible", which would be an error of the solver.
    status: str
    objective_ns: int  # objective of the packing that was returned
    # Lower bound on the objective of any packing of the same pieces that cuts fewer than
    # num_micro_batches of them, and none that costs more than the most expensive piece that this
    # packing cuts. If this packing cuts no piece, the bound holds only for packings that cut none.
    # The parts of long documents that the greedy packing cuts count as pieces here.
    bound_ns: int
    greedy_objective_ns: int  # objective of the greedy packing
    # Whether the greedy packing was returned. This happens if the solver found no packing, or one
    # that was no better once short documents were placed whole instead of being divided freely.
    kept_greedy: bool
    num_binaries: int  # number of binary variables in the integer linear program
    time_s: float  # seconds that packing took

    @property
    def gap(self) -> float:
        """Upper limit on how much lower the objective could be: (objective - bound) / objective."""
        return (self.objective_ns - self.bound_ns) / max(1, self.objective_ns)

    @property
    def optimal(self) -> bool:
        """Whether the objective equals `bound_ns`, except for rounding errors.

        Then no packing is better, except perhaps one to which the bound does not apply, because it
        cuts many or expensive pieces (see `bound_ns`).
        """
        return self.gap <= OPTIMAL_GAP


ReportSink = Callable[[IlpReport], None]
"""A function that is called with the report of each packing that the solver made."""


def solve_fixed(
    pieces: Pieces, *, options: PackerOptions, ilp: IlpOptions, num_micro_batches: int
) -> tuple[Window, IlpReport]:
    """Pack `pieces` into windows of C tokens with the ILP solver (Eq. 1 of the paper).

    Args:
        pieces: The pieces to pack.
        options: Options of all policies.
        ilp: Options of the solver.
        num_micro_batches: Number of windows, a multiple of the micro-batches of a step.

    Returns:
        The packing, and a report of its quality.

    Raises:
        UserError: If the pieces do not fit.
    """
    window, work = options.context_window, options.attention(pieces)
    start = greedy(pieces, work, num_micro_batches=num_micro_batches, capacity=window)
    return _solve(pieces, start, options, ilp, options.attention, capacity=window, may_cut=True)


def solve_var_len(
    pieces: Pieces, *, options: PackerOptions, ilp: IlpOptions, num_micro_batches: int, s_max: int
) -> tuple[Window, IlpReport]:
    """Pack `pieces` whole into micro-batches of at most S_max tokens with the ILP solver (Eq. 2).

    Args:
        pieces: The pieces to pack.
        options: Options of all policies.
        ilp: Options of the solver.
        num_micro_batches: Number of micro-batches, a multiple of those of a step.
        s_max: Most tokens of a micro-batch.

    Returns:
        The packing, and a report of its quality.

    Raises:
        UserError: If the greedy packing, from which the solver starts, cannot place all pieces.
    """
    start, rest = _greedy_var_len(pieces, options, num_micro_batches, s_max)
    if len(rest):
        raise UserError(
            f"{len(rest)} of {len(pieces)} pieces ({pieces.num_tokens} tokens in all) do not fit "
            f"into {num_micro_batches} micro-batches of at most s_max = {s_max} tokens; use more "
            "micro-batches, or raise s_max"
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
    """Place pieces by Algorithm 1: leftovers first, then the others, each from long to short.

    Args:
        pieces: The pieces to pack.
        options: Options of all policies.
        num_micro_batches: Number of micro-batches.
        s_max: Most tokens of a micro-batch.
        num_leftovers: Number of pieces at the beginning that earlier steps left over.

    Returns:
        The packing, and the pieces that do not fit.
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
    """Pack `pieces` with the solver; return `start` if the solver finds no better packing.

    Args:
        pieces: The pieces to pack.
        start: The greedy packing of them.
        options: Options of all policies.
        ilp: Options of the solver.
        cost: Returns the cost of each piece in ns.
        capacity: Most tokens of a micro-batch.
        may_cut: Whether documents may be cut.
    """
    began = time.perf_counter()
    num, per_step = len(start.rows), options.num_micro_batches
    if num < 1 or num % per_step:
        raise UserError(
            f"{num} micro-batches cannot be packed, because they do not make whole steps of "
            f"{per_step} micro-batches; use a multiple of {per_step}"
        )
    if ilp.objective == Objective.MAX:
        # If all micro-batches form one step, the sum over steps is the maximum over all of them.
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
    """Return the sum over steps of the cost of the slowest micro-batch, in ns.

    Micro-batches are grouped into steps by descending cost, which minimises this sum.

    Args:
        window: The micro-batches.
        cost: Returns the cost of each piece in ns.
        per_step: Number of micro-batches in a step.
    """
    return sum(sorted(window.loads(cost(window.pieces)), reverse=True)[::per_step])


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpFixedPacker(FixedPacker):
    """Packs W global batches into windows of C tokens with the ILP solver (`solve_fixed`).

    The division into steps and the carry are the same as in `FixedPacker`.
    """

    policy: ClassVar[str] = "ilp_fixed"
    ilp: IlpOptions = field(default_factory=IlpOptions)  # options of the solver
    # Called with the report of each packing, unless None. Reports are not part of a plan, because a
    # plan must not depend on how long a solver took. They are not stored here either, because
    # `push` is pure.
    on_report: ReportSink | None = field(default=None, compare=False, repr=False)

    def pack(self, pieces: Pieces, num_micro_batches: int) -> Window:
        """Pack `pieces` into `num_micro_batches` windows of C tokens with the ILP solver."""
        window, report = solve_fixed(
            pieces, options=self.options, ilp=self.ilp, num_micro_batches=num_micro_batches
        )
        if self.on_report is not None:
            self.on_report(report)
        return window


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpVarLenPacker(PolicyPacker):
    """Packs W batches into W steps with the ILP solver (Eq. 2); steps come in a random order.

    Batches without documents do not count towards W, and steps without documents are left out. If
    the greedy packing cannot place a document, it is left over, and is placed first when the next W
    batches are packed. In the carry, slot 0 has these leftovers, and slot i has the documents of
    the i-th of the next W batches.
    """

    policy: ClassVar[str] = "ilp_var_len"
    slots: ClassVar[CarrySlots] = CarrySlots.NUMBERED
    s_max: int  # most tokens of a micro-batch, at least the context window
    window_batches: int = 1  # W, global batches packed together
    ilp: IlpOptions = field(default_factory=IlpOptions)  # options of the solver
    # Called with the report of each packing, unless None (see `IlpFixedPacker`).
    on_report: ReportSink | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_at_least("window_batches", self.window_batches, 1)
        check_s_max(self.s_max, self.options)

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Collect W batches, then pack them; return the plans, if any, and the new carry.

        At the end of the data `batch` is None, and everything that waits is packed.
        """
        step, num_batches = carry.next_step, int(carry.slot.max(initial=LEFTOVER))
        arrived = self.options.arrived(batch, step + num_batches)
        num_batches += len(arrived) > 0
        stream = Pieces.concat(carry.pieces, arrived)
        slot = np.concatenate([carry.slot, np.full(len(arrived), num_batches, np.int64)])
        plans: list[PackingPlan] = []
        while len(stream) and (batch is None or num_batches >= self.window_batches):
            if not num_batches:
                # Only leftovers remain at the end of the data. Give them as many steps as their
                # tokens fill.
                num_batches = -(-stream.num_tokens // self.options.tokens_per_step)
            made, stream = self._steps(stream, int((slot == LEFTOVER).sum()), num_batches, step)
            plans += made
            step, num_batches = step + len(made), 0
            slot = np.full(len(stream), LEFTOVER, np.int64)
        return tuple(plans), self._carry(stream, step, slot)

    def _steps(
        self, pieces: Pieces, num_leftovers: int, num_steps: int, step: int
    ) -> tuple[tuple[PackingPlan, ...], Pieces]:
        """Pack pieces into steps with the ILP solver.

        Args:
            pieces: The pieces to pack.
            num_leftovers: Number of pieces at the beginning that earlier steps left over.
            num_steps: Number of steps to make.
            step: Index of the first step.

        Returns:
            The plans of the steps, and the pieces that did not fit.
        """
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
        # Shuffle the steps: `window.rows` are sorted by load, so the slowest step would always come
        # first.
        mixed = permuted(range(num_steps), self.options, step=step, index=STEP_ORDER)
        steps = [steps[int(i)] for i in mixed if any(steps[int(i)])]
        return self._plans(step, window.pieces, steps, num_waiting_tokens=rest.num_tokens), rest
