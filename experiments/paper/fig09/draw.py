"""Draws Figure 9: the spans of each rank along the packed sequence, and each rank's time.

Wide spans also show the number of their rank. Needs matplotlib.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.harness.drawing import DARK, RANK_COLOURS
from wlb.plan import ShardingPlan, offsets_of

LABEL_SHARE = 0.011
"""Share of the sequence above which a span is wide enough for a digit."""


def draw_plans(plans: Mapping[str, ShardingPlan], imbalance: Mapping[str, float]) -> Figure:
    """Draws the plans below each other.

    Args:
        plans: Plans by label. Each has its `latency_ns`.
        imbalance: Time of the slowest rank over the mean rank, by label.
    """
    num = len(plans)
    figure = Figure(figsize=(14, 1.5 + 1.0 * num))
    grid = figure.add_gridspec(
        1, 2, width_ratios=(3.3, 1), left=0.135, right=0.985, top=0.87, bottom=0.15, wspace=0.04
    )
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1])
    first = next(iter(plans.values()))
    for y, plan in enumerate(plans.values()):
        draw_spans(left, y, plan)
    _documents(left, first, num)
    slowest = max(int(plan.latency_ns.max()) for plan in plans.values()) / 1e3
    for y, (label, plan) in enumerate(plans.items()):
        _bars(right, y, plan, imbalance[label], slowest)
    left.set(xlim=(0, first.num_tokens), ylim=(num - 0.45, -0.55), yticks=range(num))
    left.set_yticklabels([label.replace(", ", ",\n") for label in plans], fontsize=11)
    left.set_xlabel("token of the packed sequence; black lines part the documents", fontsize=10)
    right.set(xlim=(0, 1.42 * slowest), ylim=(num - 0.45, -0.55), yticks=[])
    right.set_xlabel("predicted \N{MICRO SIGN}s of each rank; dashed: mean", fontsize=10)
    right.set_title("slowest / mean", fontsize=10, loc="right")
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    colors = [
        Patch(color=RANK_COLOURS[rank % len(RANK_COLOURS)], label=f"rank {rank}")
        for rank in range(first.cp)
    ]
    figure.legend(
        handles=colors, loc="lower center", ncols=min(8, first.cp), frameon=False, fontsize=10
    )
    figure.suptitle(
        f"One micro-batch of {first.num_tokens:,} tokens on {first.cp} ranks", fontsize=13, y=0.97
    )
    return figure


def draw_spans(axes: Axes, y: float, plan: ShardingPlan) -> None:
    """Draws the spans of all ranks in one row, with the rank's number on wide spans."""
    starts = offsets_of(plan.lengths)[plan.piece] + plan.start
    widths = plan.stop - plan.start
    ranks = np.repeat(np.arange(plan.cp), np.diff(plan.rank_offsets))
    for x, width, rank in zip(starts.tolist(), widths.tolist(), ranks.tolist(), strict=True):
        color = RANK_COLOURS[rank % len(RANK_COLOURS)]
        is_wide = width > LABEL_SHARE * plan.num_tokens
        axes.barh(
            y, width, 0.62, x, color=color, edgecolor="white", linewidth=0.6 if is_wide else 0.15
        )
        if is_wide:
            axes.text(
                x + width / 2,
                y,
                str(rank),
                ha="center",
                va="center_baseline",
                fontsize=10,
                color="white" if color in DARK else "black",
            )


def _documents(axes: Axes, plan: ShardingPlan, num: int) -> None:
    """Draws the borders of documents through every row, and their lengths above the first row."""
    ends = offsets_of(plan.lengths)
    for y in range(num):
        axes.vlines(ends, y - 0.4, y + 0.4, color="black", linewidth=1.6, zorder=3)
    for i, length in enumerate(plan.lengths.tolist()):
        if length < LABEL_SHARE * plan.num_tokens:
            continue
        middle = (ends[i] + ends[i + 1]) / 2
        is_narrow = length < 0.028 * plan.num_tokens
        axes.annotate(
            f"{length:,}",
            (middle, -0.42),
            xytext=(0, 2),
            textcoords="offset points",
            ha="left" if is_narrow else "center",
            va="bottom",
            rotation=45 if is_narrow else 0,
            fontsize=10,
            annotation_clip=False,
        )


def _bars(axes: Axes, y: float, plan: ShardingPlan, imbalance: float, slowest: float) -> None:
    height = 0.68 / plan.cp
    for rank, ns in enumerate(plan.latency_ns.tolist()):
        at = y + (rank - (plan.cp - 1) / 2) * height
        axes.barh(at, ns / 1e3, 0.9 * height, color=RANK_COLOURS[rank % len(RANK_COLOURS)])
    mean = float(plan.latency_ns.mean()) / 1e3
    axes.vlines(mean, y - 0.38, y + 0.38, color="black", linewidth=1.2, linestyle=(0, (3, 2)))
    axes.text(1.42 * slowest, y, f"{imbalance:.2f}", ha="right", va="center", fontsize=12)
    top = float(plan.latency_ns.max()) / 1e3
    at = y + (int(plan.latency_ns.argmax()) - (plan.cp - 1) / 2) * height
    axes.text(top + 0.015 * slowest, at, f"{top:.0f}", va="center", fontsize=9)
