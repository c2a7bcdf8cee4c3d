"""Runs a PuLP model with the solver CBC or HiGHS. No other file uses their untyped interfaces.

The solver starts from the values of the model's variables. It stops when the relative gap between
objective and lower bound is small enough, or at the time limit. So a slower machine may get another
solution of the same model. This file adds what PuLP lacks:

- A warm start for HiGHS, which is set between building the model and running it.
- The lower bound on the objective, which is read from HiGHS's model or from CBC's log.

CBC is started by its path, because PuLP's class for the bundled program warns that PuLP 4 drops it.
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
"""Largest rounding error of a lower bound that CBC prints in its log, with three decimals."""
_LOWER_BOUND = re.compile(r"^Lower bound:\s+(\S+)\s*$", re.MULTILINE)
_OBJECTIVE = re.compile(r"^Objective value:\s+(\S+)\s*$", re.MULTILINE)


class Solver(StrEnum):
    """The software that solves an integer linear program."""

    CBC = "cbc"  # comes with PuLP
    HIGHS = "highs"  # the package highspy


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """When the solver stops, and what it may use."""

    time_limit_s: float  # most seconds that the solver may take
    gap: float  # stop at this relative difference between objective and lower bound
    threads: int = 1  # threads of the solver
    seed: int = 0  # seed of the solver's random decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the solver ended."""

    has_values: bool  # whether a solution was found; its values are in the model's variables
    is_proven: bool  # whether the solution is proven optimal, within the limit for the gap
    is_infeasible: bool  # whether the model has no solution
    bound: float  # lower bound on the objective; -inf if the solver proved nothing


def modeller() -> Any:
    """Return the module `pulp`, or raise UserError if it is not installed."""
    return _module("pulp", "packing by integer linear programming")


def run(problem: Any, solver: Solver, limits: SolverLimits) -> Outcome:
    """Minimise a PuLP problem, starting from the values that its variables have.

    Args:
        problem: The `pulp.LpProblem`. Its variables get the values of the solution.
        solver: The software that solves it.
        limits: When the solver stops.

    Raises:
        UserError: If the solver is not installed.
    """
    match solver:
        case Solver.HIGHS:
            return _run_highs(problem, limits)
        case Solver.CBC:
            return _run_cbc(problem, limits)


def _module(name: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {name}, which is not installed; install it with `pip "
            f"install {name}`"
        ) from error


def _run_highs(problem: Any, limits: SolverLimits) -> Outcome:
    highspy: Any = _module("highspy", 'solver = "highs"')
    # HiGHS has one pool of threads for the process, and refuses to run with a number of threads
    # that differs from the last run's. Resetting the pool permits another number.
    highspy.Highs.resetGlobalScheduler(True)
    api = modeller().HiGHS(
        msg=False,
        gapRel=limits.gap,
        threads=limits.threads,
        timeLimit=limits.time_limit_s,
        random_seed=limits.seed % 2**31,
    )
    # These are the steps of PuLP's solve(), made one by one, because HiGHS takes the solution to
    # start from only after the model is built.
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
        raise RuntimeError(
            f"the solver HiGHS failed with the status {model.modelStatusToString(status)!r}; use "
            "solver = 'cbc'"
        )
    has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if has_values:
        for column, value in zip(columns, model.getSolution().col_value, strict=True):
            column.varValue = value
    is_proven = status == ended.kOptimal
    # Without binary variables there is no search, and the optimum itself is the lower bound.
    bound = info.mip_dual_bound if problem.isMIP() else info.objective_function_value
    return Outcome(
        has_values=has_values,
        is_proven=is_proven,
        is_infeasible=status == ended.kInfeasible,
        bound=bound if is_proven or problem.isMIP() else -math.inf,
    )


@contextmanager
def _without_banner() -> Generator[None]:
    """Discard what is written to file descriptor 1.

    HiGHS prints its version when an object is created, before any option can silence it. That line
    would break the JSON of `wlb plan --json`.
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
    # Avoid a seed of 0, for which CBC would use the time of day.
    seed = 1 + limits.seed % (2**31 - 1)
    with temporary_folder("solver") as folder:
        log = folder / "cbc.log"
        api = pulp.COIN_CMD(
            path=bundled.pulp_cbc_path if bundled else None,
            msg=False,
            gapRel=limits.gap,
            # `threads=1` starts CBC's threaded mode, which sometimes loses a wake-up and sleeps for
            # ten seconds. The default is one thread without that mode.
            threads=limits.threads if limits.threads > 1 else None,
            timeLimit=limits.time_limit_s,
            warmStart=True,
            logPath=str(log),
            options=[f"randomCbcSeed {seed}", f"randomSeed {seed}"],
        )
        if not api.available():
            raise UserError(
                "solver = 'cbc' needs the program cbc, which was not found; install a version of "
                "PuLP that contains it with `pip install 'pulp<4'`"
            )
        problem.solve(api)
        text = log.read_text()
    constants = pulp.constants
    is_proven = problem.sol_status == constants.LpSolutionOptimal
    # Subtract the rounding error, because a printed bound may have been rounded up.
    bounds = [float(bound) - _PRINTED for bound in _LOWER_BOUND.findall(text)]
    # CBC may prove a solution optimal without printing a lower bound. Then no solution is better
    # than this one by more than the gap.
    if is_proven and not bounds:
        bounds = [float(value) * (1 - limits.gap) for value in _OBJECTIVE.findall(text)]
    return Outcome(
        has_values=is_proven or problem.sol_status == constants.LpSolutionIntegerFeasible,
        is_proven=is_proven,
        is_infeasible=problem.sol_status == constants.LpSolutionInfeasible,
        bound=bounds[-1] if bounds else -math.inf,
    )
