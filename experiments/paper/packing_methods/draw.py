"""Draws the pictures of `experiments.paper.packing_methods`: data sets, steps and rows."""

from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, new_figure
from experiments.paper.packing_methods.counting import OURS, Method
from experiments.paper.packing_methods.lengths import DATASETS, MSL
from experiments.paper.packing_methods.rows import RowCounts
from experiments.paper.packing_methods.steps import StepCounts

BIN = 128
SHOWN = (Method.FIXED_LENGTH_POSID, Method.MULTIPACK, Method.RANDOM, Method.SORTED, *OURS)
SHORT = {
    Method.FIXED_LENGTH_POSID: "FixedLengthPacking",
    Method.MULTIPACK: "Multipack (1 GPU)",
    Method.RANDOM: "RandomPacking",
    Method.SORTED: "SortedPacking",
    Method.MULTIPACK_GROUPS: "Multipack, groups of 8",
    Method.FIRST_FIT_DECREASING: "first fit decreasing",
    Method.BEST_FIT_DECREASING: "best fit decreasing",
}
PAPER = {"marker": "D", "color": "none", "markeredgecolor": "black", "markersize": 9}


def draw_lengths() -> Any:
    """Draws the paper's Figure 1, the distribution of lengths, for our lengths."""
    figure, axes = new_figure(ncols=3, height=3.3)
    for axis, dataset, colour in zip(axes, DATASETS.values(), COLOURS, strict=False):
        lengths = dataset.lengths()
        axis.hist(lengths, bins=np.arange(0, MSL + 2 * BIN, BIN), color=colour)
        mean, median = float(lengths.mean()), float(np.median(lengths))
        axis.axvline(mean, color="black", linestyle=(0, (4, 2)), linewidth=1.2)
        lines = [
            f"{lengths.size:,} examples",
            f"{lengths.sum() / 1e6:.2f} million tokens",
            f"mean {mean:,.0f} (dashed)",
            f"median {median:,.0f}",
        ]
        if dataset.is_cut:
            lines.append(f"{int((lengths == MSL).sum()):,} cut at 4K")
        axis.text(
            0.92,
            0.97,
            "\n".join(lines),
            transform=axis.transAxes,
            ha="right",
            va="top",
            fontsize=9.5,
        )
        axis.set(
            title=f"{dataset.title} 20K", xlim=(0, MSL + BIN), xlabel="example length (tokens)"
        )
        axis.set_xticks([0, 1024, 2048, 3072, 4096], ["0", "1K", "2K", "3K", "4K"])
    axes[0].set_ylabel(f"examples a bin of {BIN} tokens")
    return figure


def draw_steps(found: list[StepCounts], *, gas: dict[tuple[str, int], int]) -> Any:
    """Draws the steps of an epoch by method.

    Args:
        found: Counted steps.
        gas: Gradient accumulation steps to show, by data set and msl.
    """
    figure, axes = new_figure(ncols=3, height=4.3, sharey=True)
    for axis, name in zip(axes, DATASETS, strict=True):
        for i, msl in enumerate((8192, 16384)):
            rows = [s for s in found if s.dataset == name and s.msl == msl and s.bs == 1]
            rows = [s for s in rows if s.gas == gas[name, msl]]
            for s in rows:
                if s.method not in SHOWN:
                    continue
                at = SHOWN.index(s.method) + (i - 0.5) * 0.36
                least, median, most = s.steps
                axis.plot([least, most], [at, at], color=COLOURS[i], linewidth=3, alpha=0.6)
                axis.plot(median, at, marker="os"[i], color=COLOURS[i], linestyle="none")
                if s.paper:
                    axis.plot(s.paper.steps, at, linestyle="none", **PAPER)
        axis.axhline(3.5, color="0.6", linewidth=0.8, linestyle=(0, (2, 2)))
        axis.set(
            title=f"{name} 20K",
            xlabel="optimiser steps an epoch",
            yticks=range(len(SHOWN)),
            yticklabels=[SHORT[method] for method in SHOWN],
        )
        axis.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    axes[0].invert_yaxis()
    for i, text in enumerate(("rows of 8,192 tokens", "rows of 16,384 tokens")):
        axes[0].plot([], [], marker="os"[i], color=COLOURS[i], linestyle="none", label=text)
    axes[0].plot([], [], linestyle="none", label="paper", **PAPER)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_rows(found: list[RowCounts]) -> Any:
    """Draws our number of rows over the paper's by model and layout, counted in two ways."""
    figure, axes = new_figure(ncols=4, height=4.0, sharey=True, sharex=True)
    panels = [(d, layout) for layout in ("basic packing", "flat") for d in ("FLAN", "OrcaMath")]
    for axis, (dataset, layout) in zip(axes, panels, strict=True):
        rows = [f for f in found if (f.paper.dataset, f.paper.layout) == (dataset, layout)]
        for y, f in enumerate(rows):
            lossless = 100 * f.difference(as_printed=False)
            printed = 100 * f.difference(as_printed=True)
            axis.plot([lossless, printed], [y, y], color="0.75", linewidth=1.5, zorder=1)
            axis.plot(lossless, y, marker="o", color=COLOURS[0], linestyle="none")
            axis.plot(printed, y, marker="D", color=COLOURS[1], linestyle="none")
        axis.axvline(0, color="black", linewidth=1)
        axis.set(
            title=f"{dataset}, {'basic' if layout != 'flat' else 'flat'}",
            xlabel="rows, ours over paper (%)",
            yticks=range(len(rows)),
            yticklabels=[f.paper.model for f in rows],
        )
        axis.set_xticks([-3, -2, -1, 0, 1, 2, 3])
    axes[0].invert_yaxis()
    axes[0].plot([], [], marker="o", color=COLOURS[0], linestyle="none", label="nothing lost")
    axes[0].plot(
        [],
        [],
        marker="D",
        color=COLOURS[1],
        linestyle="none",
        label="1,000 examples at a time, unfinished rows dropped",
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
