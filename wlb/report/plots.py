"""What all figures share: colours, axes, running means, and conversion to SVG.

matplotlib is imported when a figure is made, so tables and numbers of pages do not need it. The
colours are Okabe and Ito's, which colour-blind readers can distinguish. Text stays text in the SVG
(`svg.fonttype = none`), so pages are small and searchable. Black becomes `currentColor`, so figures
follow a light or dark page. No axis hides a value: where a few points would flatten all others,
`keep_far_points_at_the_edge` marks them with their values.
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
"""Colours of series, in order."""
RUNS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The same colours in another order, for lines in figures of runs."""
DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)), "-", "-")
INK = "#111111"
"""Colour of text on a bar. It is not black, because `svg` turns black into the page's text
colour."""
WIDTH = 9.0
ANNOTATED_CELLS = 200
"""A heat map with at most this many cells shows each cell's number."""


def require_matplotlib() -> None:
    """Raise a UserError with the remedy if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise UserError("plots need matplotlib; pip install 'wlb-llm[plot]'") from None


def new_figure(
    *, height: float, width: float = WIDTH, nrows: int = 1, ncols: int = 1, **subplots: Any
) -> tuple[Any, list[Any]]:
    """Return a Figure, sized in inches, and its axes row by row; it needs no window system."""
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
    """Add a legend above all panels that has each of their labels once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    options = {"ncols": len(found), "frameon": False, **options}
    figure.legend(found.values(), found.keys(), loc="outside upper center", **options)


def svg(figure: Any, name: str) -> str:
    """Return the figure as an <svg> element; `name` must be unique on the page.

    The name prefixes the element's ids.
    """
    out = StringIO()
    # matplotlib's metadata contains links, and a page must not need the network.
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with importlib.import_module("matplotlib").rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name}
    ):
        figure.savefig(out, format="svg", metadata=no_metadata, transparent=True)
    # Black follows the page's text colour, and prefixed ids keep figures on one page apart.
    text = out.getvalue().replace("#000000", "currentColor")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # The XML declaration before the element does not belong into HTML.
    return text[text.index("<svg") :].replace("<svg ", '<svg fill="currentColor" ', 1)


def keep_far_points_at_the_edge(
    axes: Any, points: Sequence[tuple[npt.NDArray[Any], FloatArray, str]]
) -> None:
    """Keep a few far points, such as a flush of little data, from flattening all others.

    If there are such points, the axis ends below them. They are drawn as triangles at its top, with
    their values.

    Args:
        axes: Axes that already have the lines.
        points: Steps, values and colour of each line.
    """
    together = np.concatenate([values for _, values, _ in points])
    # End the axis a little above the 98th percentile, but only if far points would flatten the
    # rest.
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
    """Return the weighted mean over about a twentieth of the steps around each one.

    There are fewer steps at both ends. The mean is 0 where all weights are 0. For ratios that are
    weighted by their denominator, it is the ratio of the summed steps.
    """
    half = values.size // 40
    first = np.maximum(np.arange(values.size) - half, 0)
    after = np.minimum(np.arange(values.size) + half + 1, values.size)

    def sums(x: FloatArray) -> FloatArray:
        # Differences of running sums are the sums of all windows at once.
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
    """Draw steps as faint points and their running mean as a line.

    Args:
        axes: Where to draw.
        steps: x of each step.
        values: y of each step.
        weights: Weight of each step in the running mean.
        most: Most points to draw; of more steps, every k-th is drawn. None draws all.
        alpha: Opacity of the points; None chooses it by their number.
        **style: Style of the line (`color`, `ls`, `label`).
    """
    faint = alpha or (0.25 if values.size > 40 else 0.5)
    every = stride(values.size, most)
    colour = style["color"]
    axes.plot(steps[::every], values[::every], "o", color=colour, ms=2.5, alpha=faint, mew=0)
    line = running_mean(values, weights)
    # The mean is 0 where all weights are 0; nothing is drawn there.
    known = line > 0
    every = stride(int(known.sum()), most)
    axes.plot(steps[known][::every], line[known][::every], lw=1.8, **style)


def stride(count: int, most: int | None) -> int:
    """Return k so that every k-th of `count` points are at most `most` points."""
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
    """Draw a value of each GPU relative to the mean of all.

    Rows are DP x CP ranks, and columns are pipeline ranks.

    Args:
        values: The values, shape [dp, pp, cp].
        what: What the values are, for the title.
        title: Beginning of the title.
        tp: Number of TP ranks that each cell stands for.
        inner: Names of the entries of the last axis, if these are not CP ranks.
        devices: What the title calls the GPUs.
    """
    if values.ndim != 3 or not values.size:
        raise ValueError(f"values have shape {values.shape}, not [dp, pp, cp]")
    dp, pp, cp = values.shape
    mean = float(values.mean())
    relative = (values / mean if mean else np.ones_like(values)).transpose(0, 2, 1)
    relative = relative.reshape(dp * cp, pp)
    rows = dp * cp
    figure, (axes,) = new_figure(height=1.6 + min(6.0, max(1.2, 0.3 * rows)))
    low, high = float(relative.min()), float(relative.max())
    # Equal values would leave the colours no range.
    if high - low < 1e-3:
        low, high = low - 0.01, high + 0.01
    mesh = axes.pcolormesh(relative, cmap="cividis", vmin=low, vmax=high)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set(xlabel="pipeline rank", xticks=np.arange(pp) + 0.5, xticklabels=range(pp))
    # Name every row if there is space, otherwise only the DP ranks.
    if cp > 1 and rows <= 32:
        names = inner or [f"cp {c}" for c in range(cp)]
        labels = [f"dp {d}, {name}" for d in range(dp) for name in names]
        axes.set(yticks=np.arange(rows) + 0.5, yticklabels=labels)
    else:
        axes.set(yticks=(np.arange(dp) + 0.5) * cp, yticklabels=[f"dp {d}" for d in range(dp)])
        if cp > 1:
            axes.set_ylabel(f"{cp} rows each: {'CP x TP' if inner else 'CP'} ranks")
    axes.tick_params(length=0)
    # White lines separate the DP ranks.
    for d in range(1, dp if cp > 1 else 1):
        axes.axhline(d * cp, color="white", linewidth=2 if rows <= 32 else 1)
    if relative.size <= ANNOTATED_CELLS:
        for (row, column), value in np.ndenumerate(relative):
            # Numbers on dark cells are white.
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
