"""Simulates Figure 5: how much one slow micro-batch delays a pipeline under several schedules.

`python -m experiments.paper.fig05 [--pp 4] [--slow 1.44]` varies the schedule, the number of
virtual stages and the position of the slow micro-batch. Each step is compared with a step of equal
micro-batches in the same schedule.

The order of passes and their dependencies are those of the real schedules. Times are set by hand:
on a rank, a micro-batch takes 10 ms in forward and 20 ms in backward, divided among the rank's
virtual stages. Zero-bubble schedules divide backward into two halves, for inputs and for weights.
Messages, collectives and the optimiser take no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import configuration
from experiments.harness.drawing import COLOURS, LINES, MARKERS, new_figure
from experiments.harness.pages import Against, How, Picture, Table, show, write_results
from wlb.cost import Scope, workload_for
from wlb.report.timeline import add_timeline_legend, draw_timeline, row_inches
from wlb.simulate import NodeKind, PassKind, Simulation, Simulator, StepPrices
from wlb.simulate.pass_times import TermPrices
from wlb.spec import Schedule

FORWARD_NS, BACKWARD_NS = 10_000_000, 20_000_000
FREE = TermPrices(per_token={}, per_call={})
"""Prices of passes and messages that take no time."""


@dataclass(frozen=True, slots=True)
class Layout:
    schedule: Schedule
    v: int

    @property
    def name(self) -> str:
        return f"{self.schedule}, v = {self.v}"


LAYOUTS = (
    Layout(Schedule.ONE_F_ONE_B, 1),
    Layout(Schedule.INTERLEAVED_1F1B, 1),
    Layout(Schedule.INTERLEAVED_1F1B, 2),
    Layout(Schedule.INTERLEAVED_1F1B, 4),
    Layout(Schedule.INTERLEAVED_1F1B, 8),
    Layout(Schedule.INTERLEAVED_ZERO_BUBBLE, 1),
    Layout(Schedule.INTERLEAVED_ZERO_BUBBLE, 4),
)


@cache
def simulator_of(layout: Layout, pp: int, n: int) -> Simulator:
    """Returns the simulator of a schedule with one layer per stage, without CP and DP."""
    spec = configuration(
        "7b_128k",
        *(f"parallel.{name}={size}" for name, size in (("cp", 1), ("pp", pp), ("dp", 1))),
        f"pp.schedule={layout.schedule}",
        f"pp.virtual_stages={layout.v}",
        f"model.num_layers={pp * layout.v}",
        f"data.num_windows={n}",
    )
    return Simulator(spec=spec, cost=workload_for(spec, "cuda"))


def simulate(layout: Layout, *, pp: int, relative: npt.NDArray[np.float64]) -> Simulation:
    """Simulates steps with given times of micro-batches.

    Args:
        layout: Schedule and virtual stages.
        pp: Pipeline ranks.
        relative: Time of each micro-batch over that of a mean one, shape [steps, n].
    """
    simulator = simulator_of(layout, pp, relative.shape[1])
    nodes = simulator.graph.nodes
    of_kind = {
        PassKind.FORWARD: FORWARD_NS,
        PassKind.BACKWARD: BACKWARD_NS,
        PassKind.BACKWARD_INPUT: BACKWARD_NS // 2,
        PassKind.BACKWARD_WEIGHT: BACKWARD_NS // 2,
    }
    durations = np.zeros((len(nodes), len(relative), 1), np.int64)
    for i, node in enumerate(nodes):
        if node.kind == NodeKind.PASS and node.action is not None:
            _, kind, micro_batch = node.action
            durations[i, :, 0] = np.rint(relative[:, micro_batch] * of_kind[kind] / layout.v)
    nothing = np.zeros((*relative.shape[:1], 1, relative.shape[1], 1), np.int64)
    prices = StepPrices(
        tokens=nothing[..., 0],
        attention_forward_ns=nothing,
        attention_backward_ns=nothing,
        exchange_forward_ns=nothing[..., 0],
        exchange_backward_ns=nothing[..., 0],
        linear=(dict.fromkeys(PassKind, FREE),),
        ends={},
        message=dict.fromkeys(Scope, FREE),
        kind_layers=simulator.spec.stage_kind_layers,
    )
    ends = simulator.graph.ends(durations)
    return Simulation(simulator=simulator, prices=prices, durations_ns=durations, ends_ns=ends)


def one_slow(n: int, slow: float, *, is_added: bool) -> npt.NDArray[np.float64]:
    """Returns relative times of micro-batches, one row for each position of the slow one.

    Args:
        n: Micro-batches of a step.
        slow: Time of the slow micro-batch over the mean.
        is_added: Whether the others keep their time, so that the step's work grows. Otherwise they
            take less time, so that the work stays the same.

    Returns:
        Times, shape [n + 1, n]. In row 0 all are equal; in row i + 1 micro-batch i is slow.
    """
    others = 1.0 if is_added else (n - slow) / (n - 1)
    out = np.full((n + 1, n), others)
    out[0] = 1.0
    out[np.arange(1, n + 1), np.arange(n)] = slow
    return out


def slow_downs(layout: Layout, *, pp: int, n: int, slow: float, is_added: bool = False) -> Any:
    """Returns step time over balanced step time, minus 1, for each position of the slow one."""
    times = simulate(layout, pp=pp, relative=one_slow(n, slow, is_added=is_added)).step_time_s
    return times[1:] / times[0] - 1


def papers_path(pp: int, n: int, slow: float) -> float:
    """Returns the slow-down by the critical path that Section 3.1 describes.

    The path is the slow micro-batch through all workers, plus the passes of the others on the first
    worker.
    """
    others = (n - slow) / (n - 1)
    return (pp * slow + (n - 1) * others) / (pp + n - 1) - 1


def summary_table(*, pp: int, slow: float) -> Table:
    columns = ("schedule", "v", "n", "balanced (ms)", "slow one first", "mean of positions",
               "least", "most", "work added, first", "work added, mean")  # fmt: skip
    rows: list[list[Any]] = []
    for n in (pp, 2 * pp, 4 * pp):
        for layout in LAYOUTS:
            kept = slow_downs(layout, pp=pp, n=n, slow=slow)
            added = slow_downs(layout, pp=pp, n=n, slow=slow, is_added=True)
            even = simulate(layout, pp=pp, relative=np.ones((1, n))).step_time_s[0]
            numbers = (kept[0], kept.mean(), kept.min(), kept.max(), added[0], added.mean())
            rows.append(
                [str(layout.schedule), layout.v, n, even * 1e3, *(float(x) for x in numbers)]
            )
    return Table(
        name="slow_downs",
        title=f"Slow-down by one micro-batch of {slow:g} among n, pp = {pp}",
        columns=columns,
        rows=rows,
        formats={"balanced (ms)": ".1f"} | dict.fromkeys(columns[4:], ".1%"),
        note="Step time over that of n equal micro-batches in the same schedule, less 1. Work kept "
        "unless said otherwise: the others take (n - slow) / (n - 1).",
    )


def positions_table(*, pp: int, slow: float) -> Table:
    rows: list[list[Any]] = []
    for n in (pp, 2 * pp, 4 * pp):
        for layout in LAYOUTS:
            for is_added in (False, True):
                found = slow_downs(layout, pp=pp, n=n, slow=slow, is_added=is_added)
                work = "added" if is_added else "kept"
                name = (str(layout.schedule), layout.v, n, work)
                rows += [[*name, i, float(x)] for i, x in enumerate(found)]
    return Table(
        name="positions",
        title="By position of the slow micro-batch",
        columns=("schedule", "v", "n", "work", "position", "slow-down"),
        rows=rows,
        formats={"slow-down": ".1%"},
        most_rows=0,
    )


def timelines(layout: Layout, *, pp: int, n: int, slow: float, position: int = 0) -> Any:
    """Draws the balanced step above the unbalanced one, with the same time axis."""
    rows = one_slow(n, slow, is_added=False)[[0, position + 1]]
    simulation = simulate(layout, pp=pp, relative=rows)
    figure, axes = new_figure(nrows=2, height=1.7 + 2 * row_inches(pp) * pp)
    even, uneven = simulation.step_time_s.tolist()
    titles = (
        f"{layout.name}: all micro-batches equal, {even * 1e3:.0f} ms",
        f"micro-batch {position} takes {slow:g} times the mean: {uneven * 1e3:.0f} ms, "
        f"{uneven / even - 1:+.0%}",
    )
    for step, (panel, title) in enumerate(zip(axes, titles, strict=True)):
        draw_timeline(panel, simulation, step, end_s=max(even, uneven))
        panel.set_title(title, fontsize=10, loc="left")
        panel.axvline(even * 1e3, color="black", linewidth=1, linestyle=":")
    axes[0].set_xlabel("")
    add_timeline_legend(figure, simulation)
    return figure


def curves(*, pp: int, slow: float) -> Any:
    """Draws the slow-down by virtual stages (left) and by position of the slow one (right)."""
    figure, (left, right) = new_figure(ncols=2, height=4.2)
    interleaved = [layout for layout in LAYOUTS if layout.schedule == Schedule.INTERLEAVED_1F1B]
    vs = [layout.v for layout in interleaved]
    for k, n in enumerate((pp, 2 * pp, 4 * pp)):
        found = [slow_downs(layout, pp=pp, n=n, slow=slow) * 100 for layout in interleaved]
        style = {"color": COLOURS[k], "marker": MARKERS[k]}
        left.plot(vs, [x.mean() for x in found], ls=LINES[k], label=f"n = {n}", **style)
        left.fill_between(vs, [x.min() for x in found], [x.max() for x in found],
                          color=COLOURS[k], alpha=0.15, linewidth=0)  # fmt: skip
        first = slow_downs(LAYOUTS[0], pp=pp, n=n, slow=slow).mean() * 100
        left.plot(0.72, first, marker=MARKERS[k], color=COLOURS[k], mfc="white", ls="")
    left.axhline((slow - 1) * 100, color="black", linewidth=0.8, linestyle=":")
    left.annotate(f"imbalance {slow:g}", (8, (slow - 1) * 100), xytext=(0, 3),
                  textcoords="offset points", fontsize=9, ha="right")  # fmt: skip
    left.set(xscale="log", xticks=[0.72, *vs], xticklabels=["1f1b", *map(str, vs)])
    left.minorticks_off()
    left.set(xlabel="virtual stages of interleaved 1F1B", ylabel="slow-down of the step (%)")
    left.set_ylim(top=(slow - 1) * 115)
    left.set_title("mean of positions; band: least to most", fontsize=10)
    left.legend(frameon=False)
    for k, layout in enumerate(LAYOUTS):
        if layout.schedule == Schedule.INTERLEAVED_ZERO_BUBBLE and layout.v > 1:
            continue
        found = slow_downs(layout, pp=pp, n=pp, slow=slow) * 100
        right.plot(range(pp), found, color=COLOURS[k], marker=MARKERS[k], ls=LINES[k % len(LINES)],
                   label=layout.name.replace("interleaved_1f1b", "interleaved"))  # fmt: skip
    right.set(xticks=range(pp), xlabel=f"position of the slow micro-batch, n = {pp}")
    right.set_ylim(0, (slow - 1) * 115)
    right.set_title("by position", fontsize=10)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
        title="right",
    )  # fmt: skip
    return figure


def against(*, pp: int, slow: float) -> Sequence[Against]:
    """Compares with Section 3.1, whose critical path becomes a number with the times given here."""
    kept = slow_downs(LAYOUTS[0], pp=pp, n=pp, slow=slow)
    return [
        Against(
            what=f"slow-down, {LAYOUTS[0].name}, n = pp = {pp}, worst position",
            paper=f"{papers_path(pp, pp, slow):.1%}",
            ours=f"{kept.max():.1%}",
            note="paper: its critical path (Section 3.1), with these passes",
        ),
        Against(
            what="what is enlarged at the PP level",
            paper="the slow micro-batch passes all workers one after the other",
            ours=f"the more so the shorter the rest: {slow - 1:.0%} is where many virtual stages "
            "lead with n = pp",
        ),
    ]


TEXT = """
**What it shows.** With as many micro-batches as pipeline ranks, a step cannot be shorter than the
slow micro-batch takes through all ranks, pp x {slow:g} forward and backward. Virtual stages
shorten everything else (the fill of the pipeline is divided by v) and not this path, so the better
a schedule hides its bubble, the more of an imbalance a step pays: from {first:.0%} with 1F1B to
{last:.0%} with eight stages a rank, towards {limit:.0%}, which is the imbalance itself. More
micro-batches hide a slow one: with n = 4 pp, {many:.1%} at most.

**1F1B stays below the paper's critical path** (the slow micro-batch through all workers plus the
others' passes on the first one, {path:.1%} here): that path is for a micro-batch that nobody
overlaps; in a schedule some passes of the others fall into its waiting times wherever it stands.
Its place matters as much as its size: in 1F1B with n = pp the second costs {least:.1%}, the last
{most:.1%}. Nothing here reorders micro-batches; the slow-downs say what reordering could gain at
most.

**Schedules**: interleaved 1F1B with one stage a rank, which warms up with twice the forward passes,
is slowed by {one:.1%} only. Zero-bubble takes the weights' passes off the slow one's path:
{zero:.1%} with v = 4.

**Left out:** messages, collectives, memory, and unequal ratios of forward to backward. Below 0 in
the table: the others take less than in the balanced step, and the slow one hides behind them.
"""


def text(*, pp: int, slow: float) -> str:
    one_f, one_v, eight = (
        slow_downs(LAYOUTS[k], pp=pp, n=pp, slow=slow) for k in (0, 1, LAYOUTS.index(EIGHT))
    )
    many = max(slow_downs(layout, pp=pp, n=4 * pp, slow=slow).max() for layout in LAYOUTS)
    return TEXT.format(
        slow=slow,
        first=one_f[0],
        last=eight[0],
        limit=slow - 1,
        many=many,
        path=papers_path(pp, pp, slow),
        least=one_f.min(),
        most=one_f.max(),
        one=one_v[0],
        zero=slow_downs(LAYOUTS[-1], pp=pp, n=pp, slow=slow)[0],
    )


EIGHT = Layout(Schedule.INTERLEAVED_1F1B, 8)


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks")
    parser.add_argument(
        "--slow", type=float, default=1.44, help="time of the slow micro-batch over the mean"
    )
    options = parser.parse_args()
    pp, slow = options.pp, options.slow
    made = [summary_table(pp=pp, slow=slow), positions_table(pp=pp, slow=slow)]
    rows = against(pp=pp, slow=slow)
    show(made[0], against=rows, width=160)
    shown = (("1f1b", LAYOUTS[0]), ("interleaved", LAYOUTS[3]))
    write_results(
        Path(__file__).parent,
        title="Figure 5: one slow micro-batch in a pipeline",
        how=How.SIMULATED,
        profile="times of passes are given (forward 10 ms, backward 20 ms of a mean micro-batch on "
        "a rank); no kernel profile enters. Orders and waits are those of `wlb.simulate`.",
        text=text(pp=pp, slow=slow),
        against=rows,
        tables=made,
        figures=[
            *(
                Picture(
                    name=f"timeline_{name}",
                    caption=f"{layout.name}, pp = n = {pp}: equal micro-batches above, one of "
                    f"{slow:g} below; dotted: the end of the balanced step",
                    figure=timelines(layout, pp=pp, n=pp, slow=slow),
                )
                for name, layout in shown
            ),
            Picture(
                name="slow_downs",
                caption=f"Slow-down by one micro-batch of {slow:g}: by virtual stages (left; "
                "unfilled: 1F1B) and by its position (right)",
                figure=curves(pp=pp, slow=slow),
            ),
        ],
    )


if __name__ == "__main__":
    main()
