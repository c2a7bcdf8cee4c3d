"""Runs a PuLP model on CBC or HiGHS; no other file uses their untyped interfaces.

A solve starts from the values of its variables and ends at the relative gap or the time limit, so
the same model may end elsewhere on a slower machine. PuLP has no warm start for HiGHS (set between
building and running) and the bound on the objective (read from HiGHS's model or CBC's log).
CBC is started by path, because PuLP's class for the binary it ships warns that PuLP 4 drops it.
"""

# PuLP and highspy ship no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false
# pyright: reportMissingImports=false

import importlib
import math
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

from wlb.data.leftovers import temporary_folder
from wlb.plan import UserError

_PRINTED = 0.0005
"""Largest rounding error of the three decimals with which CBC prints a bound."""
_LOWER_BOUND = re.compile(r"^Lower bound:\s+(\S+)\s*$", re.MULTILINE)
_OBJECTIVE = re.compile(r"^Objective value:\s+(\S+)\s*$", re.MULTILINE)


class Solver(StrEnum):
    """Solver of the model: CBC ships with PuLP, HiGHS is the package highspy."""

    CBC = "cbc"
    HIGHS = "highs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """When a solve ends. gap: relative difference of objective and bound; seed: the solver's."""

    time_limit_s: float
    gap: float
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a solve ended; values are left in the model's variables if `has_values`.

    bound: no solution has a lower objective; -inf if the solver proved nothing.
    """

    has_values: bool
    is_proven: bool
    is_infeasible: bool
    bound: float


def modeller() -> Any:
    """The module pulp; UserError if it is not installed."""
    return _module("pulp", "an ILP is modelled in the package")


def run(problem: Any, solver: Solver, limits: SolverLimits) -> Outcome:
    """Minimise the PuLP `problem` from its variables' values; UserError for a missing solver."""
    match solver:
        case Solver.HIGHS:
            return _run_highs(problem, limits)
        case Solver.CBC:
            return _run_cbc(problem, limits)


def _module(name: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{purpose} {name}, which is not installed: pip install {name}") from error


def _run_highs(problem: Any, limits: SolverLimits) -> Outcome:
    highspy: Any = _module("highspy", 'solver = "highs" is the package')
    # HiGHS keeps one pool of threads a process and refuses to run with another number of them.
    highspy.Highs.resetGlobalScheduler(True)
    api = modeller().HiGHS(
        msg=False,
        gapRel=limits.gap,
        threads=limits.threads,
        timeLimit=limits.time_limit_s,
        random_seed=limits.seed % 2**31,
    )
    # These are the steps of the interface's solve(); the start has to be set between building the
    # model and running it.
    with _without_banner():
        api.createAndConfigureSolver(problem)
    api.buildSolverModel(problem)
    model, columns = problem.solverModel, problem.variables()
    start = highspy.HighsSolution()
    start.col_value = [float(column.varValue or 0) for column in columns]
    model.setSolution(start)
    api.callSolver(problem)
    status, info = model.getModelStatus(), model.getInfo()
    ended = highspy.HighsModelStatus
    if status in (ended.kNotset, ended.kLoadError, ended.kModelError, ended.kSolveError):
        raise RuntimeError(f"HiGHS failed: {model.modelStatusToString(status)}")
    has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if has_values:
        for column, value in zip(columns, model.getSolution().col_value, strict=True):
            column.varValue = value
    is_proven = status == ended.kOptimal
    # Without binaries there is no search tree: the objective of the linear program is its bound.
    bound = info.mip_dual_bound if problem.isMIP() else info.objective_function_value
    return Outcome(
        has_values=has_values,
        is_proven=is_proven,
        is_infeasible=status == ended.kInfeasible,
        bound=bound if is_proven or problem.isMIP() else -math.inf,
    )


@contextmanager
def _without_banner() -> Generator[None]:
    """Sends file descriptor 1 to nowhere: HiGHS prints its version when an object of it is made,
    before any option can silence it, and would mix that with the JSON of `wlb plan --json`.
    """
    sys.stdout.flush()
    with open(os.devnull, "wb") as nowhere:
        kept = os.dup(1)
        try:
            os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _run_cbc(problem: Any, limits: SolverLimits) -> Outcome:
    pulp = modeller()
    bundled = getattr(pulp, "PULP_CBC_CMD", None)
    # A seed of 0 means the time of day to CBC.
    seed = 1 + limits.seed % (2**31 - 1)
    with temporary_folder("solver") as folder:
        log = folder / "cbc.log"
        api = pulp.COIN_CMD(
            path=bundled.pulp_cbc_path if bundled else None,
            msg=False,
            gapRel=limits.gap,
            # `threads=1` starts CBC's threaded mode, which sometimes waits ten seconds for a lost
            # wake-up; its default is one thread without that mode.
            threads=limits.threads if limits.threads > 1 else None,
            timeLimit=limits.time_limit_s,
            warmStart=True,
            logPath=str(log),
            options=[f"randomCbcSeed {seed}", f"randomSeed {seed}"],
        )
        if not api.available():
            raise UserError(
                'solver = "cbc" needs the cbc program, which PuLP before version 4 ships: '
                "pip install 'pulp<4'"
            )
        problem.solve(api)
        text = log.read_text()
    constants = pulp.constants
    is_proven = problem.sol_status == constants.LpSolutionOptimal
    # The printed bound may be rounded up, so that it could exceed the true one.
    bounds = [float(bound) - _PRINTED for bound in _LOWER_BOUND.findall(text)]
    # The search ended without a printed bound, but nodes within the gap may have been pruned.
    if is_proven and not bounds:
        bounds = [float(value) * (1 - limits.gap) for value in _OBJECTIVE.findall(text)]
    return Outcome(
        has_values=is_proven or problem.sol_status == constants.LpSolutionIntegerFeasible,
        is_proven=is_proven,
        is_infeasible=problem.sol_status == constants.LpSolutionInfeasible,
        bound=bounds[-1] if bounds else -math.inf,
    )
