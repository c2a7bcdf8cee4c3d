"""Makes the figures of results pages: as wide as a README, in one palette. Needs matplotlib.

Colours are Okabe and Ito's, which people who do not see all colours can tell apart. Never tell
lines or bars apart by colour alone: use MARKERS, LINES or HATCHES as well, or write beside them.
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
"""Ranks are told apart by these colours, and by their numbers where there is room."""
DARK = {"#0072B2", "#009E73", "#D55E00", "#44337A"}
"""White is read on these colours, black on the others."""
WIDTH = 9.0
"""A figure is this many inches wide.

At 150 dots per inch a README shows it at about 60%, where 10 points are 13 pixels.
"""


def new_figure(
    *, nrows: int = 1, ncols: int = 1, height: float = 3.8, **subplots: Any
) -> tuple[Any, list[Any]]:
    """Returns a Figure that needs no window system, and its axes row by row.

    subplots: arguments of Figure.subplots, such as sharey or width_ratios
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

    Call it when everything is drawn.
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
    """Writes 16,384 as 16K."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"
