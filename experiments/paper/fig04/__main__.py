"""Simulates Figure 4 (a): attention of each GPU in a 405B job, by PP worker and in a CP group.

`python -m experiments.paper.fig04 [--steps 32] [--seed 1] [--quick]` simulates the job of Figure 1
on 8,192 GPUs under Plain-4D. It shows the attention time of every GPU in one step: grouped by DP
and PP worker, in the CP group of the slowest GPU, and as a heat map of all GPUs.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import constants
from experiments.harness.arguments import experiment_parser
from experiments.harness.drawing import COLOURS, new_figure
from experiments.harness.pages import Against, How, Picture, Table, show, write_results
from experiments.paper.fig01.large_job import STEPS, FloatArray, simulate, slowest, traced_step
from wlb.report.plots import heat_map_figure
from wlb.simulate import Simulation


def relative(simulation: Simulation, step: int) -> FloatArray:
    """Returns each GPU's attention time over the mean of all GPUs, shape [dp, pp, cp]."""
    of_step = simulation.attention_s[step]
    return of_step / of_step.mean()


def spreads(values: FloatArray) -> dict[str, tuple[float, float]]:
    """Returns how much attention differs at each level of parallelism.

    Args:
        values: Attention of each GPU, shape [dp, pp, cp].

    Returns:
        (mean, largest) of the ratio slowest / fastest over the groups of a level, by the level's
        name.
    """
    of_workers = values.mean(axis=2)
    levels = {
        "DP workers": np.array([of_workers.mean(axis=1).max() / of_workers.mean(axis=1).min()]),
        "PP workers of a DP worker": of_workers.max(axis=1) / of_workers.min(axis=1),
        "CP ranks of a group": (values.max(axis=2) / values.min(axis=2)).ravel(),
    }
    return {name: (float(found.mean()), float(found.max())) for name, found in levels.items()}


def levels_table(simulation: Simulation, step: int) -> Table:
    steps = [spreads(relative(simulation, s)) for s in range(simulation.num_steps)]
    rows: list[list[Any]] = []
    for name, (mean, most) in steps[step].items():
        every = [of_step[name] for of_step in steps]
        over = (float(np.mean([m for m, _ in every])), max(most for _, most in every))
        rows.append([name, mean, most, *over])
    rows.append(["TP ranks of a CP rank", 1.0, 1.0, 1.0, 1.0])
    columns = ("slowest over fastest of", "mean", "most", "mean of steps", "most of steps")
    return Table(
        name="levels",
        title=f"Attention, slowest over fastest at each level, step {step}",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(columns[1:], ".2f"),
        note="mean, most: of the groups of a level. PP workers differ by their layers only (8, "
        "the first and the last 7), TP ranks are alike: nothing slows a single GPU.",
    )


def workers_table(values: FloatArray) -> Table:
    dp, pp, _ = values.shape
    rows = [
        [d, p, *(float(f(values[d, p])) for f in (np.mean, np.min, np.max))]
        for d in range(dp)
        for p in range(pp)
    ]
    return Table(
        name="workers",
        title="Every PP worker",
        columns=("dp", "pp", "mean of CP ranks", "least", "most"),
        rows=rows,
        most_rows=0,
        note="Attention over the mean of all GPUs.",
    )


def draw(values: FloatArray, tp: int) -> Any:
    """Draws the GPUs of all PP workers (1) and of the slowest GPU's CP group (2)."""
    dp, pp, cp = values.shape
    figure, (left, right) = new_figure(ncols=2, height=4.2, sharey=True)
    for d in range(dp):
        at = np.repeat(d * pp + np.arange(pp), cp)
        left.plot(at, values[d].ravel(), "o", color=COLOURS[d], markersize=2.5, mew=0)
        if d:
            left.axvline(d * pp - 0.5, color="#555555", linewidth=0.8, ls=":")
    left.axhline(1, color="#000000", linewidth=0.8)
    left.set(xlabel=f"PP workers, {pp} of each DP worker", ylabel="attention / mean of GPUs")
    left.set(xticks=(np.arange(dp) + 0.5) * pp - 0.5, xticklabels=[f"DP {d}" for d in range(dp)])
    left.grid(visible=False, axis="x")
    left.set_title(f"(1) all GPUs, {cp * tp} a PP worker", fontsize=10)
    d, p, _ = np.unravel_index(int(values.argmax()), values.shape)
    group = np.repeat(values[d, p], tp)
    right.plot(np.arange(cp * tp), group, "o", color=COLOURS[int(d)], markersize=3.5, mew=0)
    right.axhline(group.mean(), color="#000000", linewidth=0.8)
    right.annotate("mean of the group", (0, group.mean()), xytext=(0, 4),
                   textcoords="offset points", fontsize=9)  # fmt: skip
    right.set(xlabel=f"GPUs of one CP group: {cp} CP ranks of {tp} TP ranks")
    right.set(xticks=np.arange(0, cp * tp + 1, tp * 2), xticklabels=range(0, cp + 1, 2))
    right.set_title(f"(2) the slowest GPU's CP group, DP {d}, PP {p}", fontsize=10)
    left.set_ylim(0, None)
    return figure


def text(simulation: Simulation, step: int) -> str:
    values, tp = relative(simulation, step), simulation.simulator.spec.parallel.tp
    over = slowest(values, tp=tp).others
    of_dp = ", ".join(f"{x:.2f}" for x in values.mean(axis=(1, 2)))
    groups = values[:, 1]
    cp = groups / groups.mean(axis=1, keepdims=True)
    return (
        f"The job of [Figure 1](../../fig01/results/README.md) under Plain-4D: attention kernels, "
        f"forward and backward, of all micro-batches of step {step}, the same step as there (the "
        f"one in the middle by its slowest GPU).\n\n"
        f"**What it shows.** The levels are the paper's. DP workers differ by the windows that "
        f"their loaders made ({of_dp} times the mean); the 16 PP workers of one are alike, since "
        f"they work on the same micro-batches with 8 layers each (the first and the last with 7): "
        f"vertical lines of equal reach. In a CP group the slowest rank has up to {cp.max():.2f} "
        f"times, the least busy {cp.min():.2f} times the group's mean: per-sequence chunks hold "
        f"equally many tokens, but not of equal depth in their documents. Both together make the "
        f"slowest GPU {over:.2f} times the mean of the others.\n\n"
        f"**Where ours differs.** PP workers of as many layers and TP ranks are not nearly but "
        f"exactly alike: the simulator gives equal kernels equal times. The paper prints no "
        f"numbers for this figure, and its layout is not stated."
    )


def main() -> None:
    parser = experiment_parser(__doc__, quick="simulate 5 steps", seed=1, steps=STEPS)
    options = parser.parse_args()
    steps = 5 if options.quick else options.steps
    simulation = simulate("plain_4d", steps=steps, seed=options.seed)
    tp, step = simulation.simulator.spec.parallel.tp, traced_step(simulation)
    values = relative(simulation, step)
    found = spreads(values)
    against = [
        Against(
            what="DP workers",
            paper="vary significantly",
            ours=f"slowest {found['DP workers'][0]:.2f} times the fastest",
        ),
        Against(
            what="PP workers of a DP worker",
            paper="nearly identical",
            ours=f"{found['PP workers of a DP worker'][1]:.2f}, by construction",
        ),
        Against(
            what="CP ranks of a group",
            paper="significant imbalance",
            ours=f"slowest {found['CP ranks of a group'][0]:.2f} times the fastest on average",
        ),
        Against(what="TP ranks of a CP rank", paper="similar", ours="alike, by construction"),
    ]
    table = levels_table(simulation, step)
    show(table, against=against)
    if options.quick:
        return
    caption = "Attention of every GPU by PP worker, and in one CP group; one step, Plain-4D."
    heat = heat_map_figure(
        simulation.attention_s[step], what="attention", title=f"Plain-4D, step {step}", tp=tp
    )
    write_results(
        Path(__file__).parent,
        title="Figure 4 (a): attention of 8,192 GPUs",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=options.seed,
        text=text(simulation, step),
        against=against,
        tables=[table, workers_table(values)],
        figures=[
            Picture(name="attention", caption=caption, figure=draw(values, tp)),
            Picture(
                name="heat_map",
                caption="The same: rows are CP ranks of each DP worker, columns pipeline ranks.",
                figure=heat,
            ),
        ],
    )


if __name__ == "__main__":
    main()
