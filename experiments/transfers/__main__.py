"""Simulates what a pipeline loses if all transfers of a rank share one NCCL communicator.

`python -m experiments.transfers [--steps 24] [--seed 1] [--quick]` simulates every preset with a
pipeline under Plain-4D and under ours, twice each: with a communicator for each link between
neighbours, as wlb has it, and with one for the whole pipeline, as torch has it where NCCL starts
eagerly. NCCL runs the operations of a communicator in the order in which a rank posts them, so in
the second layout a receive whose sender is not ready holds up the sends behind it.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import new_figure
from experiments.harness.evaluation import arguments, batches_of, steps_of
from experiments.harness.pages import How, Picture, Table, show, write_results
from wlb.cost import load_profile, planned_gib, workload_for
from wlb.data import FAMILIES
from wlb.packing import with_s_max
from wlb.plan import GlobalBatch, UserError
from wlb.report.timeline import add_timeline_legend, draw_timeline, row_inches
from wlb.simulate import RunSimulation, Simulator, Wires, planner_of, sharded_steps, simulate_run
from wlb.spec import RunSpec, load, presets, system_overrides

FOLDER = Path(__file__).parent
STEPS = 24
VOCABULARY = 128_256
"""Size where a preset takes it from the data: Llama 3's."""
SYSTEMS = ("plain_4d", "wlb")
SHOWN = "7b_128k"
"""The preset whose step is drawn."""


def specs_of(preset: str, system: str) -> list[RunSpec]:
    """Returns the alternatives of a system on a preset, with one pipeline if it leaves DP open."""
    base = load(preset, [])
    out: list[RunSpec] = []
    for overrides in system_overrides(system, planned_gib=planned_gib(base)):
        spec = load(preset, list(overrides))
        spec = replace(
            spec,
            parallel=replace(spec.parallel, dp=max(1, spec.parallel.dp)),
            model=replace(spec.model, vocab_size=spec.model.vocab_size or VOCABULARY),
            planner=replace(spec.planner, baseline=False),
        )
        out.append(with_s_max(spec, planned_gib=planned_gib(spec)))
    return out


def fastest(
    specs: Sequence[RunSpec], batches: Sequence[GlobalBatch]
) -> tuple[RunSimulation, RunSimulation]:
    """Returns a run by links and the same plans in one communicator, of the fastest alternative.

    Alternatives that need too much memory to plan are left out, as `wlb simulate` does.
    """
    found: list[tuple[RunSimulation, RunSimulation]] = []
    for spec in specs:
        cost = workload_for(spec, "cuda")
        try:
            steps = list(sharded_steps(planner_of(spec, cost, batches), dp=spec.parallel.dp))
        except UserError:
            continue
        links, one = (simulate_run(spec, cost, batches, steps=steps, wires=w) for w in Wires)
        found.append((links, one))
    return min(found, key=lambda runs: runs[0].time_s)


def row_of(preset: str, steps: int, seed: int) -> list[float | str]:
    """Returns a preset's row of the table."""
    spec = specs_of(preset, "wlb")[0]
    batches = batches_of(spec, family=FAMILIES["wlb_paper"], steps=steps, seed=seed)
    runs = [fastest(specs_of(preset, system), batches) for system in SYSTEMS]
    (plain, plain_one), (ours, ours_one) = ((run.time_s for run in pair) for pair in runs)
    p, schedule = spec.parallel, f"{spec.pp.schedule}, {spec.pp.virtual_stages}"
    return [
        *(preset, p.pp, schedule, spec.micro_batches_per_pipeline),
        *(ours / steps, ours_one / steps, ours_one / ours),
        *(plain / ours, plain_one / ours_one),
    ]


def timelines(preset: str, steps: int, seed: int) -> Any:
    """Draws a step of median time under ours by links, and the same step in one communicator."""
    spec = specs_of(preset, "wlb")[0]
    batches = batches_of(spec, family=FAMILIES["wlb_paper"], steps=steps, seed=seed)
    cost = workload_for(spec, "cuda")
    plans = list(sharded_steps(planner_of(spec, cost, batches), dp=spec.parallel.dp))
    links, one = (Simulator(spec=spec, cost=cost, wires=wires) for wires in Wires)
    prices = links.price(plans)
    shown = int(np.argsort(links.run(prices).step_time_s)[len(plans) // 2])
    runs = [simulator.run(prices.select(slice(shown, shown + 1))) for simulator in (links, one)]
    end = max(float(run.step_time_s[0]) for run in runs)
    figure, axes = new_figure(
        nrows=2, height=1.7 + 2 * row_inches(spec.parallel.pp) * spec.parallel.pp
    )
    for panel, run, title in zip(axes, runs, ("for each link", "for the pipeline"), strict=True):
        draw_timeline(panel, run, 0, end_s=end)
        seconds = float(run.step_time_s[0])
        panel.set_title(f"a communicator {title}: {seconds:.2f} s", fontsize=10, loc="left")
    axes[0].set_xlabel("")
    add_timeline_legend(figure, runs[0])
    return figure


def pipelines() -> list[str]:
    """Returns the presets that have a pipeline."""
    return [name for name in presets() if load(name, []).parallel.pp > 1]


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(steps=STEPS)
    options = parser.parse_args()
    steps, names = steps_of(options), pipelines()
    if options.quick:
        steps, names = 2, [SHOWN]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(row_of, names, [steps] * len(names), [options.seed] * len(names)))
    table = Table(
        name="transfers",
        title="Seconds of a step, and speed-up over Plain-4D, by communicators",
        columns=[
            *("preset", "PP", "schedule, virtual stages", "micro-batches"),
            *("links, s", "one, s", "one / links"),
            *("over Plain-4D, links", "over Plain-4D, one"),
        ],
        rows=rows,
        formats={
            "PP": "d",
            "micro-batches": "d",
            "links, s": ".2f",
            "one, s": ".2f",
            "one / links": ".2f",
            "over Plain-4D, links": ".3f",
            "over Plain-4D, one": ".3f",
        },
        note="Seconds are of the system `wlb`, per global batch; Plain-4D has the paper's loader.",
    )
    show(table)
    if options.quick:
        return
    text = (
        "Both layouts execute the same plans; nothing ran on a GPU. **links**: each link between "
        "neighbouring pipeline ranks has a communicator, as wlb makes it. **one**: the whole "
        "pipeline has one, which is what torch uses for transfers where NCCL starts eagerly "
        "(`device_id`), and for batched transfers in any case. Interleaved and zero-bubble "
        "schedules post receives long before their data exist. In one communicator such a "
        "receive holds up the sends that the rank posts behind it. With one for each link "
        "nothing is held up: both ranks post the link's transfers in the same order, so the one "
        "that is late for a transfer is late for the next one as well "
        "([COMMUNICATION.md](../../../wlb/parallel/COMMUNICATION.md))."
    )
    write_results(
        FOLDER,
        title="Communicators of a pipeline's transfers",
        how=How.SIMULATED,
        profile=load_profile("h100"),
        seed=options.seed,
        text=text,
        tables=[table],
        figures=[
            Picture(
                name="timelines",
                caption=f"One step of {SHOWN} under ours, with a communicator for each link and "
                "with one for the pipeline. The passes are the same; the gaps are waits for "
                "transfers that stand behind a receive.",
                figure=timelines(SHOWN, steps, options.seed),
            )
        ],
    )


if __name__ == "__main__":
    main()
