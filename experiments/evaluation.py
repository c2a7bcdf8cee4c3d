"""Simulated runs of the paper's configurations, as the evaluation's figures share them.

Every run trains the same global batches of its configuration, drawn from the one length family, to
the end: what a policy held back is flushed and counted.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from experiments import constants
from experiments.configurations import configuration
from wlb.cost import workload_of
from wlb.data import GlobalBatches, LengthFamily, LengthSource
from wlb.plan import GlobalBatch
from wlb.simulate import RunSimulation, simulate_run
from wlb.spec import RunSpec, system_overrides

STEPS, QUICK_STEPS = 160, 20
SEED = 1
GIB = 2**30
MEMORY_GIB = 80.0


def arguments(doc: str) -> argparse.ArgumentParser:
    """What every figure of the evaluation takes."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="global batches of each run")
    parser.add_argument("--seed", type=int, default=SEED)
    quick = f"{QUICK_STEPS} global batches, nothing written"
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def steps_of(options: argparse.Namespace) -> int:
    return QUICK_STEPS if options.quick else options.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: configuration of Table 1, and overrides on top of `constants.OVERRIDES`.

    tokens: of all its global batches, in the configuration's own ones; family: lengths.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    steps: int = STEPS
    seed: int = SEED
    family: LengthFamily = constants.FAMILY


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is kept of a run. bound_s: with every micro-batch and CP rank at its step's mean."""

    case: Case
    time_s: float
    bound_s: float
    tokens: int
    steps: int
    imbalance: float
    bubble: float
    mean_delay: float
    memory_bytes: int

    @property
    def step_s(self) -> float:
        return self.time_s / self.steps

    def over(self, baseline: "Outcome") -> float:
        """Speed-up; ValueError unless both trained the same tokens."""
        if self.tokens != baseline.tokens:
            raise ValueError(
                f"{self.case.name} trained {self.tokens} tokens, {baseline.case.name} "
                f"{baseline.tokens}"
            )
        return baseline.time_s / self.time_s

    @property
    def of_bound(self) -> float:
        return self.bound_s / self.time_s


def spec_of(case: Case) -> RunSpec:
    spec = configuration(case.config, *constants.OVERRIDES, *case.overrides)
    return replace(spec, parallel=replace(spec.parallel, dp=max(1, spec.parallel.dp)))


def batches_of(spec: RunSpec, *, family: LengthFamily, steps: int, seed: int) -> list[GlobalBatch]:
    """`steps` global batches of documents of the family, scaled to the window."""
    window = spec.data.context_window
    mean = float(family.sample(1 << 16, window=window, seed=seed).mean())
    needed = int(spec.tokens_per_step * (steps + 1) / mean * 1.1) + 1
    lengths = family.sample(needed, window=window, seed=seed)
    stream = GlobalBatches(
        LengthSource(name="family", lengths=lengths),
        tokens_per_batch=spec.tokens_per_step,
        seed=seed,
    )
    return [batch for batch, _ in islice(stream.iterate(), steps)]


def simulate(case: Case) -> RunSimulation:
    """The whole run."""
    spec = spec_of(case)
    batches = batches_of(spec, family=case.family, steps=case.steps, seed=case.seed)
    cost = workload_of(spec, constants.profile())
    return simulate_run(spec, cost, batches, label=case.name)


def outcome(case: Case) -> Outcome:
    """The run's totals."""
    run = simulate(case)
    return Outcome(
        case=case,
        time_s=run.time_s,
        bound_s=run.balanced_time_s(),
        tokens=int(run.tokens.sum()),
        steps=int(run.step_time_s.size),
        imbalance=run.imbalance,
        bubble=run.mean_bubble,
        mean_delay=run.mean_delay,
        memory_bytes=int(run.peak_memory_bytes.max()),
    )


def _outcome_or_reason(case: Case) -> Outcome | str:
    try:
        return outcome(case)
    except ValueError as error:
        return str(error)


def outcomes(alternatives: Sequence[Sequence[Case]]) -> list[Outcome]:
    """The fastest of each group of alternatives that fits the devices; on all cores, in order.

    ValueError with the reasons where none of a group fits.
    """
    cases = [case for group in alternatives for case in group]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = iter(list(pool.map(_outcome_or_reason, cases)))
    out: list[Outcome] = []
    for group in alternatives:
        results = [next(found) for _ in group]
        fits = [o for o in results if isinstance(o, Outcome) and o.memory_bytes <= MEMORY_GIB * GIB]
        if not fits:
            raise ValueError(f"nothing of {group[0].config}, {group[0].name} fits: {results}")
        out.append(min(fits, key=lambda o: o.time_s))
    return out


def system(name: str, config: str, *more: str, label: str = "", **options: Any) -> list[Case]:
    """A system's alternatives on a configuration, with more overrides."""
    return [
        Case(name=label or name, config=config, overrides=(*overrides, *more), **options)
        for overrides in system_overrides(name, memory_gib=MEMORY_GIB)
    ]


def chosen(outcome: Outcome, *keys: str) -> str:
    """What an outcome's overrides say of `keys`, in words for a table."""
    said = dict(override.split("=", 1) for override in outcome.case.overrides)
    return ", ".join(said[key] for key in keys if said.get(key, "none") != "none")


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
