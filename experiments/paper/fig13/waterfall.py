"""Draws waterfall charts: bars that show how parts add up to a total. Needs matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wlb.report.plots import RUNS, new_figure


class WaterfallRow(NamedTuple):
    """A bar of a waterfall chart."""

    label: str
    contribution: float  # amount added to the total; in the first row, where the total starts
    paper: float | None = None  # the paper's total after this row, if it gives one


def waterfall_figure(
    rows: Sequence[WaterfallRow],
    *,
    total: str = "all together",
    paper: float | None = None,
    ylabel: str = "speed-up",
) -> Any:
    """Draws parts of a total as bars.

    The first bar and the last are totals; the bars between them are contributions.

    Args:
        rows: The bars, apart from the last.
        total: Label of the last bar.
        paper: The paper's final total. Defaults to that of the last row.
        ylabel: Label of the y axis.
    """
    if not rows:
        raise ValueError("no row was given")
    ends = np.cumsum([row.contribution for row in rows])
    starts = np.concatenate([[0.0], ends[:-1]])
    figure, (axes,) = new_figure(height=3.8)
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
    """Draws diamonds at the paper's totals, beside our bars."""
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
    """Breaks a label into lines of about 14 letters."""
    lines = [""]
    for word in label.split():
        if lines[-1] and len(lines[-1]) + len(word) >= 14:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
