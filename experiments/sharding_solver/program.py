"""The sharding of a micro-batch as an integer linear program, solved by HiGHS through PuLP.

minimise   linear * T + K + W(M)                            rows, attention, waits
x_cr in {0, 1}: chunk c is on rank r;  sum_r x_cr = 1;      t_kr, e_kr: tokens, work of a fluid
z_cr >= x_cr, z_cr >= z_(c+1)r: rank r reads c, as it has it or a later chunk of the document
T >= tokens of r;  K >= work of r;  M >= sum_c d_c (z_cr - x_cr), what r receives
M >= what r sends, at least d_c (readers of c - 1) where x_cr;  M >= longest document - T
W(M): of both passes, transfers of M rows less what hides them, each at least 0
"""

# PuLP ships no complete types; every value that leaves this file is a float, int or list.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.sharding_solver.case import Case
from wlb.cost import Transfers
from wlb.packing.ilp.solvers import Solver, SolverLimits, modeller, run
from wlb.plan import FloatArray, IntArray, UserError

ROWS = 1 << 16
"""Rows whose transfer shows what one row costs."""
TOLERANCE = 1e-6
"""Relative tolerance to which HiGHS satisfies a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An answer of the program. placed: the rank of each chunk, and the fluids' tokens, shape
    [num_classes, cp]; None if nothing was found. objective, bound: in ns. is_proven: the answer is
    within the gap."""

    placed: tuple[IntArray, FloatArray] | None
    objective: float
    bound: float
    is_proven: bool


def solve(case: Case, *, time_limit_s: float, gap: float = 1e-4, seed: int = 0) -> Solution:
    """Returns the best answer found from our plan on. UserError for ranks of which some share a
    node and some do not, and for own attention that hides an exchange: both are not linear."""
    program = _Program(case)
    rank, fluid = case.of_ours()
    program.start_at(rank, fluid)
    limits = SolverLimits(time_limit_s=time_limit_s, gap=gap, seed=seed)
    outcome = run(program.problem, Solver.HIGHS, limits)
    bound = outcome.bound * program.scale * (1 - TOLERANCE) if math.isfinite(outcome.bound) else 0.0
    placed, objective = program.answer() if outcome.has_values else (None, math.inf)
    return Solution(placed=placed, objective=objective, bound=bound, is_proven=outcome.is_proven)


class _Program:
    """The PuLP problem of a case, and its variables. Times are in units of `scale`, tokens in a
    rank's share."""

    def __init__(self, case: Case) -> None:
        cost = case.cost
        if cost.overlaps:
            raise UserError("the program does not know what own attention hides; set overlaps off")
        if 1 < cost.cp_ranks_per_node < case.cp:
            raise UserError(f"{case.cp} ranks are on nodes of {cost.cp_ranks_per_node} of them")
        self.case = case
        self.share = int(case.lengths.sum()) / case.cp
        self.scale = case.total_ns / case.cp + case.linear_ns * self.share
        self._pulp = modeller()
        self.problem = self._pulp.LpProblem("sharding", self._pulp.LpMinimize)
        chunks, ranks = range(case.piece.size), range(case.cp)
        self.x = [[self._new(f"x_{c}_{r}", integer=True) for r in ranks] for c in chunks]
        self.z = [[self._new(f"z_{c}_{r}", most=1) for r in ranks] for c in chunks]
        self.sent = [[self._new(f"s_{c}_{r}") for r in ranks] for c in chunks]
        self.t = [[self._new(f"t_{k}_{r}") for r in ranks] for k in range(len(case.fluids))]
        self.e = [[self._new(f"e_{k}_{r}") for r in ranks] for k in range(len(case.fluids))]
        self.rows, self.kernels, self.moved = (self._new(name) for name in ("T", "K", "M"))
        self.waits = [self._new(name) for name in ("there", "again", "back")]
        linear = case.linear_ns * self.share / self.scale
        parts = [(self.rows, linear), (self.kernels, 1.0), *((w, 1.0) for w in self.waits)]
        self.problem.setObjective(self._sum(parts))
        self._placed()
        self._read()
        self._ranks()
        self._waits()

    def _new(self, name: str, *, integer: bool = False, most: float | None = None) -> Any:
        kind = "Binary" if integer else "Continuous"
        return self.problem.add_variable(name, 0, 1 if integer else most, kind)

    def _sum(self, terms: Iterable[tuple[Any, float]]) -> Any:
        return self._pulp.LpAffineExpression(list(terms))

    def _add(self, constraint: Any) -> None:
        self.problem.addConstraint(constraint)

    def _placed(self) -> None:
        for c, row in enumerate(self.x):
            self._add(self._sum((x, 1.0) for x in row) == 1)
            for x in row[c + 1 :]:  # ranks are alike, so the first chunks name them
                x.upBound = 0
        for fluid, tokens, work in zip(self.case.fluids, self.t, self.e, strict=True):
            self._add(self._sum((t, 1.0) for t in tokens) == fluid.tokens / self.share)
            self._add(self._sum((e, 1.0) for e in work) == fluid.work / self.scale)
            per = self.share / self.scale
            for t, e in zip(tokens, work, strict=True):
                self._add(e - fluid.most_rate * per * t <= 0)
                self._add(e - fluid.least_rate * per * t >= 0)

    def _read(self) -> None:
        case = self.case
        for c, row in enumerate(self.z):
            is_last = c + 1 == case.piece.size or case.piece[c + 1] != case.piece[c]
            for r, z in enumerate(row):
                self._add(z - self.x[c][r] >= 0)
                if not is_last:
                    self._add(z - self.z[c + 1][r] >= 0)
                # What the rank sends of a chunk that it has: one copy to each other reader.
                others = [(self.z[c][i], 1.0) for i in range(case.cp) if i != r]
                most = float(case.cp - 1)
                mine = [(self.x[c][r], most), (self.sent[c][r], -1.0)]
                self._add(self._sum([*others, *mine]) <= most)

    def _ranks(self) -> None:
        case = self.case
        sizes = (case.sizes / self.share).tolist()
        work = (case.work / self.scale).tolist()
        chunks = range(len(sizes))
        for r in range(case.cp):
            tokens = [(self.x[c][r], sizes[c]) for c in chunks]
            self._add(self._sum([*tokens, *((t[r], 1.0) for t in self.t), (self.rows, -1.0)]) <= 0)
            mine = [(self.x[c][r], work[c]) for c in chunks] + [(e[r], 1.0) for e in self.e]
            launches = case.launches_ns / self.scale
            self._add(self._sum([*mine, (self.kernels, -1.0)]) <= -launches)
            received = [(self.z[c][r], sizes[c]) for c in chunks]
            received += [(self.x[c][r], -sizes[c]) for c in chunks]
            self._add(self._sum([*received, (self.moved, -1.0)]) <= 0)
            sent = [(self.sent[c][r], sizes[c]) for c in chunks]
            self._add(self._sum([*sent, (self.moved, -1.0)]) <= 0)
        longest = int(case.lengths.max()) / self.share
        self._add(self.moved + self.rows >= longest)
        self.rows.lowBound = 1

    def _waits(self) -> None:
        none, some = (self._transfers(rows) for rows in (0, ROWS))
        hidden = self.case.cost.products_ns(int(self.case.lengths.sum()))
        for wait, least, most, hides in zip(self.waits, none, some, hidden, strict=True):
            slope = (most - least) / ROWS * self.share / self.scale
            self._add(wait - slope * self.moved >= (least - hides) / self.scale)

    def _transfers(self, rows: int) -> Transfers:
        moved = np.zeros((self.case.cp, self.case.cp), np.int64)
        moved[0, 1] = rows
        tokens = int(self.case.lengths.sum())
        return self.case.cost.transfers_ns(moved, tokens, cp=self.case.cp)

    def start_at(self, rank: IntArray, fluid: FloatArray) -> None:
        """Sets the variables to an answer, its ranks renamed in the order of the chunks."""
        seen = list(dict.fromkeys(rank.tolist()))
        seen += [r for r in range(self.case.cp) if r not in seen]
        name = {r: new for new, r in enumerate(seen)}
        for c, row in enumerate(self.x):
            for r, x in enumerate(row):
                x.varValue = float(name[int(rank[c])] == r)
        for one, t, e, tokens in zip(self.case.fluids, self.t, self.e, fluid, strict=True):
            for r, new in name.items():
                t[new].varValue = float(tokens[r]) / self.share
                e[new].varValue = float(tokens[r]) / one.tokens * one.work / self.scale
        self._settle()

    def _settle(self) -> None:
        """Sets all that follows from where chunks and fluids are."""
        case = self.case
        for c in reversed(range(case.piece.size)):
            is_last = c + 1 == case.piece.size or case.piece[c + 1] != case.piece[c]
            for r in range(case.cp):
                later = 0.0 if is_last else self.z[c + 1][r].varValue
                self.z[c][r].varValue = max(self.x[c][r].varValue, later)
            readers = sum(z.varValue for z in self.z[c])
            for r in range(case.cp):
                self.sent[c][r].varValue = (readers - 1) * self.x[c][r].varValue
        for name, variable in (("T", self.rows), ("K", self.kernels), ("M", self.moved)):
            variable.varValue = self.least(name)
        for i, wait in enumerate(self.waits):
            wait.varValue = self.least_wait(i)

    def least(self, name: str) -> float:
        """Returns the lowest value of T, K or M for where chunks and fluids are."""
        case = self.case
        at = np.array([[x.varValue for x in row] for row in self.x])
        match name:
            case "T":
                fluid = sum((np.array([t.varValue for t in row]) for row in self.t), 0.0)
                return float(max(1.0, (at.T @ (case.sizes / self.share) + fluid).max()))
            case "K":
                fluid = sum((np.array([e.varValue for e in row]) for row in self.e), 0.0)
                most = (at.T @ (case.work / self.scale) + fluid).max()
                return float(most) + case.launches_ns / self.scale
            case _:
                reads = np.array([[z.varValue for z in row] for row in self.z])
                sends = np.array([[s.varValue for s in row] for row in self.sent])
                sizes = case.sizes / self.share
                least = int(case.lengths.max()) / self.share - self.least("T")
                return float(max(((reads - at).T @ sizes).max(), (sends.T @ sizes).max(), least, 0))

    def least_wait(self, i: int) -> float:
        none, some = (self._transfers(rows)[i] for rows in (0, ROWS))
        hides = self.case.cost.products_ns(int(self.case.lengths.sum()))[i]
        rows = self.moved.varValue * self.share
        return max(0.0, none + (some - none) / ROWS * rows - hides) / self.scale

    def answer(self) -> tuple[tuple[IntArray, FloatArray], float]:
        """Returns the variables' values, binaries rounded, and the objective in ns."""
        rank = [max(range(len(row)), key=lambda r: row[r].varValue) for row in self.x]
        fluid = np.array([[t.varValue for t in row] for row in self.t]).reshape(-1, self.case.cp)
        parts = (self.kernels, *self.waits)
        value = sum(float(v.varValue) for v in parts) * self.scale
        value += self.rows.varValue * self.share * self.case.linear_ns
        return (np.array(rank, np.int64), fluid * self.share), float(value)
