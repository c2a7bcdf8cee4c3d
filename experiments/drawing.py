"""Figures for results pages: as wide as a README, one palette; needs matplotlib.

Colours are Okabe and Ito's, told apart by people who do not see all colours. Never tell lines or
bars apart by colour alone: use MARKERS, LINES or HATCHES as well, or write beside them.
"""

from typing import Any

from wlb.report.plots import COLOURS as COLOURS

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 3)))
HATCHES = ("", "//", "..", "\\\\", "xx", "++", "oo")
WIDTH = 9.0
"""Inches; at 150 dots an inch a README shows it at about 60 %, where 10 points are 13 pixels."""


def new_figure(
    *, nrows: int = 1, ncols: int = 1, height: float = 3.8, **subplots: Any
) -> tuple[Any, list[Any]]:
    """A Figure without a window system, and its axes row by row.

    subplots: arguments of Figure.subplots, as sharey or width_ratios.
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
