"""Contributions of parts to a total, as bars one after the other; needs matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wlb.report.plots import RUNS, new_figure


class WaterfallRow(NamedTuple):
    """contribution: amount added to the total; in the first row, the start of the total. paper: the
    paper's total after this row, if it gives one.
    """

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
    """Parts of a total as bars: the first row and the last bar are totals, others contributions.

    total, paper: the last bar's label, and the paper's total if no row has it.
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
    """Draw diamonds at the paper's totals beside our bars."""
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
    """`label` in lines of about 14 letters."""
    lines = [""]
    for word in label.split():
        if lines[-1] and len(lines[-1]) + len(word) >= 14:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
