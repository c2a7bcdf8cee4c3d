"""Predicts how long ranks that share experts wait for each other in every layer.

`python -m experiments.expert_wait [--steps 160] [--seed 1] [--quick]` takes Qwen3-30B-A3B with a
128K window and experts divided over all ranks of 1 to 8 pipelines, on the fitted stream. A layer's
exchange of rows waits for the slowest attention of all of its ranks, so that micro-batches at the
same place of different pipelines meet. Experts are taken to be equally loaded, but for a second
table: plans for even experts, and plans for the load that the ranks have (`cost.expert_load`).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.harness import constants
from experiments.harness.evaluation import arguments, batches_of, steps_of
from experiments.harness.pages import How, Table, show, write_results
from wlb.cost import ProfiledWorkload, workload_of
from wlb.simulate import sharded_steps, simulate_run
from wlb.simulate.run import planner_of
from wlb.spec import RunSpec, load, system_overrides

FOLDER = Path(__file__).parent
PRESET = "qwen3_30b_a3b_128k"
PIPELINES = (1, 2, 4, 8)
RANKS = 16
"""CP x TP ranks of a stage; with 8 pipelines each rank has one of the 128 experts."""
SYSTEMS = {"Plain-4D": "plain_4d", "WLB-LLM": "paper", "ours": "wlb"}
UNMET = "ours, dealt as without experts"
"""Micro-batches are dealt to pipelines by their sums alone."""
TARGET = 1.02
LOADS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Rows of the EP rank that a layer waits for over the mean rank's. Dropless training without any
balance reaches 2 to 3; biases hold it near 1.1."""
LOADED_PIPELINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """Holds what one run lost. wait: slowest over mean, per layer. time_s: simulated."""

    wait: float
    time_s: float
    tokens: int
    imbalance: float


def spec_of(dp: int, name: str) -> RunSpec:
    overrides = system_overrides(name, planned_gib=76.0)[-1]
    layout = [f"parallel.dp={dp}", f"parallel.ep={dp * RANKS}", f"data.num_windows={4 * dp}"]
    preset = load(PRESET)
    stages = min(preset.ep.stages, preset.model.experts.num // (dp * RANKS))
    fixed = [f"training.recompute={preset.training.recompute}", f"ep.stages={stages}"]
    return load(PRESET, [*constants.OVERRIDES, *overrides, *layout, *fixed])


def waited(dp: int, label: str, steps: int, seed: int) -> Waited:
    spec = spec_of(dp, SYSTEMS.get(label, "wlb"))
    cost = workload_of(spec, constants.profile())
    batches = batches_of(spec, family=constants.FAMILY, steps=steps, seed=seed)
    planner = planner_of(spec, cost, batches)
    if label == UNMET:
        planner = replace(planner, meets=1)
    sharded = sharded_steps(planner, dp=dp)
    run = simulate_run(spec, cost, batches, label=label, steps=sharded)
    return Waited(
        wait=run.prices.layer_wait,
        time_s=run.time_s,
        tokens=int(run.tokens.sum()),
        imbalance=run.imbalance,
    )


def _waited(job: tuple[int, str, int, int]) -> Waited:
    return waited(*job)


def loaded(load: float, planned: float, steps: int, seed: int) -> Waited:
    """Steps that take `load`, planned for `planned`."""
    spec = spec_of(LOADED_PIPELINES, "wlb")
    batches = batches_of(spec, family=constants.FAMILY, steps=steps, seed=seed)
    is_planned, is_true = (_with_load(spec, ratio) for ratio in (planned, load))
    sharded = sharded_steps(planner_of(*is_planned, batches), dp=LOADED_PIPELINES)
    run = simulate_run(*is_true, batches, label="ours", steps=sharded)
    return Waited(
        wait=run.prices.layer_wait,
        time_s=run.time_s,
        tokens=int(run.tokens.sum()),
        imbalance=run.imbalance,
    )


def _with_load(spec: RunSpec, load: float) -> tuple[RunSpec, ProfiledWorkload]:
    spec = replace(spec, cost=replace(spec.cost, expert_load=load))
    return spec, workload_of(spec, constants.profile())


def _loaded(job: tuple[float, float, int, int]) -> Waited:
    return loaded(*job)


def loads_table(found: dict[float, tuple[Waited, Waited]]) -> Table:
    rows: list[list[float | int | str]] = []
    even_s = found[LOADS[0]][0].time_s
    for ratio, (even, known) in found.items():
        if even.tokens != known.tokens:
            raise ValueError(f"plans for a load of {ratio} trained other tokens")
        speed = even.time_s / known.time_s
        waits = [even.wait, known.wait]
        rows.append([ratio, even.time_s / even_s, *waits, even.imbalance, known.imbalance, speed])
    return Table(
        name="loads",
        title="Plans that know the load of experts",
        columns=[
            "load",
            "time",
            "wait, even",
            "wait, known",
            "imbalance, even",
            "imbalance, known",
            "speed-up",
        ],
        rows=rows,
        formats={
            "load": ".2f",
            "time": ".3f",
            "wait, even": ".4f",
            "wait, known": ".4f",
            "imbalance, even": ".3f",
            "imbalance, known": ".3f",
            "speed-up": ".4f",
        },
        note=(
            f"{LOADED_PIPELINES} pipelines, ours. load: rows of the EP rank that a layer waits for "
            "over the mean rank's. time: simulated, planned for even experts, over that of even "
            "experts. even, known: plans with cost.expert_load = 1, and with the load; imbalance "
            "of micro-batches at the price of their plan. speed-up: known over even."
        ),
    )


def table_of(found: dict[int, dict[str, Waited]]) -> Table:
    rows: list[list[float | int | str]] = []
    for dp, runs in found.items():
        plain = runs["Plain-4D"]
        if len({run.tokens for run in runs.values()}) > 1:
            raise ValueError(f"the systems trained other tokens with {dp} pipelines")
        for label, run in runs.items():
            speed = plain.time_s / run.time_s
            rows.append([dp, dp * RANKS, label, run.wait, run.imbalance, speed])
    return Table(
        name="waits",
        title="Wait of a layer",
        columns=["pipelines", "ep", "system", "wait", "imbalance", "speed-up"],
        rows=rows,
        formats={"wait": ".4f", "imbalance": ".3f", "speed-up": ".2f"},
        note=(
            "wait: work between meetings of the slowest rank over the mean rank's, summed over all "
            "layers and micro-batches. Work is attention and all that is proportional to a rank's "
            "own tokens; experts' products are shared by the group. imbalance: of micro-batches "
            "by all of their work. speed-up: simulated, over Plain-4D."
        ),
    )


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(given)
    steps = steps_of(options)
    pipelines = PIPELINES[:2] if options.quick else PIPELINES
    labels = [*SYSTEMS, UNMET]
    jobs = [(dp, label, steps, options.seed) for dp in pipelines for label in labels]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        results = iter(pool.map(_waited, jobs))
        found = {dp: {label: next(results) for label in labels} for dp in pipelines}
        pairs = [(load, planned, steps, options.seed) for load in LOADS for planned in (1.0, load)]
        times = iter(pool.map(_loaded, pairs))
        by_load = {load: (next(times), next(times)) for load in LOADS}
    table, loads = table_of(found), loads_table(by_load)
    if options.quick:
        show(table)
        show(loads)
        return
    worst = max(runs["ours"].wait for runs in found.values())
    text = (
        f"Ours waits at most {worst:.4f} in a layer (target {TARGET}); Plain-4D "
        f"{max(runs['Plain-4D'].wait for runs in found.values()):.3f}. Where experts' most loaded "
        f"ranks have {LOADS[-1]:g} times the mean rank's rows, plans that know it are "
        f"{by_load[LOADS[-1]][0].time_s / by_load[LOADS[-1]][1].time_s:.4f} times as fast."
    )
    write_results(
        FOLDER,
        title="Wait for each other in every layer, with experts",
        how=How.SIMULATED,
        profile=constants.profile(),
        text=text,
        seed=options.seed,
        tables=[table, loads],
    )


if __name__ == "__main__":
    main()
