"""Simulates many pipelines: how near ours comes to perfect balance with DP 1 to 64, and why less.

`python -m experiments.many_pipelines [--steps 160] [--seed 1] [--quick]` simulates whole runs of
7B-128K with 4 micro-batches a pipeline, and of 70B-128K's width and depth (80 layers) on 1K, 4K and
16K GPUs, to their end: what is held back is flushed and counted. Ours is simulated with fewer steps
as well, which shows what a short run loses to its flush.
"""

from pathlib import Path
from typing import Any

from experiments import constants
from experiments.beyond.__main__ import SCALES
from experiments.evaluation import Outcome, arguments, outcomes, system
from experiments.results import How, Table, show, write_results

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PIPELINES = (1, 2, 4, 8, 16, 32, 64)
SYSTEMS = {"Plain-4D": "plain_4d", "WLB-LLM": "paper", "ours": "wlb"}
SHORT = (10, 40)
"""Steps of the runs that show what a flush weighs."""
LEAST = 0.98
"""Target: share of the bound of perfect balance, with runs of 160 steps."""
Cases = dict[str, tuple[str, tuple[str, ...]]]
"""Configuration and overrides by label."""


def cases(pipelines: tuple[int, ...] = PIPELINES) -> Cases:
    out: Cases = {
        f"7B-128K, DP {dp}": ("7b_128k", (f"parallel.dp={dp}", f"data.num_windows={4 * dp}"))
        for dp in pipelines
    }
    for gpus, (tp, cp, pp, dp) in SCALES.items():
        degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        layout = [f"parallel.{name}={degree}" for name, degree in degrees.items()]
        layout += [f"data.num_windows={pp * dp}", "pp.virtual_stages=5"]
        label = f"70B-128K, {gpus} GPUs ({tp} x {cp} x {pp} x {dp})"
        out[label] = ("70b_128k", (*layout, "training.recompute=selective"))
    return out


def table(found: Cases, *, steps: int, seed: int) -> Table:
    groups = [
        system(name, config, *overrides, steps=steps, seed=seed)
        for config, overrides in found.values()
        for name in SYSTEMS.values()
    ]
    short = [n for n in SHORT if n < steps]
    groups += [
        system("wlb", config, *overrides, steps=n, seed=seed)
        for config, overrides in found.values()
        for n in short
    ]
    results = iter(outcomes(groups))
    whole: dict[str, list[Outcome]] = {label: [next(results) for _ in SYSTEMS] for label in found}
    rows: list[list[Any]] = []
    for label, (plain, paper, ours) in whole.items():
        gains = [paper.over(plain), ours.over(plain), plain.time_s / ours.bound_s]
        of_bound = [ours.of_bound, *(next(results).of_bound for _ in short)]
        rows.append([label, plain.step_s, *gains, *of_bound, ours.imbalance, ours.mean_delay])
    bounds = ["of bound", *(f"{n} steps" for n in short)]
    columns = ["", "Plain-4D s/step", "WLB-LLM", "ours", "perfect balance", *bounds]
    columns += ["imbalance", "delay"]
    return Table(
        name="pipelines",
        title="Speed-up over Plain-4D, and ours of perfect balance",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(columns[1:], ".3f"),
        note="`of bound`: time with every micro-batch and CP rank at its step's mean over time, "
        "same schedule and tokens; beside it that of shorter runs. `imbalance`: of ours, slowest "
        "micro-batch's forward over the mean. `delay`: mean of a token, in steps.",
    )


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    if options.quick:
        show(table(cases((1, 4)), steps=20, seed=options.seed), width=180)
        return
    found = table(cases(), steps=options.steps, seed=options.seed)
    show(found, width=180)
    at = found.columns.index("of bound")
    least = min(row[at] for row in found.rows)
    write_results(
        FOLDER,
        title="Many pipelines",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=options.seed,
        text=TEXT.format(steps=options.steps, least=least, target=LEAST),
        tables=[found],
    )


TEXT = """
Whole runs of {steps} global batches and what is flushed at their end. Ours (system `wlb`) comes to
{least:.1%} of perfect balance at least; the target is {target:.0%} at every number of pipelines. A
run of 10 steps is up to two tenths flush: the steps that train what was held back have few
documents, so that no packing balances them.

The planner deals micro-batches to pipelines by predicted work in all systems, which flatters
Plain-4D where DP is above 1. 70B on more GPUs has 5 virtual stages and recomputes MLPs in all
systems.
"""


if __name__ == "__main__":
    main()
