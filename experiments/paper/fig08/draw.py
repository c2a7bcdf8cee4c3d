"""Draws steps as stacks of documents: documents that wait before a step, and its micro-batches.

Each column is a step. A colour stands for the step of arrival, which is also printed in each
outlier, so that colour-blind readers need not rely on colours. Needs matplotlib.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.harness.drawing import DARK

COLORS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#44337A")
EARLIER = "#222222"
"""Colour of outliers that arrived before the first step shown."""
ORDINARY, DELAYED = "#DDDDDD", "#9A9A9A"
"""Colours of ordinary documents, and of ordinary documents that waited."""
WHITE_ON = {EARLIER, *DARK}
"""Colours on which text is white."""
OUTLINE = "#000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A document in a stack."""

    size: float  # height in units of the axis
    arrival: int  # step for which the document was read
    is_outlier: bool
    leaves: bool = False  # whether it is trained in the column's step
    is_delayed: bool = False  # whether it has waited since an earlier step


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A step of the picture."""

    step: int
    imbalance: float
    plain: float  # imbalance under Plain-4D in the step with the same number
    waiting: dict[str, list[Block]]  # stacks of waiting documents, by label
    notes: dict[str, str]  # text above each of these stacks, by label
    micro_batches: list[list[Block]]  # one stack per micro-batch
    windows: list[float]  # tokens of each micro-batch over the context window


def draw(columns: Sequence[Column], *, title: str, waiting: str) -> Figure:
    """Draws the steps side by side.

    Args:
        columns: The steps.
        title: Title of the picture.
        waiting: Label of the y axis of waiting documents.
    """
    figure = Figure(figsize=(12, 7))
    grid = figure.add_gridspec(
        2, len(columns), left=0.062, right=0.995, top=0.85, bottom=0.145, wspace=0.07, hspace=0.16
    )
    first = columns[0].step
    heights = [sum(b.size for b in stack) for c in columns for stack in c.waiting.values()]
    loads = [sum(b.size for b in stack) for c in columns for stack in c.micro_batches]
    for i, column in enumerate(columns):
        upper, lower = figure.add_subplot(grid[0, i]), figure.add_subplot(grid[1, i])
        _waiting(upper, column, first, top=1.16 * max(heights))
        _micro_batches(lower, column, first, top=1.12 * max(loads))
        upper.set_title(_heading(column), fontsize=9.5, linespacing=1.25)
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(axis="both", labelsize=8, length=2)
            if i:
                axes.set_yticklabels([])
                axes.tick_params(axis="y", length=0)
        if not i:
            upper.set_ylabel(waiting, fontsize=9)
            lower.set_ylabel("predicted time\n(1 = a document of one window)", fontsize=9)
    figure.suptitle(title, fontsize=12, y=0.985)
    caption = (
        "micro-batch; above each its tokens, in windows; in each outlier the step it came with"
    )
    figure.text(0.53, 0.083, caption, ha="center", fontsize=9)
    arrivals, kinds = _legend(columns)
    for handles, y in ((arrivals, 0.035), (kinds, 0.003)):
        style = {"fontsize": 9, "frameon": False, "handlelength": 1.5, "borderaxespad": 0.2}
        figure.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=(0.53, y),
            ncols=len(handles),
            **style,
        )
    return figure


def _heading(column: Column) -> str:
    return (
        f"$\\bf{{step\\ {column.step}}}$\n"
        f"imbalance $\\bf{{{column.imbalance:.2f}}}$\nPlain-4D {column.plain:.2f}"
    )


def _waiting(axes: Axes, column: Column, first: int, *, top: float) -> None:
    labels = list(column.waiting)
    for x, label in enumerate(labels):
        height = _stack(axes, x, column.waiting[label], first, width=0.74)
        axes.text(
            x, height + 0.012 * top, column.notes[label], ha="center", va="bottom", fontsize=8
        )
    axes.set(xlim=(-0.6, len(labels) - 0.4), ylim=(0, top), xticks=range(len(labels)))
    axes.set_xticklabels(labels)


def _micro_batches(axes: Axes, column: Column, first: int, *, top: float) -> None:
    num = len(column.micro_batches)
    for x, blocks in enumerate(column.micro_batches):
        height = _stack(axes, x, blocks, first, width=0.86)
        axes.text(
            x,
            height + 0.01 * top,
            f"{column.windows[x]:.1f}",
            ha="center",
            va="bottom",
            fontsize=7.5,
        )
    slowest = max(sum(b.size for b in blocks) for blocks in column.micro_batches)
    axes.hlines(slowest, -0.5, num - 0.5, color=OUTLINE, linestyle=(0, (4, 2)), linewidth=0.8)
    axes.set(xlim=(-0.6, num - 0.4), ylim=(0, top), xticks=range(num))
    axes.set_xticklabels([str(x) for x in range(num)])


def _stack(axes: Axes, x: float, blocks: Sequence[Block], first: int, *, width: float) -> float:
    """Draws blocks from the bottom up and returns the height of the stack.

    Outliers that leave have a bold outline, drawn over the neighbouring blocks.
    """
    bottom = 0.0
    for block in blocks:
        color = _color(block, first)
        is_bold = block.is_outlier and block.leaves
        axes.bar(
            x,
            block.size,
            width,
            bottom,
            color=color,
            edgecolor=OUTLINE if is_bold else "white",
            linewidth=_line(block),
            zorder=3 if is_bold else 2,
        )
        if block.is_outlier and block.size > 0.05:
            axes.text(
                x,
                bottom + block.size / 2,
                str(block.arrival),
                ha="center",
                va="center_baseline",
                fontsize=8,
                color="white" if color in WHITE_ON else "black",
                zorder=4,
            )
        bottom += block.size
    return bottom


def _line(block: Block) -> float:
    """Returns the width of a block's edge; very small ordinary documents have none."""
    if block.is_outlier:
        return 1.5 if block.leaves else 0.8
    return 0.4 if block.size > 0.015 else 0.0


def _color(block: Block, first: int) -> str:
    if not block.is_outlier:
        return DELAYED if block.is_delayed else ORDINARY
    if block.arrival < first:
        return EARLIER
    return COLORS[(block.arrival - first) % len(COLORS)]


def _legend(columns: Sequence[Column]) -> tuple[list[Patch], list[Patch | Line2D]]:
    """Returns the legend's handles: for the colours of arrivals, and for everything else."""
    first = columns[0].step
    stacks = [s for c in columns for s in (*c.waiting.values(), *c.micro_batches)]
    blocks = [block for stack in stacks for block in stack]
    came = sorted({b.arrival for b in blocks if b.is_outlier and b.arrival >= first})
    arrivals = [
        Patch(
            color=COLORS[(a - first) % len(COLORS)],
            label=("from" if i else "outlier from") + f" step {a}",
        )
        for i, a in enumerate(came)
    ]
    if any(b.is_outlier and b.arrival < first for b in blocks):
        arrivals.append(Patch(color=EARLIER, label="from before"))
    kinds: list[Patch | Line2D] = [
        Patch(
            facecolor="white",
            edgecolor=OUTLINE,
            linewidth=1.5,
            label="outlier that leaves in this step",
        ),
        Patch(color=ORDINARY, label="ordinary documents"),
    ]
    if any(b.is_delayed and not b.is_outlier for b in blocks):
        kinds.append(Patch(color=DELAYED, label="ordinary, held from an earlier step"))
    dashes = (0, (4, 2))
    kinds.append(
        Line2D([], [], color=OUTLINE, linestyle=dashes, linewidth=0.8, label="slowest micro-batch")
    )
    return arrivals, kinds
