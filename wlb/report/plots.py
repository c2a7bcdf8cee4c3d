"""Figures of a packing comparison, as SVG text; needs matplotlib, which is imported when asked for.

Colours are Okabe and Ito's, told apart by people who do not see all colours. Text stays text in the
SVG (`svg.fonttype = none`), so that pages are small and can be searched.
"""

from collections.abc import Sequence
from io import StringIO
from typing import Any

import numpy as np

from wlb.packing.measure import PackingRun, PackingSummary
from wlb.packing.tune import Tuning
from wlb.plan import IntArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MOST_LINES = 5


def length_figure(lengths: IntArray, *, window: int) -> str:
    """Figure 3: how many documents of each length; share of tokens in documents up to a length."""
    figure, (left, right) = _figure(ncols=2, height=3.4)
    most = float(np.log10(max(2, int(lengths.max()) + 1)))
    left.hist(lengths, bins=[10 ** (most * i / 60) for i in range(61)], color=COLOURS[0])
    left.set(xscale="log", yscale="log", xlabel="document length (tokens)", ylabel="documents")
    left.axvline(window, color=COLOURS[1], linestyle="--", linewidth=1)
    left.annotate(
        "window",
        (window, 0.97),
        xycoords=("data", "axes fraction"),
        ha="right",
        va="top",
        rotation=90,
        color=COLOURS[1],
    )
    ordered = np.sort(lengths)
    share = np.cumsum(ordered) / ordered.sum()
    at = np.searchsorted(share, np.linspace(0, 1, 400))
    keep = np.unique(np.minimum(at, len(ordered) - 1))
    right.step(ordered[keep], share[keep], where="post", color=COLOURS[0])
    half = float(ordered[ordered < window / 2].sum() / ordered.sum())
    right.axvline(window / 2, color=COLOURS[1], linestyle="--", linewidth=1)
    right.annotate(
        f"half the window:\n{half:.0%} of tokens",
        (window / 2, half),
        xytext=(6, -14),
        textcoords="offset points",
        ha="left",
        va="top",
        color=COLOURS[1],
    )
    right.set(xlabel="document length (tokens)", ylabel="share of tokens up to it", ylim=(0, 1.02))
    right.set_xlim(0, max(window, int(ordered[-1])) * 1.02)
    return _svg(figure)


def imbalance_figure(runs: Sequence[PackingRun]) -> str:
    """Imbalance of each step, sorted from worst to best, for a few policies."""
    figure, (axes,) = _figure(ncols=1, height=3.6)
    for run, colour in zip(_few(runs), COLOURS, strict=False):
        worst_first = np.sort(run.imbalance)[::-1]
        share = (np.arange(len(worst_first)) + 1) / len(worst_first)
        axes.step(share * 100, worst_first, where="pre", color=colour, label=run.summary.label)
    axes.set(xlabel="share of steps (%), worst first", ylabel="imbalance of the step")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=1.0)
    axes.legend(frameon=False)
    return _svg(figure)


def delay_figure(runs: Sequence[PackingRun]) -> str:
    """Share of tokens that wait longer than so many iterations, log scale."""
    figure, (axes,) = _figure(ncols=1, height=3.6)
    for run, colour in zip(_few(runs), COLOURS, strict=False):
        tokens = run.delay_tokens
        later = (tokens[::-1].cumsum()[::-1] - tokens) / max(1, int(tokens.sum()))
        waits = np.append(later[later > 0], 0)
        axes.step(np.arange(len(waits)), waits, where="post", color=colour, label=run.summary.label)
    axes.set(xlabel="delay (iterations)", ylabel="share of tokens delayed by more than it")
    if any(run.delay_tokens[1:].any() for run in runs):
        axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    return _svg(figure)


def trade_figure(summaries: Sequence[PackingSummary]) -> str:
    """Imbalance against mean delay: what each policy pays for its balance."""
    figure, (axes,) = _figure(ncols=1, height=4.2)
    for i, summary in enumerate(summaries):
        colour = COLOURS[i % len(COLOURS)]
        x, y = summary.mean_delay, summary.step_time_weighted
        axes.plot(x, y, "os^Dv"[i // len(COLOURS) % 5], color=colour, label=summary.label)
    axes.set(xlabel="mean delay of a token (iterations)", ylabel="time-weighted imbalance")
    axes.set_xlim(left=-0.02)
    axes.set_ylim(bottom=0.99)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return _svg(figure)


def tuning_figure(tuning: Tuning) -> Any:
    """Imbalance against mean, p99 and maximum delay and token variation; a Figure to save."""
    figure, axes = _figure(ncols=4, height=3.6, width=14.0)
    names = ("mean_delay", "p99_delay", "max_delay", "tokens_cv")
    titles = (
        "mean delay (iterations)",
        "p99 delay (iterations)",
        "maximum delay (iterations)",
        "variation of tokens per step",
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
                    label=f"{policy}{', on the front' if points is tuning.front else ''}",
                )
        best = tuning.recommended.summary
        at = (getattr(best, name), _wait(best))
        axis.plot(*at, "o", ms=11, mfc="none", color="black", mew=1.6, label="recommended")
        axis.set(xlabel=title, yscale="log")
    axes[0].set_ylabel("wait for the slowest micro-batch (%)")
    axes[0].axvline(tuning.delay_budget, color="grey", linestyle=":", linewidth=1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=len(labels))
    return figure


def _wait(summary: PackingSummary) -> float:
    """Percent of a mean micro-batch's time; at least a hundredth, for the logarithm."""
    return max(0.01, 100 * (summary.step_time_weighted - 1))


def _few(runs: Sequence[PackingRun]) -> list[PackingRun]:
    """The best balanced of each policy, so that lines stay legible."""
    kept: dict[str, PackingRun] = {}
    for run in sorted(runs, key=lambda r: r.summary.step_time_weighted):
        kept.setdefault(run.summary.policy, run)
    return list(kept.values())[:MOST_LINES]


def _figure(*, ncols: int, height: float, width: float = 9.0) -> tuple[Any, Any]:
    """A Figure without any window system, and its axes from left to right."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("plots need matplotlib; pip install 'wlb-llm[plot]'") from None
    rcParams["svg.fonttype"] = "none"
    rcParams["svg.hashsalt"] = "wlb"  # equal figures give equal bytes
    figure = Figure(figsize=(width, height), layout="constrained")
    axes: list[Any] = [figure.add_subplot(1, ncols, i + 1) for i in range(ncols)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def _svg(figure: Any) -> str:
    """The figure as an <svg> element, without the XML header."""
    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
