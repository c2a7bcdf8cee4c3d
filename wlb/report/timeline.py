"""Timelines of simulated steps: a row for each pipeline rank, and a bar for each pass.

`timeline_figure` returns a whole figure. `draw_timeline` draws a timeline into one axes of a larger
figure. Both need matplotlib.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from wlb.plan import FloatArray
from wlb.report.plots import INK, WIDTH, new_figure
from wlb.simulate import Node, NodeKind, PassKind, Simulation

MICRO_BATCHES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B59B00", "#6E6E6E")
"""Colours of backward passes. Micro-batch i has colour i modulo their number. Forward passes have a
lighter shade. Colour-blind readers can distinguish all colours and shades."""
LIGHT = 0.58
"""Fraction of white that is mixed into a colour for forward passes."""
COLLECTIVE = "#F0E442"
"""Colour of collectives and of the optimizer: yellow."""
BAR = 0.86
"""Height of a bar as a fraction of the height of a row."""
CHUNK_SHIFT = 0.32
"""If a rank has several virtual stages, the last one is drawn lower than the first one by this
fraction of `BAR`, and the others in between."""
MIN_FONT = 6.5
"""Smallest font size, in points, in which the number of a micro-batch is written into a bar."""
Box = tuple[float, float, float, float]
"""Left, right, top and bottom of a bar, in the coordinates of the axes."""
ASIDE = (NodeKind.GATHER, NodeKind.PREFETCH, NodeKind.REDUCE_AHEAD)
"""Collectives that overlap with passes. They are drawn as a thin strip below the row of a rank."""


def timeline_figure(
    simulation: Simulation, step: int = 0, pipeline: int = 0, *, title: str = ""
) -> Any:
    """Return a figure of one simulated step of one pipeline, with a row for each pipeline rank.

    The colour of a pass shows its micro-batch. Forward passes are light and backward passes dark.
    Collectives are yellow, idle time is blank, and the critical path is outlined.

    Args:
        simulation: The simulated steps.
        step: Index of the step in the simulation.
        pipeline: Number of the pipeline.
        title: Title of the figure; "" for a default title.
    """
    pp = simulation.simulator.spec.parallel.pp
    figure, (axes,) = new_figure(height=1.5 + row_inches(pp) * pp)
    draw_timeline(axes, simulation, step, pipeline)
    axes.set_title(title or f"pipeline {pipeline}", fontsize=10, loc="left")
    add_timeline_legend(figure, simulation)
    return figure


def row_inches(pp: int) -> float:
    """Return the height of a row in inches, for a timeline with `pp` rows."""
    return 0.5 if pp <= 8 else 0.28


def draw_timeline(
    axes: Any, simulation: Simulation, step: int = 0, pipeline: int = 0, *, end_s: float = 0.0
) -> None:
    """Draw one simulated step of one pipeline into given axes, with a row for each pipeline rank.

    The passes of one kind and of micro-batch i are one matplotlib collection with the gid
    `mb<i><kind>`.
    The time axis is in seconds, or in milliseconds for steps below 2 seconds.

    Args:
        axes: Axes in which to draw.
        simulation: The simulated steps.
        step: Index of the step in the simulation.
        pipeline: Number of the pipeline.
        end_s: Smallest end of the time axis in seconds, for several timelines with the same axis.
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
    """Set limits, ticks and labels of axes for a timeline.

    Args:
        axes: The axes.
        labels: Label of each row.
        end: End of the time axis.
        unit: Unit of the time axis, "s" or "ms".
    """
    rows = len(labels)
    axes.set(xlim=(0, end), ylim=(rows - 0.5, -0.5), yticks=range(rows), yticklabels=labels)
    axes.set_xlabel(f"time ({unit})")
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)


def write_idle(axes: Any, shares: Iterable[float]) -> None:
    """Write the idle share of each row to the right of the row.

    Args:
        axes: The axes.
        shares: For each row, the fraction of the step in which the rank is idle.
    """
    style = {"transform": axes.get_yaxis_transform(), "fontsize": 8}
    for row, share in enumerate(shares):
        axes.text(1.006, row, f"{share:.0%}", va="center", **style)
    axes.text(1.006, -0.62, "idle", va="bottom", **style)


def row_box(left: float, right: float, *, row: int, chunk: int, chunks: int) -> Box:
    """Return the bar of a pass. Bars of later virtual stages are lower within the row.

    Args:
        left: Start time of the pass.
        right: End time of the pass.
        row: Number of the row, from 0 at the top.
        chunk: Number of the virtual stage on its rank.
        chunks: Number of virtual stages of a rank.
    """
    height = BAR if chunks == 1 else BAR * (1 - CHUNK_SHIFT)
    top = row - BAR / 2 + BAR * CHUNK_SHIFT * chunk / max(1, chunks - 1)
    return left, right, top, top + height


def add_boxes(axes: Any, boxes: Sequence[Box], gid: str, **style: Any) -> None:
    """Draw boxes as one matplotlib collection.

    Args:
        axes: Axes in which to draw.
        boxes: The boxes.
        gid: Id of the collection in SVG files.
        **style: Arguments of `PolyCollection`, such as `facecolors`.
    """
    from matplotlib.collections import PolyCollection

    collection = PolyCollection([corners(box) for box in boxes], **style)
    collection.set_gid(gid)
    axes.add_collection(collection)


def add_timeline_legend(figure: Any, simulation: Simulation) -> None:
    """Add a legend of shades, colours and lines below the figure of a simulated step."""
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

    Args:
        splits: Whether weight gradients are computed in separate passes (zero-bubble schedules).
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
    """Return legend entries that say which micro-batches have which colour."""
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
    """Add a legend with these entries below the figure."""
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
    """Draw all passes of one kind and micro-batch as one collection.

    The collection has the gid `mb<micro_batch><kind>`.

    Args:
        axes: Axes in which to draw.
        micro_batch: Number of the micro-batch, which decides the colour.
        kind: Kind of the passes: forward, backward or weight gradient.
        boxes: The bars of the passes.
        inches: Height of a row in inches, which decides the font size of numbers.
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
    """Methods that draw one simulated step of one pipeline into `axes`.

    The simulated step is a graph whose nodes are passes, collectives and the optimizer.
    """

    axes: Any
    simulation: Simulation
    start: FloatArray  # start time of each node in the unit of the time axis, shape [nodes]
    stop: FloatArray  # end time of each node in the unit of the time axis, shape [nodes]

    def box(self, i: int, node: Node) -> Box:
        """Return the bar of node number `i` of the graph, in the row of the rank `node.rank`."""
        spec = self.simulation.simulator.spec
        chunk, chunks = 0, 1
        if node.kind == NodeKind.PASS:
            chunk, chunks = node.stage // spec.parallel.pp, spec.pp.virtual_stages
        start, stop = float(self.start[i]), float(self.stop[i])
        return row_box(start, stop, row=node.rank, chunk=chunk, chunks=chunks)

    def passes(self) -> None:
        """Draw the passes, as one collection for each micro-batch and kind of pass."""
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

        Collectives that overlap with passes (`ASIDE`) are drawn as a thin strip below the row.
        Collectives for which ranks wait are as high as the row.
        """
        boxes: list[Box] = []
        graph = self.simulation.simulator.graph
        for i, node in enumerate(graph.nodes):
            if node.action is not None or self.stop[i] <= self.start[i]:
                continue
            # Draw a node without a rank, such as a collective, in the rows of all ranks.
            ranks = range(graph.num_ranks) if node.rank < 0 else [node.rank]
            is_aside = node.kind in ASIDE
            for rank in ranks:
                left, right, top, bottom = self.box(i, node._replace(rank=rank))
                boxes.append((left, right, bottom, bottom + 0.09) if is_aside
                             else (left, right, top, bottom))  # fmt: skip
        add_boxes(self.axes, boxes, "waits", facecolors=COLLECTIVE, linewidths=0)

    def critical(self, step: int, pipeline: int) -> None:
        """Outline the passes on the critical path, and draw a line from each to the next.

        Args:
            step: Index of the step in the simulation.
            pipeline: Number of the pipeline that is drawn.
        """
        s = self.simulation
        graph = s.simulator.graph
        path = graph.critical_path(s.ends_ns, s.durations_ns, step=step)
        boxes: list[Box] = []
        line: list[tuple[float, float]] = []
        for i, of_pipeline in path:
            node = graph.nodes[i]
            # Interrupt the line where the critical path is in another pipeline.
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
            # Draw lines from the end of each pass to the start of the next. The NaN values leave a
            # gap inside each bar.
            xs, ys = zip(*line, strict=True)
            self.axes.plot(xs, ys, color="#000000", linewidth=1.4, zorder=4)


def number_bars(
    axes: Any, micro_batch: int, boxes: list[Box], colour: str, *, inches: float
) -> None:
    """Write the number of a micro-batch into each bar that is large enough.

    Args:
        axes: Axes in which to draw.
        micro_batch: The number.
        boxes: The bars.
        colour: Colour of the bars.
        inches: Height of a row in inches.
    """
    across = axes.get_xlim()[1]
    for left, right, top, bottom in boxes:
        # Skip the bar if it is too low or too narrow for the number.
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
    """Return the four corners of a box as points (x, y)."""
    left, right, top, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def mixed(colour: str, white: float) -> str:
    """Return a colour with white mixed into it.

    Args:
        colour: The colour as "#RRGGBB".
        white: Fraction of white, from 0 to 1.
    """
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * white):02X}" for p in parts)


def _is_light(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    # Compare the perceived brightness (ITU-R BT.601), from 0 to 255.
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140
