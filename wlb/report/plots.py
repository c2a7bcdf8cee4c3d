"""Functions that all figures use: colours, axes, running means, and conversion to SVG.

matplotlib is imported only when a figure is made, so that tables do not need it. The colours are
those of Okabe and Ito, which colour-blind readers can distinguish. Text stays text in the SVG
(`svg.fonttype = none`), so pages are small and searchable. Black becomes `currentColor`, so figures
follow the text colour of a light or dark page. If a few far points would flatten all others,
`keep_far_points_at_the_edge` marks them with their values instead of hiding them.
"""

import importlib
import re
from collections.abc import Sequence
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb.plan import FloatArray, UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of the first line of a figure, the second line, and so on."""
RUNS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colours of `COLOURS` in another order, for lines in figures of runs."""
DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)), "-", "-")
"""Line styles of the lines of a figure, in order, as matplotlib takes them."""
INK = "#111111"
"""Colour of text on a bar: almost black. `svg` would turn black into the text colour of the page,
which is light on a dark page."""
WIDTH = 9.0
"""Width of a figure in inches."""
ANNOTATED_CELLS = 200
"""A heat map prints a number in each cell if it has at most this many cells. In more cells the
numbers would be too small to read."""


def require_matplotlib() -> None:
    """Raise a UserError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise UserError(
            "plots need matplotlib, which is not installed; run: pip install 'wlb-llm[plot]'"
        ) from None


def new_figure(
    *, height: float, width: float = WIDTH, nrows: int = 1, ncols: int = 1, **subplots: Any
) -> tuple[Any, list[Any]]:
    """Return a matplotlib Figure and the list of its axes, without needing a window system.

    Args:
        height: Height in inches.
        width: Width in inches.
        nrows: Number of rows of axes.
        ncols: Number of axes in a row.
        **subplots: Further arguments of `Figure.subplots`.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes: list[Any] = list(figure.subplots(nrows, ncols, squeeze=False, **subplots).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def legend_above(figure: Any, panels: Sequence[Any], **options: Any) -> None:
    """Add one legend for several axes above a figure. A label that several axes have appears once.

    Args:
        figure: The figure.
        panels: The axes.
        **options: Further arguments of `Figure.legend`.
    """
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    options = {"ncols": len(found), "frameon": False, **options}
    figure.legend(found.values(), found.keys(), loc="outside upper center", **options)


def svg(figure: Any, name: str) -> str:
    """Return a figure as an <svg> element for an HTML page.

    Args:
        figure: The figure.
        name: Prefix of the ids in the element. It must be unique on the page.
    """
    out = StringIO()
    # Leave out matplotlib's metadata, which has links, because a page must not need the network.
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with importlib.import_module("matplotlib").rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name}
    ):
        figure.savefig(out, format="svg", metadata=no_metadata, transparent=True)
    # Replace black by the text colour of the page, and prefix all ids, so that figures on the same
    # page do not share ids.
    text = out.getvalue().replace("#000000", "currentColor")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # Remove the XML declaration before the element, which is not valid in HTML.
    return text[text.index("<svg") :].replace("<svg ", '<svg fill="currentColor" ', 1)


def keep_far_points_at_the_edge(
    axes: Any, points: Sequence[tuple[npt.NDArray[Any], FloatArray, str]]
) -> None:
    """Limit the y axis if a few very large values would flatten all others.

    The axis then ends below the large values, which are drawn as triangles at its upper end, with
    the values as text. For example, steps at the end of the data may have large values, because
    they have few tokens.

    Args:
        axes: Axes in which the lines are already drawn.
        points: For each line its steps, its values and its colour.
    """
    together = np.concatenate([values for _, values, _ in points])
    # End the axis a little above the 98th percentile, but only if the full axis would be at least
    # twice as long.
    usual = float(np.percentile(together, 98))
    low = float(together.min())
    top = usual + 0.15 * (usual - low)
    if float(together.max()) - low < 2 * (top - low) or top <= low:
        return
    axes.set_ylim(top=top)
    for steps, values, colour in points:
        for i in np.flatnonzero(values > top).tolist():
            axes.plot(steps[i], top, "^", color=colour, markersize=5, clip_on=False)
            axes.annotate(
                f"{values[i]:.2g}", (steps[i], top), xytext=(0, 4), textcoords="offset points",
                ha="right", va="bottom", fontsize=8,
            )  # fmt: skip


def running_mean(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return for each step a weighted mean over the steps around it.

    The mean is over about a twentieth of all steps, and over fewer at both ends. If `values` are
    ratios and `weights` their denominators, the mean equals the sum of numerators over the sum of
    denominators.

    Args:
        values: Value of each step, shape [n].
        weights: Weight of each step, shape [n].

    Returns:
        The means, shape [n]; 0 where all weights are 0.
    """
    half = values.size // 40
    first = np.maximum(np.arange(values.size) - half, 0)
    after = np.minimum(np.arange(values.size) + half + 1, values.size)

    def sums(x: FloatArray) -> FloatArray:
        # Sum over the steps around each step, for all steps at once: differences of running sums.
        total = np.concatenate([[0.0], np.cumsum(x)])
        return total[after] - total[first]

    return sums(values * weights) / np.maximum(sums(weights), np.finfo(np.float64).tiny)


def draw_means(
    axes: Any,
    steps: npt.NDArray[Any],
    values: FloatArray,
    weights: FloatArray,
    *,
    most: int | None = None,
    alpha: float | None = None,
    **style: Any,
) -> None:
    """Draw the values of steps as faint points, and their running mean as a line.

    Args:
        axes: Axes in which to draw.
        steps: x coordinate of each step.
        values: y coordinate of each step.
        weights: Weight of each step in the running mean.
        most: Largest number of points to draw. If there are more steps, only every k-th is drawn.
            None draws all.
        alpha: Opacity of the points. None chooses it by the number of steps.
        **style: Style of the line (`color`, `ls`, `label`).
    """
    faint = alpha or (0.25 if values.size > 40 else 0.5)
    every = stride(values.size, most)
    colour = style["color"]
    axes.plot(steps[::every], values[::every], "o", color=colour, ms=2.5, alpha=faint, mew=0)
    line = running_mean(values, weights)
    # Skip steps whose running mean is 0, which means that all weights are 0.
    known = line > 0
    every = stride(int(known.sum()), most)
    axes.plot(steps[known][::every], line[known][::every], lw=1.8, **style)


def stride(count: int, most: int | None) -> int:
    """Return the smallest k such that taking every k-th of `count` points leaves at most `most`.

    If `most` is None, the result is 1: all points.
    """
    return max(1, -(-count // most)) if most else 1


def heat_map_figure(
    values: FloatArray,
    *,
    what: str = "computing time",
    title: str = "",
    tp: int = 1,
    inner: Sequence[str] = (),
    devices: str = "GPUs",
) -> Any:
    """Return a heat map of a value of each rank, relative to the mean over all ranks.

    The rows of the heat map are DP and CP ranks, and the columns are pipeline ranks.

    Args:
        values: The values, shape [dp, pp, cp].
        what: Name of the values, for the title.
        title: Beginning of the title.
        tp: Number of TP ranks that share the value of a cell.
        inner: Names of the entries of the last axis of `values`, if they are not CP ranks.
        devices: Word for the ranks in the title.
    """
    if values.ndim != 3 or not values.size:
        raise ValueError(
            f"values must have the three axes [dp, pp, cp], but have shape {values.shape}"
        )
    dp, pp, cp = values.shape
    mean = float(values.mean())
    relative = (values / mean if mean else np.ones_like(values)).transpose(0, 2, 1)
    relative = relative.reshape(dp * cp, pp)
    rows = dp * cp
    figure, (axes,) = new_figure(height=1.6 + min(6.0, max(1.2, 0.3 * rows)))
    low, high = float(relative.min()), float(relative.max())
    # Widen the range of the colours if all values are nearly equal.
    if high - low < 1e-3:
        low, high = low - 0.01, high + 0.01
    mesh = axes.pcolormesh(relative, cmap="cividis", vmin=low, vmax=high)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set(xlabel="pipeline rank", xticks=np.arange(pp) + 0.5, xticklabels=range(pp))
    # Label every row if there is space, otherwise only the DP ranks.
    if cp > 1 and rows <= 32:
        names = inner or [f"cp {c}" for c in range(cp)]
        labels = [f"dp {d}, {name}" for d in range(dp) for name in names]
        axes.set(yticks=np.arange(rows) + 0.5, yticklabels=labels)
    else:
        axes.set(yticks=(np.arange(dp) + 0.5) * cp, yticklabels=[f"dp {d}" for d in range(dp)])
        if cp > 1:
            axes.set_ylabel(f"{cp} rows each: {'CP x TP' if inner else 'CP'} ranks")
    axes.tick_params(length=0)
    # Separate the DP ranks with white lines.
    for d in range(1, dp if cp > 1 else 1):
        axes.axhline(d * cp, color="white", linewidth=2 if rows <= 32 else 1)
    if relative.size <= ANNOTATED_CELLS:
        for (row, column), value in np.ndenumerate(relative):
            # Write white numbers on dark cells.
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
    words += f"{what} / mean of all {devices}, {relative.min():.3f} to {relative.max():.3f}"
    words += f"; {tp} TP ranks a cell" if tp > 1 else ""
    axes.set_title(words, fontsize=10, loc="left")
    return figure
