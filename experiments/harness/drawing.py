"""Makes the figures of results pages, all as wide as a README and in one palette.

The colours are Okabe and Ito's, which colour-blind people can distinguish. Colour must not be the
only difference between lines or bars: use MARKERS, LINES or HATCHES too, or label them directly.
Needs matplotlib.
"""

import math
from typing import Any

from wlb.report.plots import COLOURS as COLOURS

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 3)))
HATCHES = ("", "//", "..", "\\\\", "xx", "++", "oo")
RANK_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#D55E00", "#F0E442", "#44337A"),
)
"""One colour per rank. Pictures also print the rank's number where it fits."""
DARK = {"#0072B2", "#009E73", "#D55E00", "#44337A"}
"""Colours on which text must be white; on the others it is black."""
WIDTH = 9.0
"""Width of a figure in inches.

At 150 dots per inch a README shows the picture at about 60% of its size. Text of 10 points is then
13 pixels high.
"""


def new_figure(
    *, nrows: int = 1, ncols: int = 1, height: float = 3.8, **subplots: Any
) -> tuple[Any, list[Any]]:
    """Returns a Figure that needs no window system, and its axes row by row.

    Args:
        nrows: Rows of axes.
        ncols: Columns of axes.
        height: Height of the figure in inches.
        **subplots: Further arguments of `Figure.subplots`, such as sharey or width_ratios.

    Raises:
        SystemExit: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("this needs matplotlib: pip install -e '.[plot]'") from None
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    found = figure.subplots(nrows, ncols, squeeze=False, **subplots)
    axes = list(found.flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def tokens_axis(axes: Any, *, log: bool = True) -> None:
    """Labels an x axis in tokens (256, 1K, 4K, ...), logarithmic or from 0.

    Call it after everything is drawn, because it reads the limits of the axis.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if log:
        axes.set_xscale("log", base=2)
        low, high = axes.get_xlim()
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high) + 1e-9)
        step = 2 if last - first > 7 else 1
        axes.xaxis.set_major_locator(FixedLocator([2.0**i for i in range(first, last + 1, step)]))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        end = axes.get_xlim()[1]
        step = 2.0 ** math.floor(math.log2(end / 4))
        axes.xaxis.set_major_locator(FixedLocator([i * step for i in range(int(end / step) + 1)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens_text(x)))


def tokens_text(tokens: float) -> str:
    """Formats a number of tokens in units of 1,024: 16384 becomes "16K"."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"
