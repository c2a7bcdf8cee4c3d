"""Packing as an integer linear program: Eq. 1 and Eq. 2 of the paper, with the PuLP package.

A binary variable for each short document and micro-batch would make the program too large. So only
long pieces have such variables. Short documents are grouped by length into classes, and the program
may divide the tokens of a class freely, like a fluid.

    minimise   sum_s y_s          subject to
    every long piece i is placed once:            sum_j x_ij = 1,  x_ij in {0, 1}
    micro-batch j has C tokens (Eq. 1), or        sum_i d_i x_ij + sum_k t_kj = C
    at most S_max tokens (Eq. 2):                                            <= S_max
    no micro-batch j of step s costs over y_s:    sum_i w_i x_ij + sum_k e_kj <= y_s
    all tokens and costs of class k are placed:   sum_j t_kj = T_k,  sum_j e_kj = E_k
    they cost what documents of class k cost:     lo_k t_kj <= e_kj <= hi_k t_kj

Piece i has d_i tokens and costs w_i ns. Variable x_ij is 1 if it is in micro-batch j, and y_s is
the cost of the slowest micro-batch of step s. Class k has T_k tokens that together cost E_k ns, and
its documents cost between lo_k and hi_k ns a token. Micro-batch j gets t_kj of its tokens, which
cost e_kj.

Every packing of whole short documents satisfies these constraints, so the program's minimum is a
lower bound on the cost of such packings. Coefficients are scaled so that 13 digits represent them
exactly, because numbers in the file for the solver CBC have 13 digits.
"""

# PuLP ships no complete types; every value that leaves this file is a float, int or list.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wlb.packing.ilp.solvers import Outcome, Solver, SolverLimits, modeller, run

TOLERANCE = 1e-6
"""Relative tolerance to which solvers satisfy a constraint."""


class Objective(StrEnum):
    """What packing by integer linear programming minimises."""

    # The cost of the slowest of all micro-batches that are packed together, as Eq. 1 and Eq. 2 are
    # printed. If one document costs more than micro-batches do on average, nearly every packing is
    # optimal by this objective.
    MAX = "max"
    # The sum over steps of the cost of the slowest micro-batch: the time that the steps take.
    SUM_OF_STEP_MAX = "sum_of_step_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidClass:
    """Short documents of similar length, whose tokens the solver may divide freely."""

    tokens: int  # total tokens of the documents
    cost_ns: int  # total cost of the documents
    least_rate: float  # ns per token of the cheapest document
    most_rate: float  # ns per token of the dearest document


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A solution of the integer linear program: which pieces and parts each micro-batch has."""

    bin_of: list[int]  # micro-batch of each long piece
    # For the classes of short documents that are divided freely (`FluidClass`):
    tokens: list[list[float]]  # tokens[k][j]: tokens of class k in micro-batch j
    cost_ns: list[list[float]]  # cost_ns[k][j]: cost of the tokens of class k in micro-batch j


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The data of an integer linear program: pieces to place, and micro-batches to fill."""

    lengths: list[int]  # tokens of the long pieces, in descending order
    costs_ns: list[int]  # costs of the long pieces, in the same order
    fluid: tuple[FluidClass, ...]  # classes of short pieces
    num_micro_batches: int  # number of micro-batches of all steps
    per_step: int  # number of micro-batches in a step
    capacity: int  # most tokens of a micro-batch
    full: bool  # whether the pieces have just enough tokens to fill all micro-batches

    @property
    def num_steps(self) -> int:
        """Number of steps: the number of micro-batches divided by those of one step."""
        return self.num_micro_batches // self.per_step

    @property
    def total_ns(self) -> int:
        """Cost of all pieces together in ns."""
        return sum(self.costs_ns) + sum(fluid.cost_ns for fluid in self.fluid)

    @property
    def num_binaries(self) -> int:
        """Number of binary variables: one for each piece in `lengths` and each micro-batch."""
        return len(self.lengths) * self.num_micro_batches

    @property
    def step_floors_ns(self) -> list[int]:
        """Lower bound on the cost of the slowest step, the second slowest, ..., shape [num_steps].

        Pieces longer than half a micro-batch cannot share one, so a step has at most `per_step` of
        them. Sort them by descending cost. Then the s-th slowest step (from 0) costs at least as
        much as piece s * per_step of this order.
        """
        exclusive = [
            cost
            for length, cost in zip(self.lengths, self.costs_ns, strict=True)
            if 2 * length > self.capacity
        ]
        exclusive.sort(reverse=True)
        exclusive += [0] * self.num_micro_batches
        return exclusive[: self.num_micro_batches : self.per_step]

    @property
    def trivial_bound_ns(self) -> int:
        """Lower bound, without a solver, on the sum over steps of the slowest micro-batch's cost.

        It is the largest of three values, in ns: the sum if all micro-batches cost the same, the
        cost of the most expensive piece, and the sum of the bounds of single steps
        (`step_floors_ns`).
        """
        mean = -(-self.total_ns // self.per_step)
        return max(mean, sum(self.step_floors_ns), max(self.costs_ns, default=0))

    def loads_ns(self, answer: Assignment) -> list[float]:
        """Return the cost of each micro-batch in ns in a solution of the integer linear program."""
        loads = [0.0] * self.num_micro_batches
        for cost, j in zip(self.costs_ns, answer.bin_of, strict=True):
            loads[j] += cost
        for costs in answer.cost_ns:
            loads = [load + cost for load, cost in zip(loads, costs, strict=True)]
        return loads

    def step_maxima_ns(self, answer: Assignment) -> list[float]:
        """Return, for each micro-batch, the cost in ns of the slowest micro-batch of its step."""
        loads, n = self.loads_ns(answer), self.per_step
        return [max(loads[j // n * n : j // n * n + n]) for j in range(self.num_micro_batches)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The result of a solver: the best assignment, and a lower bound on the objective."""

    assignment: Assignment | None  # None if the solver found nothing
    bound_ns: int  # no solution has an objective below this
    # How the solver ended: "optimal" (within the limit for the gap), "feasible" (the time limit
    # came first), "nothing_found" or "infeasible".
    status: str


def solve(problem: Problem, start: Assignment, *, solver: Solver, limits: SolverLimits) -> Solution:
    """Solve the integer linear program of `problem`.

    Args:
        problem: The pieces and micro-batches.
        start: A solution from which the solver starts, such as the greedy packing.
        solver: The software that solves it.
        limits: When the solver stops.

    Returns:
        The best assignment that was found, and a lower bound on the objective.
    """
    model = _PulpProgram(problem)
    model.start_at(_relabelled(problem, start))
    outcome = run(model.program, solver, limits)
    bound = outcome.bound * model.cost_scale * (1 - TOLERANCE)
    bound_ns = problem.trivial_bound_ns
    if math.isfinite(bound):
        bound_ns = max(bound_ns, math.ceil(bound))
    assignment = model.assignment() if outcome.has_values else None
    return Solution(assignment=assignment, bound_ns=bound_ns, status=_status(outcome))


def _status(outcome: Outcome) -> str:
    if outcome.is_infeasible:
        return "infeasible"
    if not outcome.has_values:
        return "nothing_found"
    return "optimal" if outcome.is_proven else "feasible"


def _relabelled(problem: Problem, start: Assignment) -> Assignment:
    """Renumber the micro-batches of `start` as the integer linear program requires.

    Of the solutions that differ only in how micro-batches are numbered, the program permits one
    (`_symmetry`).
    """
    bins = list(range(problem.num_micro_batches))
    if problem.num_steps == 1:
        first = dict(zip(reversed(start.bin_of), reversed(range(len(start.bin_of))), strict=True))
        bins.sort(key=lambda j: first.get(j, len(start.bin_of)))
    else:
        loads = problem.loads_ns(start)
        bins.sort(key=lambda j: -loads[j])
    name = {j: new for new, j in enumerate(bins)}
    return Assignment(
        bin_of=[name[j] for j in start.bin_of],
        tokens=[[row[j] for j in bins] for row in start.tokens],
        cost_ns=[[row[j] for j in bins] for row in start.cost_ns],
    )


class _PulpProgram:
    """The integer linear program as an object of the package PuLP, with its variables.

    Variables are named as at the top of this file. x[i][j] is 1 if long piece i is in micro-batch
    j. t[k][j] and e[k][j] are the tokens and the cost that micro-batch j gets of class k of short
    documents. y[s] is the cost of the slowest micro-batch of step s.
    """

    def __init__(self, problem: Problem) -> None:
        pulp = modeller()
        self.problem = problem
        # Scale costs and lengths to numbers of few digits (see the top of this file). Dividing
        # lengths by a power of two is exact.
        self.cost_scale = max(1.0, problem.total_ns / problem.num_micro_batches)
        self.token_scale = float(1 << max(0, problem.capacity.bit_length() - 11))
        self._expression = pulp.LpAffineExpression
        self.program = pulp.LpProblem("packing", pulp.LpMinimize)
        num, kinds = problem.num_micro_batches, range(len(problem.fluid))
        self.x: list[list[Any]] = [
            [self._variable(f"x_{i}_{j}", category="Binary") for j in range(num)]
            for i in range(len(problem.lengths))
        ]
        self.t = [[self._variable(f"t_{k}_{j}") for j in range(num)] for k in kinds]
        self.e = [[self._variable(f"e_{k}_{j}") for j in range(num)] for k in kinds]
        self.y = [self._variable(f"y_{s}") for s in range(problem.num_steps)]
        self.program.setObjective(self._sum((y, 1.0) for y in self.y))
        self._placed_once()
        self._micro_batches()
        self._symmetry()

    def _variable(self, name: str, *, category: str = "Continuous") -> Any:
        high = 1 if category == "Binary" else None
        return self.program.add_variable(name, 0, high, category)

    def _sum(self, terms: Iterable[tuple[Any, float]]) -> Any:
        return self._expression(list(terms))

    def _placed_once(self) -> None:
        for row in self.x:
            self.program.addConstraint(self._sum((x, 1.0) for x in row) == 1)
        for fluid, tokens, costs in zip(self.problem.fluid, self.t, self.e, strict=True):
            total = fluid.tokens / self.problem.capacity
            self.program.addConstraint(self._sum((t, 1.0) for t in tokens) == total)
            total = fluid.cost_ns / self.cost_scale
            self.program.addConstraint(self._sum((e, 1.0) for e in costs) == total)
            scale = self.problem.capacity / self.cost_scale
            for t, e in zip(tokens, costs, strict=True):
                self.program.addConstraint(e - fluid.most_rate * scale * t <= 0)
                self.program.addConstraint(e - fluid.least_rate * scale * t >= 0)

    def _micro_batches(self) -> None:
        problem = self.problem
        sizes = [length / self.token_scale for length in problem.lengths]
        costs = [cost / self.cost_scale for cost in problem.costs_ns]
        capacity = problem.capacity / self.token_scale
        for j in range(problem.num_micro_batches):
            tokens = [(row[j], size) for row, size in zip(self.x, sizes, strict=True)]
            size = self._sum(tokens + [(row[j], capacity) for row in self.t])
            self.program.addConstraint(size == capacity if problem.full else size <= capacity)
            load = [(row[j], cost) for row, cost in zip(self.x, costs, strict=True)]
            load += [(row[j], 1.0) for row in self.e]
            slowest = self.y[j // problem.per_step]
            self.program.addConstraint(self._sum([*load, (slowest, -1.0)]) <= 0)

    def _symmetry(self) -> None:
        """Exclude solutions that differ from others only in the numbering of micro-batches.

        - With one step, piece i may only go to micro-batches 0 to i.
        - With several steps, step s must cost at least as much as step s + 1.

        After this, step s is the s-th slowest step, whose cost is at least `step_floors_ns[s]`.
        These lower bounds are added too. A further constraint on the order of micro-batches inside
        a step made solvers slower.
        """
        if self.problem.num_steps == 1:
            for i, row in enumerate(self.x):
                for x in row[i + 1 :]:
                    x.upBound = 0
        for slower, faster in zip(self.y, self.y[1:], strict=False):
            self.program.addConstraint(slower - faster >= 0)
        for y, floor in zip(self.y, self.problem.step_floors_ns, strict=True):
            y.lowBound = floor / self.cost_scale

    def start_at(self, start: Assignment) -> None:
        """Give the variables the values of `start`, from which the solver will begin."""
        for row, j in zip(self.x, start.bin_of, strict=True):
            for i, x in enumerate(row):
                x.varValue = float(i == j)
        for variables, values, scale in (
            (self.t, start.tokens, self.problem.capacity),
            (self.e, start.cost_ns, self.cost_scale),
        ):
            for row, row_values in zip(variables, values, strict=True):
                for variable, value in zip(row, row_values, strict=True):
                    variable.varValue = value / scale
        maxima = self.problem.step_maxima_ns(start)
        for y, maximum in zip(self.y, maxima[:: self.problem.per_step], strict=True):
            y.varValue = maximum / self.cost_scale

    def assignment(self) -> Assignment:
        """Return the solution that the solver's variables have now.

        Each long piece goes to the micro-batch whose variable for this piece is largest.
        """
        capacity = self.problem.capacity
        return Assignment(
            bin_of=[max(range(len(row)), key=lambda j: row[j].varValue) for row in self.x],
            tokens=[[t.varValue * capacity for t in row] for row in self.t],
            cost_ns=[[e.varValue * self.cost_scale for e in row] for row in self.e],
        )
