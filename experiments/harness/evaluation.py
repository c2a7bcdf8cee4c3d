"""Runs the simulations that the figures of the evaluation share.

Every run of a configuration trains the same global batches, drawn from one length family, to the
end: documents that a policy holds back are flushed and counted.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from experiments.harness import constants
from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import configuration
from wlb.cost import workload_of
from wlb.data import GlobalBatches, LengthFamily, LengthSource
from wlb.memory import planned_gib
from wlb.plan import GlobalBatch
from wlb.simulate import RunSimulation, simulate_run
from wlb.spec import RunSpec, system_overrides

STEPS, QUICK_STEPS = 160, 20
SEED = 1
BY_NEED = ("sharding.exchange=needed", "cp.overlap_stages=1")
"""CP ranks send each other the keys that are read, beside attention over those that they hold."""
SYSTEMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain_4d": ("plain_4d", ()),
    "plain_anywhere": ("plain_4d", ("packing.window_cut=anywhere",)),
    "plain_by_need": ("plain_4d", BY_NEED),
    "fixed_4d": ("fixed_4d", ()),
    "paper": ("paper", ()),
    "wlb": ("wlb", ()),
    "by_need": ("wlb", BY_NEED),
}
"""Compared systems: the name of each in wlb, and overrides on top of it. Plain-4D is the
paper's, whose loader cuts short documents only; Megatron's and torchtitan's cut anywhere."""
NAMES = {
    "fixed_4d": "Fixed-4D",
    "paper": "WLB-LLM",
    "wlb": "ours",
    "by_need": "ours, keys by need",
    "bound": "perfect balance",
}
"""Labels of what is compared with Plain-4D."""
GIB = 2**30
MEMORY_GIB = 80.0
EARLIER_GIB = 76.0
"""GiB of 80 that plans use in results made before runs set memory aside for CUDA, NCCL and gaps.
Experiments whose results were not made again name it; all others plan as a run does (`system`)."""


def arguments(doc: str | None, *, takes: str = "") -> argparse.ArgumentParser:
    """Returns a parser with the options that every figure of the evaluation takes.

    takes: what --take does; "" for figures that have no such option
    """
    quick = f"simulate {QUICK_STEPS} global batches per run"
    return experiment_parser(doc, quick=quick, seed=SEED, steps=STEPS, take=takes)


def steps_of(options: argparse.Namespace) -> int:
    return QUICK_STEPS if options.quick else options.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Describes a run."""

    name: str
    config: str  # of Table 1
    overrides: tuple[str, ...]  # settings on top of `constants.settings`
    steps: int = STEPS  # global batches, each of the configuration's own size
    seed: int = SEED
    family: LengthFamily = constants.FAMILY  # distribution of document lengths
    kernel: str = constants.FLASH_2  # of `constants.KERNELS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds totals of a run, and means over its steps.

    time_s: simulated time of the whole run, in seconds
    bound_s: the same if every micro-batch and CP rank took its step's mean
    mean_delay: mean delay of a token, in steps
    memory_bytes: peak memory of the fullest device
    """

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
        """Returns the speed-up; raises ValueError unless both runs trained the same tokens."""
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
    spec = configuration(case.config, *constants.settings(case.kernel), *case.overrides)
    return replace(spec, parallel=replace(spec.parallel, dp=max(1, spec.parallel.dp)))


def batches_of(spec: RunSpec, *, family: LengthFamily, steps: int, seed: int) -> list[GlobalBatch]:
    """Returns `steps` global batches of documents of the family, scaled to the window."""
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
    """Simulates the whole run."""
    spec = spec_of(case)
    batches = batches_of(spec, family=case.family, steps=case.steps, seed=case.seed)
    cost = workload_of(spec, constants.profile())
    return simulate_run(spec, cost, batches, label=case.name)


def outcome(case: Case) -> Outcome:
    """Simulates the run and returns its totals."""
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
    """Returns, for each group of alternatives in order, the fastest that fits the devices.

    All cores simulate. Raises ValueError with the reasons if none of a group fits.
    """
    cases = [case for group in alternatives for case in group]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = iter(list(pool.map(_outcome_or_reason, cases)))
    out: list[Outcome] = []
    for group in alternatives:
        results = [next(found) for _ in group]
        fits = [o for o in results if isinstance(o, Outcome) and o.memory_bytes <= MEMORY_GIB * GIB]
        if not fits:
            raise ValueError(f"no way to run {group[0].config}, {group[0].name} fits: {results}")
        out.append(min(fits, key=lambda o: o.time_s))
    return out


def room_of(config: str, *more: str) -> float:
    """Returns the GiB of a GPU that a run of the configuration plans with."""
    return planned_gib(spec_of(Case(name="", config=config, overrides=more)))


def system(
    name: str, config: str, *more: str, label: str = "", gib: float = 0, **options: Any
) -> list[Case]:
    """Returns a system's alternatives on a configuration, each with `more` overrides added.

    gib: what plans may use of a GPU's memory; 0: what a run plans with (`room_of`)
    """
    room = gib or room_of(config, *more)
    return [
        Case(name=label or name, config=config, overrides=(*overrides, *more), **options)
        for overrides in system_overrides(name, planned_gib=room)
    ]


def compared(name: str, config: str, *more: str, **options: Any) -> list[Case]:
    """Returns the alternatives of one of SYSTEMS on a configuration, as `system` does."""
    known, overrides = SYSTEMS[name]
    return system(known, config, *overrides, *more, **options)


def chosen(outcome: Outcome, *keys: str) -> str:
    """Returns the values of an outcome's overrides for `keys`, as words for a table."""
    said = dict(override.split("=", 1) for override in outcome.case.overrides)
    return ", ".join(said[key] for key in keys if said.get(key, "none") != "none")


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
