"""Figures of simulated runs: GPUs and steps; needs matplotlib.

Each returns a matplotlib Figure of nine inches, which is legible at a width of 800 pixels; `svg`
makes it part of a page. An axis that does not begin at 0 says so in its label.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from wlb.plan import FloatArray
from wlb.report.plots import (
    DASHES,
    INK,
    RUNS,
    draw_means,
    keep_far_points_at_the_edge,
    legend_above,
    new_figure,
)
from wlb.simulate import RunSimulation

ANNOTATED_CELLS = 200
MORE_TOKENS = 0.02
"""Coefficient of variation of steps' tokens from which on time a token is shown as well."""


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

    tp: GPUs that each cell stands for. inner: name of the last axis if it is not CP ranks.
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
            style: dict[str, Any] = {"color": RUNS[k % len(RUNS)], "ls": DASHES[k % len(DASHES)]}
            draw_means(panel, np.arange(of_run.size), of_run, weights, label=run.label, **style)
        panel.set_ylabel(name)
        panel.margins(x=0.01)
        points = [
            (np.arange(of_run.size), of_run, RUNS[k % len(RUNS)])
            for k, (of_run, _) in enumerate(values)
        ]
        keep_far_points_at_the_edge(panel, points)
    axes[-1].set_xlabel("step")
    legend_above(figure, axes[:1], ncols=4, fontsize=9)
    return figure
