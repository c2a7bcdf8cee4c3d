"""Figures of simulated runs: GPUs, steps, a breakdown; needs matplotlib.

Each returns a matplotlib Figure of nine inches, which is legible at a width of 800 pixels; `svg`
makes it part of a page. An axis that does not begin at 0 says so in its label.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wlb.report.plots import (
    DASHES,
    INK,
    RUNS,
    FloatArray,
    keep_far_points_at_the_edge,
    new_figure,
    running_mean,
)
from wlb.simulate import RunSimulation

ANNOTATED_CELLS = 200
MORE_TOKENS = 0.02
"""Coefficient of variation of steps' tokens from which on time a token is shown as well."""


# GPUs.


def heat_map_figure(
    values: FloatArray,
    *,
    what: str = "computing time",
    title: str = "",
    tp: int = 1,
    inner: Sequence[str] = (),
    devices: str = "GPUs",
) -> Any:
    """values [dp, pp, cp], of each GPU, shown relative to their mean: rows are dp x cp, columns pp.

    tp: GPUs that each cell stands for. inner: what the last axis is, where it is not CP ranks.
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
    if high - low < 1e-3:
        low, high = low - 0.01, high + 0.01
    mesh = axes.pcolormesh(relative, cmap="cividis", vmin=low, vmax=high)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set(xlabel="pipeline rank", xticks=np.arange(pp) + 0.5, xticklabels=range(pp))
    if cp > 1 and rows <= 32:
        names = inner or [f"cp {c}" for c in range(cp)]
        labels = [f"dp {d}, {name}" for d in range(dp) for name in names]
        axes.set(yticks=np.arange(rows) + 0.5, yticklabels=labels)
    else:
        axes.set(yticks=(np.arange(dp) + 0.5) * cp, yticklabels=[f"dp {d}" for d in range(dp)])
        if cp > 1:
            axes.set_ylabel(f"{cp} rows each: {'CP x TP' if inner else 'CP'} ranks")
    axes.tick_params(length=0)
    for d in range(1, dp if cp > 1 else 1):
        axes.axhline(d * cp, color="white", linewidth=2 if rows <= 32 else 1)
    if relative.size <= ANNOTATED_CELLS:
        for (row, column), value in np.ndenumerate(relative):
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


# Steps of runs.


def imbalance_figure(runs: Sequence[RunSimulation]) -> Any:
    """Imbalance and time of every step, time over the first run's mean: faint points, and running
    means as lines. Time a token as well, where steps differ in tokens."""
    if not runs:
        raise ValueError("no run was given")
    base = runs[0]
    of_base = f"\nmean of {base.label}"
    series = {
        "imbalance of packing": [
            (
                np.array([m.imbalance for m in run.metrics]),
                np.array([m.mean_workload_ns for m in run.metrics]),
            )
            for run in runs
        ],
        f"step time /{of_base}": [
            (run.step_time_s / float(base.step_time_s.mean()), np.ones(run.step_time_s.size))
            for run in runs
        ],
    }
    if any(float(run.tokens.std()) > MORE_TOKENS * float(run.tokens.mean()) for run in runs):
        a_token = base.time_s / float(base.tokens.sum())
        series[f"time a token /{of_base}"] = [
            (run.step_time_s / np.maximum(1, run.tokens) / a_token, run.tokens.astype(np.float64))
            for run in runs
        ]
    figure, axes = new_figure(height=0.9 + 1.9 * len(series), nrows=len(series), sharex=True)
    for panel, (name, values) in zip(axes, series.items(), strict=True):
        for k, (run, (of_run, weights)) in enumerate(zip(runs, values, strict=True)):
            colour, dash = RUNS[k % len(RUNS)], DASHES[k % len(DASHES)]
            steps = np.arange(of_run.size)
            faint = 0.25 if of_run.size > 40 else 0.5
            panel.plot(steps, of_run, "o", color=colour, markersize=2.5, alpha=faint, mew=0)
            line = running_mean(of_run, weights)
            panel.plot(steps, line, color=colour, ls=dash, linewidth=1.8, label=run.label)
        panel.set_ylabel(name)
        panel.margins(x=0.01)
        points = [
            (np.arange(of_run.size), of_run, RUNS[k % len(RUNS)])
            for k, (of_run, _) in enumerate(values)
        ]
        keep_far_points_at_the_edge(panel, points)
    axes[-1].set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


# Breakdown.


class WaterfallRow(NamedTuple):
    """contribution: what it adds to the total; of the first row, where the total begins. paper: the
    paper's total after it, if it gives one."""

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
