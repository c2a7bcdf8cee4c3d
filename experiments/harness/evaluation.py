"""Runs the simulations that the figures of the evaluation share.

All runs of a configuration train the same global batches, drawn from one distribution of document
lengths. They train them to the end: documents that a packing policy delays are flushed and counted,
so the total times of two runs can be compared.
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
"""Settings of the `needed` exchange, overlapped with attention over each rank's local keys."""
SYSTEMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain_4d": ("plain_4d", ()),
    "plain_anywhere": ("plain_4d", ("packing.window_cut=anywhere",)),
    "plain_by_need": ("plain_4d", BY_NEED),
    "fixed_4d": ("fixed_4d", ()),
    "paper": ("paper", ()),
    "wlb": ("wlb", ()),
    "by_need": ("wlb", BY_NEED),
}
"""Compared systems: each one's name in wlb (`--system`), and overrides on top of it.

`plain_4d` is the paper's baseline, whose loader cuts only documents shorter than a window.
`plain_anywhere` cuts documents anywhere, as the loaders of Megatron-LM and torchtitan do.
"""
NAMES = {
    "fixed_4d": "Fixed-4D",
    "paper": "WLB-LLM",
    "wlb": "ours",
    "by_need": "ours, keys by need",
    "bound": "perfect balance",
}
"""Labels of the systems that are compared with Plain-4D."""
GIB = 2**30
MEMORY_GIB = 80.0
EARLIER_GIB = 76.0
"""GiB of an 80 GiB GPU that older results plan with.

Today a run itself sets memory aside for CUDA, NCCL and gaps of the allocator (`system`). Only
experiments whose committed results are older pass this constant.
"""


def arguments(doc: str | None, *, takes: str = "") -> argparse.ArgumentParser:
    """Returns a parser with the options that every figure of the evaluation takes.

    Args:
        doc: The experiment's docstring. Its first line describes the command.
        takes: Help of `--take`. Empty: no such option.
    """
    quick = f"simulate {QUICK_STEPS} global batches per run"
    return experiment_parser(doc, quick=quick, seed=SEED, steps=STEPS, take=takes)


def steps_of(options: argparse.Namespace) -> int:
    return QUICK_STEPS if options.quick else options.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to simulate."""

    name: str  # label, such as "wlb"
    config: str  # preset of Table 1, such as "7b_128k"
    overrides: tuple[str, ...]  # settings on top of `constants.settings`
    steps: int = STEPS  # number of global batches
    seed: int = SEED
    family: LengthFamily = constants.FAMILY  # distribution of document lengths
    kernel: str = constants.FLASH_2  # attention kernel, a key of `constants.KERNELS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Totals of a simulated run, and means over its steps."""

    case: Case
    time_s: float  # time of the whole run
    bound_s: float  # time of the whole run if all micro-batches and CP ranks of a step were equal
    tokens: int  # tokens trained
    steps: int  # steps made, including the flush
    imbalance: float  # work of the slowest micro-batches over the mean, each summed over steps
    bubble: float  # share of the time in which pipeline ranks are idle
    mean_delay: float  # mean delay of a token in steps
    memory_bytes: int  # peak memory of the fullest device

    @property
    def step_s(self) -> float:
        return self.time_s / self.steps

    def over(self, baseline: "Outcome") -> float:
        """Returns the speed-up over another run of the same documents.

        Raises:
            ValueError: If the runs trained different numbers of tokens.
        """
        if self.tokens != baseline.tokens:
            raise ValueError(
                f"{self.case.name} trained {self.tokens} tokens, {baseline.case.name} "
                f"{baseline.tokens}"
            )
        return baseline.time_s / self.time_s

    @property
    def of_bound(self) -> float:
        """Returns the time under perfect balance over the simulated time; 1 is perfect."""
        return self.bound_s / self.time_s


def spec_of(case: Case) -> RunSpec:
    spec = configuration(case.config, *constants.settings(case.kernel), *case.overrides)
    return replace(spec, parallel=replace(spec.parallel, dp=max(1, spec.parallel.dp)))


def batches_of(spec: RunSpec, *, family: LengthFamily, steps: int, seed: int) -> list[GlobalBatch]:
    """Returns `steps` global batches of documents drawn from the family, scaled to the window."""
    window = spec.data.context_window
    # A sample gives the mean length, and so how many documents are enough for all batches.
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
    """Simulates all steps of a run."""
    spec = spec_of(case)
    batches = batches_of(spec, family=case.family, steps=case.steps, seed=case.seed)
    cost = workload_of(spec, constants.profile())
    return simulate_run(spec, cost, batches, label=case.name)


def outcome(case: Case) -> Outcome:
    """Simulates a run and returns its totals."""
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
    """Returns the fastest run of each group of alternatives that fits the memory of a device.

    Simulates in one process per core.

    Raises:
        ValueError: If no run of a group fits. The message gives the reasons.
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
    """Returns the GiB of a GPU that a run of the configuration may plan to use."""
    return planned_gib(spec_of(Case(name="", config=config, overrides=more)))


def system(
    name: str, config: str, *more: str, label: str = "", gib: float = 0, **options: Any
) -> list[Case]:
    """Returns the alternatives of a system on a configuration.

    Args:
        name: System as in `--system`.
        config: Preset of Table 1.
        *more: Overrides that every alternative gets on top of the system's.
        label: Name of the cases. Defaults to the system's.
        gib: GPU memory that plans may use, in GiB. 0 stands for `room_of`, the value of a real run.
        **options: Further fields of `Case`.
    """
    room = gib or room_of(config, *more)
    return [
        Case(name=label or name, config=config, overrides=(*overrides, *more), **options)
        for overrides in system_overrides(name, planned_gib=room)
    ]


def compared(name: str, config: str, *more: str, **options: Any) -> list[Case]:
    """Returns the alternatives of a system in SYSTEMS on a configuration (see `system`)."""
    known, overrides = SYSTEMS[name]
    return system(known, config, *overrides, *more, **options)


def chosen(outcome: Outcome, *keys: str) -> str:
    """Returns the values that an outcome's overrides give `keys`, joined for a table cell."""
    values = dict(override.split("=", 1) for override in outcome.case.overrides)
    return ", ".join(values[key] for key in keys if values.get(key, "none") != "none")


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
