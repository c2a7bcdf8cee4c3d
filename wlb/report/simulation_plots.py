"""Figures of simulated steps: timelines, GPUs, steps of runs, a breakdown; needs matplotlib.

Each returns a matplotlib Figure, nine inches wide, that is legible 800 pixels wide; `svg` makes it
part of a page. No axis hides a value; where one does not begin at 0 its label says so.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb.report.plots import (
    _svg,  # pyright: ignore[reportPrivateUsage]
    require_matplotlib,
)
from wlb.simulate import Kind, Node, NodeKind, RunSimulation, Simulation

FloatArray = npt.NDArray[np.float64]

MICRO_BATCHES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B59B00", "#6E6E6E")
"""Of backward passes, by micro-batch, again from the first after the last. Told apart by people who
do not see all colours, also from each other's light shades, which are forward passes."""
RUNS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)), "-", "-")
LIGHT = 0.58
"""White in the shade of a forward pass."""
INK = "#111111"
"""Text on a bar; not black, which follows a page's colours in `svg`."""
COLLECTIVE = "#F0E442"
WIDTH = 9.0
BAR = 0.86
CHUNK_SHIFT = 0.32
"""Part of a bar's height by which chunks of a rank stand lower than the first."""
MIN_FONT = 6.5
ANNOTATED_CELLS = 200
MORE_TOKENS = 0.02
"""Coefficient of variation of steps' tokens from which on time a token is shown as well."""


def svg(figure: Any, name: str) -> str:
    """The figure as an <svg> element; `name` must differ from other figures' of the page."""
    return _svg(figure, name)


# Timelines.


def timeline_figure(
    simulation: Simulation, step: int = 0, pipeline: int = 0, *, title: str = ""
) -> Any:
    """A row a pipeline rank: passes coloured by micro-batch, forward light and backward dark, what
    is waited for besides in grey, bubbles blank; the critical path outlined and joined up."""
    pp = simulation.simulator.spec.parallel.pp
    figure, (axes,) = _figure(height=1.5 + row_inches(pp) * pp)
    draw_timeline(axes, simulation, step, pipeline)
    axes.set_title(title or f"pipeline {pipeline}", fontsize=10, loc="left")
    add_timeline_legend(figure, simulation)
    return figure


def row_inches(pp: int) -> float:
    """A readable height of a timeline's row."""
    return 0.5 if pp <= 8 else 0.28


def draw_timeline(
    axes: Any, simulation: Simulation, step: int = 0, pipeline: int = 0, *, end_s: float = 0.0
) -> None:
    """Draws into given axes. end_s: of the time axis, so that timelines share it; else the step's.

    Each pass is a part of a collection with the gid `mb<i><kind>`; data are seconds or ms as the
    axis says, and rows are ranks.
    """
    total_s = max(end_s, float(simulation.step_time_s[step]))
    unit, scale = ("ms", 1e-6) if total_s < 2 else ("s", 1e-9)
    pp, v = simulation.simulator.spec.parallel.pp, simulation.simulator.spec.pp.virtual_stages
    ends, durations = (x[:, step, pipeline] for x in (simulation.ends_ns, simulation.durations_ns))
    start, stop = (np.asarray(x * scale, np.float64) for x in (ends - durations, ends))
    axes.set(xlim=(0, total_s * 1e9 * scale), ylim=(pp - 0.5, -0.5), yticks=range(pp))
    axes.set_xlabel(f"time ({unit})")
    axes.set_ylabel("pipeline rank")
    if v > 1:
        axes.set_title(f"lower in a row: later of {v} chunks", fontsize=8, loc="right")
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    bars = _Bars(axes=axes, simulation=simulation, start=start, stop=stop)
    bars.waits()
    bars.passes()
    bars.critical(step, pipeline)
    busy = simulation.bubble[step, pipeline]
    for rank in range(pp):
        axes.text(
            1.006, rank, f"{busy[rank]:.0%}", transform=axes.get_yaxis_transform(),
            va="center", fontsize=8,
        )  # fmt: skip
    axes.text(1.006, -0.62, "idle", transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)


def add_timeline_legend(figure: Any, simulation: Simulation) -> None:
    """Below the figure: what shades, colours and lines mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    n = simulation.simulator.spec.micro_batches_per_pipeline
    grey = MICRO_BATCHES[-1]
    splits = any(a.kind == Kind.BACKWARD_WEIGHT for a in simulation.simulator.order[0])
    handles: list[Any] = [
        Patch(facecolor=_mixed(grey, LIGHT), label="forward"),
        Patch(facecolor=grey, label="backward, inputs" if splits else "backward"),
    ]
    if splits:
        handles.append(
            Patch(facecolor=grey, edgecolor="white", hatch="////", label="backward, weights")
        )
    graph, durations = simulation.simulator.graph, simulation.durations_ns
    if any(durations[i].any() for i, node in enumerate(graph.nodes) if node.action is None):
        handles.append(Patch(facecolor=COLLECTIVE, label="collective, optimizer"))
    handles.append(Line2D([], [], color="#000000", linewidth=1.6, label="critical path"))
    cycle = len(MICRO_BATCHES)
    for i in range(min(n, cycle)):
        same = ", ".join(str(k) for k in range(i, n, cycle)[:3])
        more = ", .." if len(range(i, n, cycle)) > 3 else ""
        words = "micro-batch " if i == 0 else ""
        handles.append(Patch(facecolor=MICRO_BATCHES[i], label=f"{words}{same}{more}"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=8,
        columnspacing=1.2,
        handlelength=1.4,
    )


class _Bars(NamedTuple):
    """Draws nodes of one step of one pipeline; start, stop: in the axis' unit, [nodes]."""

    axes: Any
    simulation: Simulation
    start: FloatArray
    stop: FloatArray

    def box(self, i: int, node: Node) -> tuple[float, float, float, float]:
        """left, right, top, bottom; rows grow downwards."""
        spec = self.simulation.simulator.spec
        v = spec.pp.virtual_stages
        height, shift = BAR, 0.0
        if v > 1 and node.kind == NodeKind.PASS:
            height = BAR * (1 - CHUNK_SHIFT)
            shift = BAR * CHUNK_SHIFT * (node.stage // spec.parallel.pp) / (v - 1)
        top = node.rank - BAR / 2 + shift
        return float(self.start[i]), float(self.stop[i]), top, top + height

    def passes(self) -> None:
        from matplotlib.collections import PolyCollection

        groups: dict[tuple[int, Kind], list[tuple[float, float, float, float]]] = {}
        for i, node in enumerate(self.simulation.simulator.graph.nodes):
            if node.kind == NodeKind.PASS and node.action is not None:
                key = (node.action.micro_batch, node.action.kind)
                groups.setdefault(key, []).append(self.box(i, node))
        for (micro_batch, kind), boxes in groups.items():
            colour = MICRO_BATCHES[micro_batch % len(MICRO_BATCHES)]
            colour = _mixed(colour, LIGHT) if kind == Kind.FORWARD else colour
            collection = PolyCollection(
                [_corners(box) for box in boxes],
                facecolors=colour,
                edgecolors="white",
                linewidths=0.4,
                hatch="////" if kind == Kind.BACKWARD_WEIGHT else None,
            )
            collection.set_gid(f"mb{micro_batch}{kind}")
            self.axes.add_collection(collection)
            if kind != Kind.BACKWARD_WEIGHT:
                self.numbers(micro_batch, boxes, colour)

    def numbers(
        self, micro_batch: int, boxes: list[tuple[float, float, float, float]], colour: str
    ) -> None:
        """The micro-batch's number in each bar that has room for it."""
        rows, across = abs(np.diff(self.axes.get_ylim())[0]), self.axes.get_xlim()[1]
        inches = row_inches(self.simulation.simulator.spec.parallel.pp)
        for left, right, top, bottom in boxes:
            font = min(9.0, 72 * 0.6 * (bottom - top) * inches)
            wide = (right - left) / across * 0.86 * WIDTH * 72
            if font < MIN_FONT or wide < 0.75 * font * len(str(micro_batch)) or not rows:
                continue
            self.axes.text(
                (left + right) / 2,
                (top + bottom) / 2,
                str(micro_batch),
                ha="center",
                va="center_baseline",
                fontsize=font,
                color=INK if _is_light(colour) else "white",
                clip_on=True,
            )

    def waits(self) -> None:
        """Gathers, which go on beside passes, as a strip under the row; what a rank waits for over
        all of the row."""
        from matplotlib.collections import PolyCollection

        boxes: list[tuple[float, float, float, float]] = []
        graph = self.simulation.simulator.graph
        for i, node in enumerate(graph.nodes):
            if node.action is not None or self.stop[i] <= self.start[i]:
                continue
            ranks = range(graph.num_ranks) if node.rank < 0 else [node.rank]
            is_aside = node.kind in (NodeKind.GATHER, NodeKind.PREFETCH)
            for rank in ranks:
                left, right, top, bottom = self.box(i, node._replace(rank=rank))
                boxes.append((left, right, bottom, bottom + 0.09) if is_aside
                             else (left, right, top, bottom))  # fmt: skip
        collection = PolyCollection(
            [_corners(box) for box in boxes], facecolors=COLLECTIVE, linewidths=0
        )
        collection.set_gid("waits")
        self.axes.add_collection(collection)

    def critical(self, step: int, pipeline: int) -> None:
        from matplotlib.collections import PolyCollection

        s = self.simulation
        graph = s.simulator.graph
        path = graph.critical_path(s.ends_ns, s.durations_ns, step=step)
        boxes: list[tuple[float, float, float, float]] = []
        line: list[tuple[float, float]] = []
        for i, of_pipeline in path:
            node = graph.nodes[i]
            if of_pipeline != pipeline:
                line += [(np.nan, np.nan)]
            elif node.kind == NodeKind.PASS:
                box = self.box(i, node)
                boxes.append(box)
                middle = (box[2] + box[3]) / 2
                line += [(box[0], middle), (np.nan, np.nan), (box[1], middle)]
        collection = PolyCollection(
            [_corners(box) for box in boxes],
            facecolors="none",
            edgecolors="#000000",
            linewidths=1.4,
            zorder=4,
        )
        collection.set_gid("critical")
        self.axes.add_collection(collection)
        if line:
            # From where a pass ends to where the next one begins, not through the bars.
            xs, ys = zip(*line, strict=True)
            self.axes.plot(xs, ys, color="#000000", linewidth=1.4, zorder=4)


def _corners(box: tuple[float, float, float, float]) -> list[tuple[float, float]]:
    left, right, top, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


# GPUs.


def heat_map_figure(
    values: FloatArray, *, what: str = "computing time", title: str = "", tp: int = 1
) -> Any:
    """values [dp, pp, cp], of each GPU, shown relative to their mean: rows are dp x cp, columns pp.

    tp: GPUs that each cell stands for.
    """
    if values.ndim != 3 or not values.size:
        raise ValueError(f"values have shape {values.shape}, not [dp, pp, cp]")
    dp, pp, cp = values.shape
    mean = float(values.mean())
    relative = (values / mean if mean else np.ones_like(values)).transpose(0, 2, 1)
    relative = relative.reshape(dp * cp, pp)
    rows = dp * cp
    figure, (axes,) = _figure(height=1.6 + min(6.0, max(1.2, 0.3 * rows)))
    low, high = float(relative.min()), float(relative.max())
    if high - low < 1e-3:
        low, high = low - 0.01, high + 0.01
    mesh = axes.pcolormesh(relative, cmap="cividis", vmin=low, vmax=high)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set(xlabel="pipeline rank", xticks=np.arange(pp) + 0.5, xticklabels=range(pp))
    if cp > 1 and rows <= 32:
        labels = [f"dp {d}, cp {c}" for d in range(dp) for c in range(cp)]
        axes.set(yticks=np.arange(rows) + 0.5, yticklabels=labels)
    else:
        axes.set(yticks=(np.arange(dp) + 0.5) * cp, yticklabels=[f"dp {d}" for d in range(dp)])
        if cp > 1:
            axes.set_ylabel(f"{cp} rows each: CP ranks")
    axes.tick_params(length=0)
    for d in range(1, dp if cp > 1 else 1):
        axes.axhline(d * cp, color="white", linewidth=2 if rows <= 32 else 1)
    if relative.size <= ANNOTATED_CELLS:
        for (row, column), value in np.ndenumerate(relative):
            is_dark = value < (low + high) / 2
            axes.text(
                column + 0.5,
                row + 0.5,
                f"{value:.3f}" if high - low < 0.1 else f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if is_dark else INK,
            )
    figure.colorbar(mesh, ax=axes, label="relative to mean")
    words = f"{title}: " if title else ""
    words += f"{what} / mean of all GPUs, {relative.min():.3f} to {relative.max():.3f}"
    words += f"; {tp} TP ranks a cell" if tp > 1 else ""
    axes.set_title(words, fontsize=10, loc="left")
    return figure


# Steps of runs.


def imbalance_figure(runs: Sequence[RunSimulation]) -> Any:
    """Imbalance and time of every step, time over the first run's mean: faint points, and running
    means as lines. Time a token as well, where steps differ in tokens."""
    if not runs:
        raise ValueError("no run was given")
    of_first = f"\nmean of {runs[0].label}"
    series = {
        "imbalance of packing": [
            (
                np.array([1.0 if m.imbalance is None else m.imbalance for m in run.metrics]),
                np.array([m.mean_workload_ns for m in run.metrics]),
            )
            for run in runs
        ],
        f"step time /{of_first}": [
            (run.step_time_s / float(runs[0].step_time_s.mean()), np.ones(run.step_time_s.size))
            for run in runs
        ],
    }
    if any(float(run.tokens.std()) > MORE_TOKENS * float(run.tokens.mean()) for run in runs):
        a_token = runs[0].time_s / float(runs[0].tokens.sum())
        series[f"time a token /{of_first}"] = [
            (run.step_time_s / np.maximum(1, run.tokens) / a_token, run.tokens.astype(np.float64))
            for run in runs
        ]
    figure, axes = _figure(height=0.9 + 1.9 * len(series), nrows=len(series), sharex=True)
    for panel, (name, values) in zip(axes, series.items(), strict=True):
        for k, (run, (of_run, weights)) in enumerate(zip(runs, values, strict=True)):
            colour, dash = RUNS[k % len(RUNS)], DASHES[k % len(DASHES)]
            steps = np.arange(of_run.size)
            faint = 0.25 if of_run.size > 40 else 0.5
            panel.plot(steps, of_run, "o", color=colour, markersize=2.5, alpha=faint, mew=0)
            line = running_mean(of_run, weights)
            panel.plot(steps, line, color=colour, ls=dash, linewidth=1.8, label=run.label)
        panel.set_ylabel(name)
        panel.margins(x=0.01)
        _keep_far_points_at_the_edge(panel, [of_run for of_run, _ in values])
    axes[-1].set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _keep_far_points_at_the_edge(axes: Any, values: Sequence[FloatArray]) -> None:
    """Where a few steps (a flush of little data) would flatten all others, the axis ends before
    them, and they stand as triangles with their values at its top."""
    together = np.concatenate(values)
    usual = float(np.percentile(together, 98))
    low = float(together.min())
    top = usual + 0.15 * (usual - low)
    if float(together.max()) - low < 2 * (top - low) or top <= low:
        return
    axes.set_ylim(top=top)
    for k, of_run in enumerate(values):
        for step in np.flatnonzero(of_run > top).tolist():
            axes.plot(step, top, "^", color=RUNS[k % len(RUNS)], markersize=5, clip_on=False)
            axes.annotate(
                f"{of_run[step]:.2g}", (step, top), xytext=(0, 4), textcoords="offset points",
                ha="right", va="bottom", fontsize=8,
            )  # fmt: skip


def running_mean(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Over about a twentieth of the steps, fewer at both ends; 0 where nothing weighs anything.

    Weighted by work or tokens, a mean of ratios is what the steps had together.
    """
    half = values.size // 40
    first = np.maximum(np.arange(values.size) - half, 0)
    after = np.minimum(np.arange(values.size) + half + 1, values.size)

    def sums(x: FloatArray) -> FloatArray:
        total = np.concatenate([[0.0], np.cumsum(x)])
        return total[after] - total[first]

    return sums(values * weights) / np.maximum(sums(weights), np.finfo(np.float64).tiny)


# Breakdown.


class WaterfallRow(NamedTuple):
    """contribution: what it adds to the total; of the first row, where the total begins. paper: the
    paper's total after it, if it gives one."""

    label: str
    contribution: float
    paper: float | None = None


def waterfall_figure(
    rows: Sequence[WaterfallRow],
    *,
    total: str = "all together",
    paper: float | None = None,
    ylabel: str = "speed-up",
) -> Any:
    """Where a total comes from: the first row and the last bar are totals, others contributions.

    total, paper: the last bar's label, and the paper's total if no row has it.
    """
    if not rows:
        raise ValueError("no row was given")
    ends = np.cumsum([row.contribution for row in rows])
    starts = np.concatenate([[0.0], ends[:-1]])
    figure, (axes,) = _figure(height=3.8)
    papers = [row.paper for row in rows] + [rows[-1].paper if paper is None else paper]
    shown = [*ends.tolist(), *(p for p in papers if p is not None)]
    spread = max(shown) - min(shown) or abs(shown[0]) or 1.0
    bottom = 0.0 if min(shown) < 2 * spread else min(shown) - 0.35 * spread
    for x, (row, start, end) in enumerate(zip(rows, starts.tolist(), ends.tolist(), strict=True)):
        grows = row.contribution >= 0
        colour = RUNS[2] if x == 0 else RUNS[3] if grows else RUNS[1]
        from_ = bottom if x == 0 else start
        axes.bar(x, end - from_, 0.62, from_, color=colour, hatch="" if grows else "////",
                 edgecolor="white", gid=f"bar{x}")  # fmt: skip
        axes.plot([x + 0.31, x + 1 - 0.31], [end, end], color="#555555", linewidth=0.8)
        words = f"{end:.3f}" if x == 0 else f"{row.contribution:+.3f}"
        axes.annotate(
            words, (x, max(start, end) if x else end), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=9,
        )  # fmt: skip
    last = float(ends[-1])
    axes.bar(len(rows), last - bottom, 0.62, bottom, color=RUNS[2], gid="total")
    axes.annotate(
        f"{last:.3f}", (len(rows), last), xytext=(0, 3), textcoords="offset points",
        ha="center", fontsize=9, fontweight="bold",
    )  # fmt: skip
    _paper_marks(axes, papers)
    labels = [_folded(label) for label in [*(row.label for row in rows), total]]
    axes.set(xticks=range(len(labels)), xticklabels=labels)
    axes.set_ylim(bottom, max(shown) + 0.18 * spread)
    axes.set_ylabel(ylabel + (f" (axis begins at {bottom:.2f})" if bottom else ""))
    axes.grid(visible=False, axis="x")
    return figure


def _paper_marks(axes: Any, papers: Sequence[float | None]) -> None:
    """Diamonds beside our bars, at the paper's totals."""
    marks = [(x + 0.38, p) for x, p in enumerate(papers) if p is not None]
    if not marks:
        return
    xs, ys = zip(*marks, strict=True)
    axes.plot(xs, ys, "D", color="#000000", markersize=6, ls="", label="paper, total", zorder=5)
    for x, y in marks:
        axes.annotate(
            f"{y:.2f}", (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    axes.legend(frameon=False, loc="upper left")


def _folded(label: str) -> str:
    """In lines of about 14 letters."""
    lines = [""]
    for word in label.split():
        if lines[-1] and len(lines[-1]) + len(word) >= 14:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


# Shared.


def _figure(*, height: float, nrows: int = 1, **subplots: Any) -> tuple[Any, list[Any]]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes: list[Any] = list(figure.subplots(nrows, 1, squeeze=False, **subplots).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _mixed(colour: str, white: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * white):02X}" for p in parts)


def _is_light(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140
