"""Timelines of simulated steps: a row for each pipeline rank, a bar for each pass.

Needs matplotlib. `timeline_figure` makes a figure; `draw_timeline` draws into axes of a larger one.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from wlb.plan import FloatArray
from wlb.report.plots import INK, WIDTH, new_figure
from wlb.simulate import Node, NodeKind, PassKind, Simulation

MICRO_BATCHES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B59B00", "#6E6E6E")
"""Colours of backward passes by micro-batch, in a cycle. Forward passes have a light shade of them.
Colour-blind readers can distinguish all colours and shades."""
LIGHT = 0.58
"""Share of white in the shade of a forward pass."""
COLLECTIVE = "#F0E442"
BAR = 0.86
CHUNK_SHIFT = 0.32
"""Share of a bar's height by which virtual stages of a rank are drawn lower than the first one."""
MIN_FONT = 6.5
Box = tuple[float, float, float, float]
"""Left, right, top and bottom of a bar."""
ASIDE = (NodeKind.GATHER, NodeKind.PREFETCH, NodeKind.REDUCE_AHEAD)
"""Kinds of nodes that run at the same time as passes."""


def timeline_figure(
    simulation: Simulation, step: int = 0, pipeline: int = 0, *, title: str = ""
) -> Any:
    """Draw a step of one pipeline, with a row for each pipeline rank.

    Passes are coloured by micro-batch, forward light and backward dark. Collectives that ranks wait
    for are yellow, idle time is blank, and the critical path is outlined.
    """
    pp = simulation.simulator.spec.parallel.pp
    figure, (axes,) = new_figure(height=1.5 + row_inches(pp) * pp)
    draw_timeline(axes, simulation, step, pipeline)
    axes.set_title(title or f"pipeline {pipeline}", fontsize=10, loc="left")
    add_timeline_legend(figure, simulation)
    return figure


def row_inches(pp: int) -> float:
    """Return the height of a row, in inches, at which `pp` rows are readable."""
    return 0.5 if pp <= 8 else 0.28


def draw_timeline(
    axes: Any, simulation: Simulation, step: int = 0, pipeline: int = 0, *, end_s: float = 0.0
) -> None:
    """Draw a step of one pipeline into given axes.

    The passes of a micro-batch and kind are one collection with the gid `mb<i><kind>`. Times are in
    the unit of the axis (s or ms), and rows are ranks.

    Args:
        axes: Where to draw.
        simulation: The simulated steps.
        step: Which of its steps.
        pipeline: Which pipeline.
        end_s: End of the time axis, so that several timelines can share it. 0 means the step's end.
    """
    total_s = max(end_s, float(simulation.step_time_s[step]))
    unit, scale = ("ms", 1e-6) if total_s < 2 else ("s", 1e-9)
    pp, v = simulation.simulator.spec.parallel.pp, simulation.simulator.spec.pp.virtual_stages
    ends, durations = (x[:, step, pipeline] for x in (simulation.ends_ns, simulation.durations_ns))
    start, stop = (np.asarray(x * scale, np.float64) for x in (ends - durations, ends))
    frame_rows(axes, range(pp), end=total_s * 1e9 * scale, unit=unit)
    axes.set_ylabel("pipeline rank")
    if v > 1:
        axes.set_title(f"lower in a row: later of {v} chunks", fontsize=8, loc="right")
    bars = _Bars(axes=axes, simulation=simulation, start=start, stop=stop)
    bars.waits()
    bars.passes()
    bars.critical(step, pipeline)
    write_idle(axes, simulation.bubble[step, pipeline])


def frame_rows(axes: Any, labels: Sequence[object], *, end: float, unit: str) -> None:
    """Prepare axes for a row of bars for each of `labels`, from 0 to `end` in `unit` (s or ms)."""
    rows = len(labels)
    axes.set(xlim=(0, end), ylim=(rows - 0.5, -0.5), yticks=range(rows), yticklabels=labels)
    axes.set_xlabel(f"time ({unit})")
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)


def write_idle(axes: Any, shares: Iterable[float]) -> None:
    """Write each row's idle share of the step to its right."""
    style = {"transform": axes.get_yaxis_transform(), "fontsize": 8}
    for row, share in enumerate(shares):
        axes.text(1.006, row, f"{share:.0%}", va="center", **style)
    axes.text(1.006, -0.62, "idle", va="bottom", **style)


def row_box(left: float, right: float, *, row: int, chunk: int, chunks: int) -> Box:
    """Return the bar of a pass in its row; later virtual stages are shifted down within the row."""
    height = BAR if chunks == 1 else BAR * (1 - CHUNK_SHIFT)
    top = row - BAR / 2 + BAR * CHUNK_SHIFT * chunk / max(1, chunks - 1)
    return left, right, top, top + height


def add_boxes(axes: Any, boxes: Sequence[Box], gid: str, **style: Any) -> None:
    """Draw boxes as one collection with this gid."""
    from matplotlib.collections import PolyCollection

    collection = PolyCollection([corners(box) for box in boxes], **style)
    collection.set_gid(gid)
    axes.add_collection(collection)


def add_timeline_legend(figure: Any, simulation: Simulation) -> None:
    """Explain shades, colours and lines below the figure."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    n = simulation.simulator.spec.micro_batches_per_pipeline
    splits = any(a.kind == PassKind.BACKWARD_WEIGHT for a in simulation.simulator.order[0])
    handles = shade_handles(splits=splits)
    graph, durations = simulation.simulator.graph, simulation.durations_ns
    if any(durations[i].any() for i, node in enumerate(graph.nodes) if node.action is None):
        handles.append(Patch(facecolor=COLLECTIVE, label="collective, optimizer"))
    handles.append(Line2D([], [], color="#000000", linewidth=1.6, label="critical path"))
    legend_below(figure, handles + colour_handles(n))


def shade_handles(*, splits: bool) -> list[Any]:
    """Return legend entries for the kinds of passes.

    `splits` says whether weight gradients have separate passes.
    """
    from matplotlib.patches import Patch

    grey = MICRO_BATCHES[-1]
    handles = [
        Patch(facecolor=mixed(grey, LIGHT), label="forward"),
        Patch(facecolor=grey, label="backward, inputs" if splits else "backward"),
    ]
    if splits:
        label = "backward, weights"
        handles.append(Patch(facecolor=grey, edgecolor="white", hatch="////", label=label))
    return handles


def colour_handles(num_micro_batches: int) -> list[Any]:
    """Return legend entries for the micro-batches' colours."""
    from matplotlib.patches import Patch

    handles: list[Any] = []
    cycle = len(MICRO_BATCHES)
    for i in range(min(num_micro_batches, cycle)):
        same = ", ".join(str(k) for k in range(i, num_micro_batches, cycle)[:3])
        more = ", .." if len(range(i, num_micro_batches, cycle)) > 3 else ""
        words = "micro-batch " if i == 0 else ""
        handles.append(Patch(facecolor=MICRO_BATCHES[i], label=f"{words}{same}{more}"))
    return handles


def legend_below(figure: Any, handles: list[Any]) -> None:
    """Add a legend below the figure."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=8,
        columnspacing=1.2,
        handlelength=1.4,
    )


def draw_passes(
    axes: Any, micro_batch: int, kind: PassKind, boxes: list[Box], *, inches: float
) -> None:
    """Draw the passes of one micro-batch and kind as a collection.

    The collection has the gid `mb<micro_batch><kind>`.

    Args:
        axes: Where to draw.
        micro_batch: Number of the micro-batch, which decides the colour.
        kind: Forward, backward or weight-gradient pass.
        boxes: The bars.
        inches: Height of a row.
    """
    colour = MICRO_BATCHES[micro_batch % len(MICRO_BATCHES)]
    colour = mixed(colour, LIGHT) if kind == PassKind.FORWARD else colour
    add_boxes(
        axes,
        boxes,
        f"mb{micro_batch}{kind}",
        facecolors=colour,
        edgecolors="white",
        linewidths=0.4,
        hatch="////" if kind == PassKind.BACKWARD_WEIGHT else None,
    )
    if kind != PassKind.BACKWARD_WEIGHT:
        number_bars(axes, micro_batch, boxes, colour, inches=inches)


class _Bars(NamedTuple):
    """Draws the nodes of one step of one pipeline."""

    axes: Any
    simulation: Simulation
    start: FloatArray  # start of each node, shape [nodes], in the axis' unit
    stop: FloatArray  # end of each node, shape [nodes], in the axis' unit

    def box(self, i: int, node: Node) -> Box:
        """Return the bar of a node; only passes are shifted within their row."""
        spec = self.simulation.simulator.spec
        chunk, chunks = 0, 1
        if node.kind == NodeKind.PASS:
            chunk, chunks = node.stage // spec.parallel.pp, spec.pp.virtual_stages
        start, stop = float(self.start[i]), float(self.stop[i])
        return row_box(start, stop, row=node.rank, chunk=chunk, chunks=chunks)

    def passes(self) -> None:
        """Draw the passes, grouped by micro-batch and kind."""
        groups: dict[tuple[int, PassKind], list[Box]] = {}
        for i, node in enumerate(self.simulation.simulator.graph.nodes):
            if node.kind == NodeKind.PASS and node.action is not None:
                key = (node.action.micro_batch, node.action.kind)
                groups.setdefault(key, []).append(self.box(i, node))
        inches = row_inches(self.simulation.simulator.spec.parallel.pp)
        for (micro_batch, kind), boxes in groups.items():
            draw_passes(self.axes, micro_batch, kind, boxes, inches=inches)

    def waits(self) -> None:
        """Draw collectives and the optimizer.

        Nodes that run at the same time as passes are a strip below the row. Nodes that ranks wait
        for fill the height of the row.
        """
        boxes: list[Box] = []
        graph = self.simulation.simulator.graph
        for i, node in enumerate(graph.nodes):
            if node.action is not None or self.stop[i] <= self.start[i]:
                continue
            # A node without a rank belongs to all ranks, such as a collective.
            ranks = range(graph.num_ranks) if node.rank < 0 else [node.rank]
            is_aside = node.kind in ASIDE
            for rank in ranks:
                left, right, top, bottom = self.box(i, node._replace(rank=rank))
                boxes.append((left, right, bottom, bottom + 0.09) if is_aside
                             else (left, right, top, bottom))  # fmt: skip
        add_boxes(self.axes, boxes, "waits", facecolors=COLLECTIVE, linewidths=0)

    def critical(self, step: int, pipeline: int) -> None:
        """Outline the passes of the critical path, and join each one with the next."""
        s = self.simulation
        graph = s.simulator.graph
        path = graph.critical_path(s.ends_ns, s.durations_ns, step=step)
        boxes: list[Box] = []
        line: list[tuple[float, float]] = []
        for i, of_pipeline in path:
            node = graph.nodes[i]
            # The path may pass through other pipelines; the line is interrupted there.
            if of_pipeline != pipeline:
                line += [(np.nan, np.nan)]
            elif node.kind == NodeKind.PASS:
                box = self.box(i, node)
                boxes.append(box)
                middle = (box[2] + box[3]) / 2
                line += [(box[0], middle), (np.nan, np.nan), (box[1], middle)]
        style = {"facecolors": "none", "edgecolors": "#000000", "linewidths": 1.4}
        add_boxes(self.axes, boxes, "critical", zorder=4, **style)
        if line:
            # Join the end of each pass with the start of the next, without lines through bars.
            xs, ys = zip(*line, strict=True)
            self.axes.plot(xs, ys, color="#000000", linewidth=1.4, zorder=4)


def number_bars(
    axes: Any, micro_batch: int, boxes: list[Box], colour: str, *, inches: float
) -> None:
    """Write the micro-batch's number into each bar that is large enough.

    `inches` is the height of a row.
    """
    across = axes.get_xlim()[1]
    for left, right, top, bottom in boxes:
        # The number must fit into the bar in both directions.
        font = min(9.0, 72 * 0.6 * (bottom - top) * inches)
        wide = (right - left) / across * 0.86 * WIDTH * 72
        if font < MIN_FONT or wide < 0.75 * font * len(str(micro_batch)):
            continue
        axes.text(
            (left + right) / 2,
            (top + bottom) / 2,
            str(micro_batch),
            ha="center",
            va="center_baseline",
            fontsize=font,
            color=INK if _is_light(colour) else "white",
            clip_on=True,
        )


def corners(box: Box) -> list[tuple[float, float]]:
    """Return the corners of a box."""
    left, right, top, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def mixed(colour: str, white: float) -> str:
    """Return `colour` with this share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * white):02X}" for p in parts)


def _is_light(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    # Perceived brightness (ITU-R BT.601).
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140
