"""Simulates many pipelines beside each other, and divides what is lost into its causes.

`python -m experiments.many_pipelines [--steps 160] [--seed 1] [--take] [--quick]` has three parts:

1. `dp`: 7B-128K with DP 1 to 64. 2. `scale`: 70B-128K's width and depth (80 layers) on 1K, 4K and
16K GPUs. 3. `steps`: both at DP 4 in runs of few steps, with the last global batch known as such
and, as before that was so, without. Micro-batches are dealt to pipelines by predicted work in all
systems. `--take` writes the page again from its tables.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.harness import constants
from experiments.harness.evaluation import (
    AGAIN,
    EARLIER_GIB,
    GIB,
    MEMORY_GIB,
    WAYS_BY_NEED,
    Case,
    arguments,
    batches_of,
    spec_of,
    steps_of,
    system,
)
from experiments.many_pipelines.losses import Losses, losses
from experiments.harness.pages import How, Table, commit_of, read_table, show, write_results
from wlb.cost import workload_of
from wlb.plan import GlobalBatch
from wlb.planner import Planner
from wlb.simulate import RunSimulation, sharded_steps, simulate_run

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PIPELINES = (1, 2, 4, 8, 16, 32, 64)
SCALES = {"1K": (8, 4, 8, 4), "4K": (8, 8, 16, 4), "16K": (8, 16, 16, 8)}
"""Each number of GPUs has this (TP, CP, PP, DP)."""
SYSTEMS = {"Plain-4D": "plain_4d", "WLB-LLM": "paper", "ours": "wlb"}
NEED = "ours, keys by need"
"""Name of ours with CP's keys exchanged by need and overlapped, simulated on many GPUs."""
TARGET = 0.98
"""Least part of the bound of perfect balance that ours must reach in runs of STEPS."""
FEW_STEPS = (10, 20, 40, 80, 160)
START = 10
"""A document waits at most this many steps, so many count as the start of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Describes a configuration of Table 1 on more GPUs. recompute: the only one that is tried."""

    name: str
    config: str
    overrides: tuple[str, ...]
    recompute: str = ""

    @property
    def systems(self) -> dict[str, str]:
        """Returns the systems that are simulated here by their labels in tables."""
        return SYSTEMS | ({NEED: NEED} if self.config == "70b_128k" else {})

    def cases(self, name: str, *, steps: int, seed: int) -> list[Case]:
        """Returns a system's alternatives here."""
        ways = WAYS_BY_NEED if name == NEED else ((),)
        known = "wlb" if name == NEED else name
        out: list[Case] = []
        for way in ways:
            more = (*self.overrides, *way)
            found = system(known, self.config, *more, gib=EARLIER_GIB, steps=steps, seed=seed)
            if self.recompute:
                chosen = f"training.recompute={self.recompute}"
                found = [replace(found[0], overrides=(*found[0].overrides, chosen))]
            out += found
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinesOutcome:
    """Holds what is kept of a simulated run."""

    losses: Losses
    tokens: int
    steps: int
    bubble: float
    mean_delay: float
    memory_bytes: int

    @classmethod
    def of(cls, run: RunSimulation, *, num_batches: int) -> "PipelinesOutcome":
        return cls(
            losses=losses(run, num_batches=num_batches, start=START),
            tokens=int(run.tokens.sum()),
            steps=int(run.step_time_s.size),
            bubble=run.mean_bubble,
            mean_delay=run.mean_delay,
            memory_bytes=int(run.peak_memory_bytes.max()),
        )

    @property
    def time_s(self) -> float:
        return self.losses.time_s


class UnendedBatches:
    """A planner's source of global batches none of which is known to be the last one."""

    def __init__(self, batches: Sequence[GlobalBatch]) -> None:
        self.batches = batches

    def start(self) -> dict[str, Any]:
        return {"batch": 0}

    def next(self, state: dict[str, Any]) -> tuple[GlobalBatch, dict[str, Any]] | None:
        at = state["batch"]
        return None if at >= len(self.batches) else (self.batches[at], {"batch": at + 1})


def layouts() -> dict[str, Layout]:
    """Returns the layouts of parts 1 and 2 by name."""
    small = [
        Layout(
            name=f"DP {dp}",
            config="7b_128k",
            overrides=(f"parallel.dp={dp}", f"data.num_windows={4 * dp}"),
        )
        for dp in PIPELINES
    ]
    large = [
        Layout(
            name=f"{gpus} GPUs: {tp} x {cp} x {pp} x {dp}",
            config="70b_128k",
            overrides=(
                f"parallel.tp={tp}",
                f"parallel.cp={cp}",
                f"parallel.pp={pp}",
                f"parallel.dp={dp}",
                f"data.num_windows={pp * dp}",
                "pp.virtual_stages=5",
            ),
            recompute="selective",
        )
        for gpus, (tp, cp, pp, dp) in SCALES.items()
    ]
    return {layout.name: layout for layout in (*small, *large)}


def simulated(case: Case, *, knows_end: bool = True) -> PipelinesOutcome:
    """Simulates the whole run of a case."""
    spec = spec_of(case)
    batches = batches_of(spec, family=case.family, steps=case.steps, seed=case.seed)
    cost = workload_of(spec, constants.profile())
    steps = None
    if not knows_end:
        planner = Planner.from_spec(spec, UnendedBatches(batches), cost)
        steps = sharded_steps(planner, dp=spec.parallel.dp)
    run = simulate_run(spec, cost, batches, label=case.name, steps=steps)
    return PipelinesOutcome.of(run, num_batches=case.steps)


def fastest(cases: Sequence[Case], *, knows_end: bool = True) -> PipelinesOutcome:
    """Returns the fastest of a system's alternatives that fits the devices."""
    found = [simulated(case, knows_end=knows_end) for case in cases]
    fits = [one for one in found if one.memory_bytes <= MEMORY_GIB * GIB]
    if not fits:
        raise ValueError(f"no way to run {cases[0].config}, {cases[0].name} fits")
    return min(fits, key=lambda one: one.time_s)


def _fastest(job: tuple[Layout, str, int, int, bool]) -> PipelinesOutcome:
    layout, name, steps, seed, knows_end = job
    return fastest(layout.cases(name, steps=steps, seed=seed), knows_end=knows_end)


SHARES = ("WLB-LLM of bound", "of bound", "of equal steps")
CAUSES = ("CP ranks", "micro-batches", "pipelines", "steps", "start", "end")
FORMATS = {
    **dict.fromkeys(["Plain-4D s/step", "WLB-LLM", "ours", NEED, "perfect balance"], ".3f"),
    **dict.fromkeys(SHARES, ".4f"),
    **dict.fromkeys(CAUSES, ".2%"),
    "bubble": ".1%",
    "delay": ".2f",
    "GiB": ".1f",
}
TITLES = {
    "dp": "7B-128K by number of pipelines",
    "scale": "70B-128K on more GPUs (TP x CP x PP x DP)",
    "steps": "The end of the data in runs of few steps",
}
OF_STEPS = dict.fromkeys(["of bound, end unknown", "of bound", "faster by"], ".4f")


def earlier() -> list[Table]:
    """Returns the tables of earlier results."""
    out: list[Table] = []
    for name, title in TITLES.items():
        table = read_table(FOLDER, name, title=title, formats={})
        given = OF_STEPS | {"global batches": ".0f", "steps, end unknown": ".0f", "steps": ".0f"}
        formats = given if name == "steps" else FORMATS
        known = {column: form for column, form in formats.items() if column in table.columns}
        out.append(replace(table, formats=known))
    return out


def table_of(name: str, title: str, found: dict[str, dict[str, PipelinesOutcome]]) -> Table:
    """Returns speed-ups over Plain-4D, ours beside both bounds, and what ours loses by cause."""
    rows: list[list[Any]] = []
    for layout, outcomes in found.items():
        plain, paper, ours = (outcomes[label] for label in SYSTEMS)
        if len({one.tokens for one in outcomes.values()}) > 1:
            raise ValueError(f"the systems trained other tokens in {layout}")
        by_need = [outcomes[NEED].time_s] if NEED in outcomes else []
        times = (paper.time_s, ours.time_s, *by_need, ours.losses.bound_s)
        speeds = [plain.time_s / one for one in times]
        lost = ours.losses
        also = [ours.bubble, ours.mean_delay, ours.memory_bytes / GIB]
        rows.append(
            [
                layout,
                plain.time_s / plain.steps,
                *speeds,
                paper.losses.of_bound,
                lost.of_bound,
                lost.of_equal_steps,
                *lost.shares().values(),
                lost.start_s / lost.time_s,
                lost.end_s / lost.time_s,
                *also,
            ]
        )
    need = [NEED] if any(NEED in outcomes for outcomes in found.values()) else []
    speeds = ["Plain-4D s/step", "WLB-LLM", "ours", *need, "perfect balance"]
    columns = ["", *speeds, *SHARES, *CAUSES, "bubble", "delay", "GiB"]
    known = {column: FORMATS[column] for column in columns if column in FORMATS}
    return Table(name=name, title=title, columns=columns, rows=rows, formats=known)


def steps_table(few: dict[tuple[str, int, bool], PipelinesOutcome]) -> Table:
    """Returns of bound by number of global batches, the end known and not."""
    rows: list[list[Any]] = []
    for layout, steps in dict.fromkeys(key[:2] for key in few):
        known, unknown = few[layout, steps, True], few[layout, steps, False]
        values = [x for one in (unknown, known) for x in (one.steps, one.losses.of_bound)]
        rows.append([layout, steps, *values, unknown.time_s / known.time_s])
    columns = ["", "global batches", "steps, end unknown", "of bound, end unknown", "steps"]
    columns += ["of bound", "faster by"]
    return Table(name="steps", title=TITLES["steps"], columns=columns, rows=rows, formats=OF_STEPS)


TEXT = """Whole runs, every document trained, what is held back too. Speed-ups are over Plain-4D.

- **of bound**: time of the same steps with every micro-batch and CP rank at its step's mean, over
  the simulated time (`StepPrices.balanced`). This is the bound of `experiments.beyond.parts`. Attention
  has the price of the spans that sharding made; what cutting documents for CP ranks costs is the
  matter of `experiments.sharding_balance`.
- **of equal steps**: a stricter yardstick, in which the whole run's work is divided equally over
  as many steps as there were global batches. It counts steps that only the end of the data makes.
- **CP ranks, micro-batches, pipelines, steps**: share of the time that is lost to each, found by
  keeping one after the other equal; together they make up 1 - of equal steps.
- **start, end**: what the first 10 steps, and those from the last global batch on, lose against
  the bound; part of the columns before.
"""


def simulated_tables(*, steps: int, seed: int, is_quick: bool) -> list[Table]:
    """Simulates all parts, and returns a table of each."""
    every = layouts()
    if is_quick:
        every = {name: every[name] for name in ("DP 1", "DP 4")}
    jobs = [(one, n, steps, seed, True) for one in every.values() for n in one.systems.values()]
    num_runs = len(jobs)
    four = [one for one in every.values() if "parallel.dp=4" in one.overrides]
    few = [s for s in FEW_STEPS if s <= steps]
    jobs += [(one, "wlb", s, seed, known) for one in four for s in few for known in (True, False)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = iter(list(pool.map(_fastest, jobs)))
    found = {name: {label: next(results) for label in one.systems} for name, one in every.items()}
    at_end = {(job[0].name, job[2], job[4]): next(results) for job in jobs[num_runs:]}
    small = {name: one for name, one in found.items() if every[name].config == "7b_128k"}
    tables = [table_of("dp", TITLES["dp"], small)]
    if large := {name: one for name, one in found.items() if name not in small}:
        tables.append(table_of("scale", TITLES["scale"], large))
    return [*tables, steps_table(at_end)]


def main(arguments_: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", takes=AGAIN)
    options = parser.parse_args(arguments_)
    steps, seed = steps_of(options), options.seed
    if options.take:
        tables = earlier()
    else:
        tables = simulated_tables(steps=steps, seed=seed, is_quick=options.quick)
    show(*tables, width=220)
    if options.quick:
        return
    least = min(row[t.columns.index("of bound")] for t in tables[:2] for row in t.rows)
    write_results(
        FOLDER,
        title="Many pipelines: where ours loses",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=seed,
        text=f"At least {least:.1%} of the bound of perfect balance with {steps} global batches "
        f"(held by `tests/experiments/test_many_pipelines.py` at {TARGET:.0%}). Ours "
        f"plans with {EARLIER_GIB:g} of a GPU's 80 GiB, as a run did when this was simulated."
        f"\n\n{TEXT}",
        tables=tables,
        figures_of=commit_of(FOLDER) if options.take else "",
    )


if __name__ == "__main__":
    main()
