"""Draws README's picture: one step of 7B-128K as a usual loader packs it and as wlb packs it.

`python -m experiments.beyond.overview [--seed 0] [--steps 640]` simulates the run twice, over
documents drawn from the fitted distribution of lengths: with the usual loader (of Megatron-LM and
torchtitan), and with wlb. The picture has the timeline of one step of each run: when every pipeline
stage computes, and when it waits.

The step is a typical one (`typical`): its times and its saving are close to the means of the runs,
and its documents have about equal work in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import constants
from experiments.harness.arguments import experiment_parser
from experiments.harness.drawing import new_figure
from experiments.harness.evaluation import EARLIER_GIB, Case, batches_of, spec_of
from experiments.harness.pages import How, Picture, Table, show, write_results
from wlb.cost import ProfiledWorkload, attention_latency, workload_of
from wlb.plan import FloatArray, GlobalBatch, IntArray, MicroBatch, imbalance
from wlb.simulate import (
    NodeKind,
    PassKind,
    ShardedStep,
    Simulation,
    Simulator,
    planner_of,
    sharded_steps,
)
from wlb.simulate.step import chunked
from wlb.spec import USUAL, system_overrides

CONFIG = "7b_128k"
SYSTEMS = {
    USUAL: "Before: windows of equal tokens (usual loader)",
    "wlb": "After: micro-batches of equal work (wlb)",
}
SHORT, LONG, WAITING, EDGE = "#56B4E9", "#D55E00", "#EDEDED", "#C4C4C4"
FORWARD_SHARE = 0.55
"""Share of white in the colour of a forward pass; backward passes are darker."""
SLOW = 1.05
"""Work over the step's mean above which a micro-batch is drawn in another colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A simulated step of a run."""

    title: str
    simulation: Simulation
    sharded: ShardedStep
    cost: ProfiledWorkload

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Returns the micro-batches in the order in which the pipeline runs them."""
        return self.sharded.pipelines[0].micro_batches

    @property
    def time_ms(self) -> float:
        return float(self.simulation.step_time_s[0]) * 1e3

    @property
    def idle(self) -> float:
        """Returns the share of the step in which a stage waits, as a mean over stages."""
        return float(self.simulation.bubble[0].mean())

    @property
    def times_ns(self) -> IntArray:
        """Returns the predicted forward latency of each micro-batch, shape [N]."""
        found = [self.cost.forward_latency_ns(b.lengths).sum() for b in self.micro_batches]
        return np.array(found, np.int64)

    @property
    def longest(self) -> int:
        """Returns the index of the micro-batch with the longest document."""
        return int(np.argmax([int(batch.lengths.max()) for batch in self.micro_batches]))

    @property
    def rank_times_ns(self) -> IntArray:
        """Returns the attention time of each CP rank in micro-batch `longest`, shape [CP].

        It is the predicted time of the forward pass.
        """
        sharding = self.sharded.pipelines[0].shardings[self.longest]
        return attention_latency(sharding, self.cost).forward_ns


class SimulatedRun:
    """The planned and simulated steps of a system's run."""

    def __init__(self, system: str, *, num_steps: int, seed: int) -> None:
        overrides = system_overrides(system, planned_gib=EARLIER_GIB)[0]
        case = Case(
            name=system,
            config=CONFIG,
            overrides=overrides,
            steps=num_steps,
            seed=seed,
            kernel=constants.FLASH_3,
        )
        self.title, self.spec = SYSTEMS[system], spec_of(case)
        self.cost = workload_of(self.spec, constants.profile())
        self.simulator = Simulator(spec=self.spec, cost=self.cost)
        batches: list[GlobalBatch] = batches_of(
            self.spec, family=case.family, steps=num_steps, seed=seed
        )
        planner = planner_of(self.spec, self.cost, batches)
        self.steps = list(sharded_steps(planner, dp=1))

    @cached_property
    def time_s(self) -> FloatArray:
        """Returns the simulated time of each step, shape [steps]."""
        chunks = chunked(self.steps)
        runs = [self.simulator.run(self.simulator.price(chunk)) for chunk in chunks]
        return np.concatenate([run.step_time_s for run in runs])

    @cached_property
    def work_ns(self) -> IntArray:
        """Returns the predicted work of each step's documents, shape [steps]."""
        found = [self.cost.workload_ns(s.plan.packing.attended).sum() for s in self.steps]
        return np.array(found, np.int64)

    def step(self, number: int) -> Step:
        sharded = self.steps[number]
        simulation = self.simulator.run(self.simulator.price([sharded]))
        return Step(title=self.title, simulation=simulation, sharded=sharded, cost=self.cost)


def typical(plain: SimulatedRun, ours: SimulatedRun) -> int:
    """Returns the number of a typical step.

    Four relative deviations are computed for each step, and the step whose largest one is smallest
    is chosen: of its time with the usual loader, and of its time with wlb, from the mean of that
    run; of the ratio of both times from the ratio of the means; and of its work with wlb from its
    work with the usual loader. The last two count twice.
    """
    num = min(len(plain.steps), len(ours.steps))
    # In the first steps the packer's waiting documents are still few, and the last steps flush
    # them. So choose from the middle.
    middle = slice(num // 4, num * 7 // 8)
    times = [run.time_s[middle] / run.time_s.mean() for run in (plain, ours)]
    work = ours.work_ns[middle] / plain.work_ns[middle]
    saved = times[1] / times[0]
    deviations = np.abs([*(t - 1 for t in times), 2 * (saved - 1), 2 * (work - 1)])
    return num // 4 + int(deviations.max(0).argmin())


def draw_timelines(steps: Sequence[Step]) -> Any:
    """Draws the steps below each other on the same time axis."""
    figure, axes = new_figure(nrows=2, height=5.2, sharex="col")
    end = max(step.time_ms for step in steps)
    for panel, step in zip(axes, steps, strict=True):
        _timeline(panel, step, end)
    axes[0].set_xlabel("")
    axes[-1].set_xlabel("time in the step (ms), simulated")
    before, after = (step.time_ms for step in steps)
    axes[1].annotate("", (before, 1.5), (after, 1.5), arrowprops={"arrowstyle": "<->", "lw": 1.3})
    axes[1].text(
        (before + after) / 2, 1.38, f"{1 - after / before:.0%}\nless time",
        ha="center", va="bottom", fontsize=11, fontweight="bold",
    )  # fmt: skip
    _legend(figure, axes[0])
    return figure


def _timeline(axes: Any, step: Step, end: float) -> None:
    simulation, spec = step.simulation, step.simulation.simulator.spec
    num_stages, total = spec.parallel.pp, step.time_ms
    is_slow = step.times_ns > SLOW * step.times_ns.mean()
    for row in range(num_stages):
        axes.barh(row, total, 0.82, color=WAITING, hatch="///", edgecolor=EDGE, linewidth=0)
    for i, node in enumerate(simulation.simulator.graph.nodes):
        if node.kind != NodeKind.PASS or node.action is None:
            continue
        ms = float(simulation.durations_ns[i, 0, 0]) / 1e6
        at = float(simulation.ends_ns[i, 0, 0]) / 1e6 - ms
        colour = LONG if is_slow[node.action.micro_batch] else SHORT
        if node.action.kind == PassKind.FORWARD:
            colour = lighter(colour)
        axes.barh(node.rank, ms, 0.82, at, color=colour, edgecolor="white", linewidth=0.5)
    axes.axvline(total, color="black", lw=1.6)
    axes.set(xlim=(0, end * 1.005), ylim=(num_stages - 0.45, -0.55), yticks=range(num_stages))
    axes.set_ylabel("pipeline stage")
    axes.grid(visible=False)
    axes.tick_params(labelbottom=True)
    words = f"{step.title}: {total:,.0f} ms, stages wait {step.idle:.0%} of it"
    axes.set_title(words, fontsize=11, loc="left", fontweight="bold")


def lighter(colour: str) -> tuple[float, float, float]:
    """Returns the colour mixed with white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    mixed = (c + (1 - c) * FORWARD_SHARE for c in (red, green, blue))
    return tuple(mixed)  # type: ignore[return-value]


def _legend(figure: Any, axes: Any) -> None:
    names = {
        LONG: f"micro-batch of more than {SLOW:g} times the mean work",
        SHORT: "other micro-batches (light: forward, dark: backward)",
    }
    handles = [axes.barh(0, 0, color=colour, label=name) for colour, name in names.items()]
    handles.append(axes.barh(0, 0, color=WAITING, hatch="///", edgecolor=EDGE, label="waiting"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def strategy_of(step: Step) -> str:
    return str(step.sharded.pipelines[0].shardings[step.longest].strategy).replace("_", " ")


COLUMNS = {
    "step made of": "", "step": "", "tokens": ",d", "step (ms)": ".1f", "waiting": ".1%",
    "work": ".3f", "slowest / mean micro-batch": ".3f", "sharding": "",
    "slowest / mean CP rank": ".3f", "all steps (s)": ".1f",
}  # fmt: skip


def table_of(number: int, steps: Sequence[Step], runs: Sequence[SimulatedRun]) -> Table:
    rows: list[list[Any]] = []
    for step, run in zip(steps, runs, strict=True):
        packing, ranks = step.sharded.plan.packing, step.rank_times_ns
        rows.append(
            [
                step.title.partition(": ")[2],
                packing.step,
                packing.num_tokens,
                step.time_ms,
                step.idle,
                float(run.work_ns[number] / runs[0].work_ns[number]),
                imbalance(step.times_ns),
                strategy_of(step),
                float(ranks.max() / ranks.mean()),
                float(run.time_s.sum()),
            ]
        )
    formats = {name: spec for name, spec in COLUMNS.items() if spec}
    return Table(
        name="steps",
        title="The steps",
        columns=tuple(COLUMNS),
        rows=rows,
        formats=formats,
        note="Work: predicted work of the step's documents over that of the usual loader's step.",
    )


TEXT = """
One step of a simulated run of 7B-128K (TP 8 x CP 2 x PP 4, interleaved 1F1B) over the same global
batches under both systems. It is a typical step: its times are close to the means of both runs,
their ratio is close to the ratio of the means, and its documents have about equal work in both. The
last column of the table has the time of all steps, including the flush of delayed documents. A
stage waits where no pass is drawn. Inside a pass, CP ranks wait for the slowest of them.
"""


def main() -> None:
    parser = experiment_parser(__doc__, seed=0, steps=640)
    options = parser.parse_args()
    runs = [SimulatedRun(name, num_steps=options.steps, seed=options.seed) for name in SYSTEMS]
    number = typical(*runs)
    steps = [run.step(number) for run in runs]
    table = table_of(number, steps, runs)
    write_results(
        Path(__file__).parent,
        title="A step of equal tokens and a step of equal work",
        how=How.SIMULATED,
        profile=runs[0].cost.profile,
        text=TEXT,
        seed=options.seed,
        tables=[table],
        figures=[
            Picture(
                name="overview",
                caption="Simulated timelines of one training step of 7B-128K: windows of equal "
                "tokens, where all pipeline stages wait for the micro-batch with the long document "
                "(above), and micro-batches of equal work (below)",
                figure=draw_timelines(steps),
            )
        ],
    )
    show(table)


if __name__ == "__main__":
    main()
