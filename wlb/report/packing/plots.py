"""Figures of a comparison of packing policies.

A policy has the same colour and the same marker in all figures.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from wlb.packing.study.measure import PackingRun, PackingSummary
from wlb.packing.study.tune import Tuning
from wlb.plan import IntArray
from wlb.report.plots import COLOURS, legend_above, new_figure, svg

MARKS = {
    "original": ("#000000", "X"),
    "fixed": ("#56B4E9", "o"),
    "var_len": ("#D55E00", "s"),
    "bounded": ("#009E73", "D"),
    "capacity": ("#CC79A7", "v"),
    "examples": ("#F0E442", "p"),
    "ilp_fixed": ("#0072B2", "^"),
    "ilp_var_len": ("#E69F00", "P"),
}
"""Colour and matplotlib marker of each policy."""
MOST_LINES = 6
"""Most lines in one figure. More would not be legible."""


def length_figure(lengths: IntArray, *, window: int) -> str:
    """Return a figure of the lengths of documents and of their share of tokens, as SVG (Figure 3).

    Args:
        lengths: Length of each document in tokens.
        window: The context window, which is marked.
    """
    figure, (left, right) = new_figure(ncols=2, height=3.4)
    longest = int(lengths.max())
    edges = np.geomspace(1.0, max(2.0, longest + 1.0), 60)
    left.hist(lengths, bins=edges, color=COLOURS[0])
    left.set(xscale="log", yscale="log", xlabel="document length (tokens)", ylabel="documents")
    _mark(left, window, "window")
    ordered = np.sort(lengths)
    share = np.cumsum(ordered) / ordered.sum()
    # Draw 400 points at equal distances in the share of tokens. At equal distances in documents,
    # hardly any point would be among the long documents.
    keep = np.unique(np.searchsorted(share, np.linspace(0, 1, 400)).clip(0, len(ordered) - 1))
    right.plot(ordered[keep], share[keep], drawstyle="steps-post", color=COLOURS[0])
    half = float(ordered[ordered < window / 2].sum() / ordered.sum())
    right.set(
        xscale="log" if longest > 2 * window else "linear",
        xlabel="document length (tokens)",
        ylabel="share of tokens up to this length",
        ylim=(0, 1.02),
    )
    right.plot(window / 2, half, "o", color=COLOURS[1])
    _mark(right, window / 2, f"below half the window: {half:.0%} of tokens")
    from matplotlib.ticker import EngFormatter

    for axes in (left, right):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    right.tick_params(axis="x", which="minor", labelbottom=False)
    return svg(figure, "lengths")


def _mark(axes: Any, x: float, text: str) -> None:
    """Draw a vertical dashed line at `x`, and write `text` above it."""
    axes.axvline(x, color=COLOURS[1], linestyle="--", linewidth=1)
    at = axes.transAxes.inverted().transform(axes.transData.transform((x, 1)))[0]
    side = "left" if at < 0.25 else "right" if at > 0.75 else "center"
    axes.annotate(
        text, (x, 1.02), xycoords=("data", "axes fraction"), ha=side, va="bottom", color=COLOURS[1]
    )


def imbalance_figure(runs: Sequence[PackingRun], *, own: str = "") -> str:
    """Return a figure of the imbalance of each step, sorted from worst to best, as SVG.

    Args:
        runs: Results of all policies, of which a few are drawn.
        own: Label of the run's present policy, whose line is thicker; "" = none.
    """
    figure, (axes,) = new_figure(ncols=1, height=3.6)
    for run in _few(runs, own):
        worst_first = np.sort(run.imbalance)[::-1]
        share = (np.arange(len(worst_first)) + 1) / len(worst_first)
        axes.step(share * 100, worst_first, where="pre", **_line(run.summary, own))
    axes.set(xlabel="share of steps (%), worst first", ylabel="imbalance of the step")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=1.0)
    axes.legend(frameon=False)
    return svg(figure, "imbalance")


def delay_figure(runs: Sequence[PackingRun], *, own: str = "") -> str:
    """Return a figure of the share of tokens whose delay exceeds each number of steps, as SVG.

    Args:
        runs: Results of all policies, of which a few are drawn.
        own: Label of the run's present policy, whose line is thicker; "" = none.
    """
    figure, (axes,) = new_figure(ncols=1, height=3.6)
    few = _few(runs, own)
    for run in few:
        tokens = run.delay_tokens
        # later[d] is the share of tokens with a delay of more than d steps.
        later = (tokens[::-1].cumsum()[::-1] - tokens) / max(1, int(tokens.sum()))
        waits = np.append(later[later > 0], 0)
        axes.step(np.arange(len(waits)), waits, where="post", **_line(run.summary, own))
    axes.set(xlabel="delay (steps)", ylabel="share of tokens with a longer delay")
    if any(run.delay_tokens[1:].any() for run in few):
        axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    return svg(figure, "delay")


def trade_figure(summaries: Sequence[PackingSummary], *, own: str = "") -> str:
    """Return a figure, as SVG, of imbalance against mean delay, with a point for each policy.

    Args:
        summaries: Results of all policies.
        own: Label of the run's present policy, whose point is larger; "" = none.
    """
    figure, (axes,) = new_figure(ncols=1, height=4.6)
    shown = [s for s in summaries if s.num_steps]
    for s in shown:
        colour, marker = MARKS[s.policy]
        size = 11 if s.label == own else 7
        axes.plot(s.mean_delay, s.step_time_weighted, marker, color=colour, markersize=size)
    axes.set(xlabel="mean delay of a token (steps)", ylabel="imbalance, forward plus backward")
    if max((s.mean_delay for s in shown), default=0) > 3:
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter("{x:g}")
    # Leave room for labels at the margins.
    axes.margins(x=0.2, y=0.08)
    axes.set_xlim(left=-0.05)
    _label_points(figure, axes, [(s.mean_delay, s.step_time_weighted, s.label) for s in shown])
    return svg(figure, "trade")


def _label_points(figure: Any, axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Write a label beside each point, at a place where it covers no point or other label.

    If there is no such place beside the point, the label is further up or down, and a thin line
    joins it with its point.

    Args:
        figure: The figure.
        axes: Axes that have the points.
        points: x, y and label of each point.
    """
    from matplotlib.transforms import Bbox

    # Draw once, because matplotlib computes the layout of the figure only when drawing.
    figure.draw_without_rendering()
    pixels = [axes.transData.transform((x, y)) for x, y, _ in points]
    per_point = figure.dpi / 72
    high, dot = 11 * per_point, 6 * per_point
    taken = [Bbox.from_extents(x - dot, y - dot, x + dot, y + dot) for x, y in pixels]
    inside = axes.bbox
    for (x, y), (data_x, data_y, label) in zip(pixels, points, strict=True):
        wide = 5.2 * per_point * len(label)
        # Try places right and left of the point first, then places further and further up and down.
        boxes = [
            Bbox.from_bounds(x + dx, y + up * high - high / 2, wide, high)
            for up in (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6)
            for dx in (1.4 * dot, -1.4 * dot - wide)
        ]
        fits = (
            b
            for b in boxes
            if inside.x0 < b.x0 < b.x1 < inside.x1
            and inside.y0 < b.y0 < b.y1 < inside.y1
            and not b.count_overlaps(taken)
        )
        box = next(fits, boxes[0])
        taken.append(box)
        is_far = abs(box.y0 + high / 2 - y) > high / 2
        axes.annotate(
            label,
            (data_x, data_y),
            xytext=((box.x0 - x) / per_point, (box.y0 + high / 2 - y) / per_point),
            textcoords="offset points",
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "shrinkB": 4} if is_far else None,
        )


def tuning_figure(tuning: Tuning) -> Any:
    """Return scatter plots of all settings that were tried, with imbalance on the y-axis.

    The x-axes are the mean, 99th percentile and maximum of the delay, and the variation of the
    number of tokens per step.
    """
    figure, axes = new_figure(ncols=4, height=3.6, width=14.0)
    names = ("mean_delay", "p99_delay", "max_delay", "tokens_cv")
    titles = (
        "mean delay (steps)",
        "p99 delay (steps)",
        "maximum delay (steps)",
        "variation of tokens per step (standard deviation / mean)",
    )
    policies = list(dict.fromkeys(p.section.policy for p in tuning.points))
    for axis, name, title in zip(axes, names, titles, strict=True):
        for policy, colour in zip(policies, COLOURS, strict=False):
            for points, alpha, size in ((tuning.points, 0.25, 14), (tuning.front, 0.9, 26)):
                mine = [p.summary for p in points if p.section.policy == policy]
                axis.scatter(
                    [getattr(s, name) for s in mine],
                    [_wait(s) for s in mine],
                    s=size,
                    alpha=alpha,
                    color=colour,
                    linewidths=0,
                    label=f"{policy}{', Pareto front' if points is tuning.front else ''}",
                )
        best = tuning.recommended.summary
        at = (getattr(best, name), _wait(best))
        axis.plot(*at, "o", ms=11, mfc="none", color="black", mew=1.6, label="recommended")
        axis.set(xlabel=title, yscale="log")
    axes[0].set_ylabel("slowest over mean micro-batch, minus 1 (%)")
    axes[0].axvline(tuning.delay_budget, color="grey", linestyle=":", linewidth=1)
    legend_above(figure, axes[:1])
    return figure


def _wait(summary: PackingSummary) -> float:
    """Return by how many percent slowest micro-batches take longer than the mean of their step.

    The result is at least 0.01, because it is drawn on a logarithmic axis.
    """
    return max(0.01, 100 * (summary.step_time_weighted - 1))


def _few(runs: Sequence[PackingRun], own: str) -> list[PackingRun]:
    """Return the run's present packing and, for each other policy, the setting with best balance.

    These are at most `MOST_LINES` settings. Settings that completed no step before the data ended
    are left out, because they have no imbalance.

    Args:
        runs: Results of all settings.
        own: Label of the run's present packing.
    """
    kept: dict[str, PackingRun] = {}
    # Put the present packing first, because only the first setting of each policy is kept.
    ranked = sorted(runs, key=lambda r: (r.summary.label != own, r.summary.step_time_weighted))
    for run in ranked:
        if run.summary.num_steps:
            kept.setdefault(run.summary.policy, run)
    return list(kept.values())[:MOST_LINES]


def _line(summary: PackingSummary, own: str) -> dict[str, Any]:
    """Return the matplotlib style of a policy's line; the line of the policy `own` is thicker."""
    colour, _ = MARKS[summary.policy]
    width = 2.4 if summary.label == own else 1.3
    return {"color": colour, "linewidth": width, "label": summary.label}
