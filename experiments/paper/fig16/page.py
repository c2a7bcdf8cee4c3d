"""Makes the tables and pictures of `experiments.paper.fig16`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, LINES, MARKERS, new_figure
from experiments.harness.pages import Picture, Table
from experiments.paper.fig16.arms import DELAYS
from experiments.paper.fig16.bookkeeping import CLASS_NAMES
from experiments.paper.fig16.summary import (
    NO_DELAY,
    Group,
    Measure,
    band,
    cut_share,
    final,
    loss_at,
    train_loss,
    verdict,
)


def quality_table(groups: Sequence[Group], tokens: int) -> Table:
    """Returns the table of losses at the end and earlier.

    Args:
        groups: Arms with their runs.
        tokens: Tokens at the last evaluation before the end that all runs have.
    """
    at = loss_at(tokens)
    rows: list[list[Any]] = []
    for g in groups:
        plain: list[Any] = [
            g.arm.title,
            len(g.results),
            float(g.values(final).mean()),
            float(g.values(final).std(ddof=1)) if len(g.results) > 1 else None,
        ]
        compared: list[Any] = [None] * 8
        if not g.is_baseline:
            compared = []
            for measure in (final, at, train_loss):
                compared += [float(g.differences(measure).mean()), _width(groups, g, measure)]
            theirs = float(g.values(final).mean() - g.differences(final).mean())
            compared += [float(g.differences(final).mean()) / theirs, verdict(groups, g, final)]
        rows.append(plain + compared)
    million = f"at {tokens / 1e6:g}M"
    signed = ("less baseline", million, "training")
    return Table(
        name="quality",
        title="Held-out loss",
        columns=(
            "arm", "seeds", "loss", "sd", "less baseline", "±, end", million, "±, then",
            "training", "±, training", "relative", "difference",
        ),
        rows=rows,
        formats=dict.fromkeys(signed, "+.4f")
        | dict.fromkeys(("loss", "sd", "±, end", "±, then", "±, training"), ".4f")
        | {"relative": "+.2%"},
        note="Nats a label after the whole epoch, mean of seeds; sd: over seeds. less baseline, ±: "
        "paired by seed, half the 95% interval; the forced delays' baseline is no delay, all "
        f"others' is original. {million}: the same at {tokens:,} tokens, before what was still "
        "held is flushed. training: of the loss in training, over the whole epoch. difference: of "
        "the loss after the epoch; noise where it is within ±.",
    )  # fmt: skip


def order_table(groups: Sequence[Group]) -> Table:
    """Returns the table of what packing does to the order of training, a row for each packing."""
    rows: list[list[Any]] = []
    for g in _packings(groups):
        rows.append(
            [
                g.arm.title,
                g.book(lambda b: b.num_steps),
                g.book(lambda b: b.summary.imbalance),
                g.book(lambda b: b.summary.mean_delay),
                g.book(lambda b: b.summary.p99_delay),
                max(b.summary.max_delay for b in g.books),
                g.book(lambda b: b.summary.tokens_cv),
                g.book(lambda b: b.summary.flushed_tokens / b.summary.num_tokens),
                g.book(cut_share),
                *g.class_weights.tolist(),
                float(np.mean([r.norm_mean for r in g.results])),
                float(np.mean([r.norm_std**2 for r in g.results])),
            ]
        )
    weights = tuple(f"weight, {name}" for name in CLASS_NAMES)
    columns = (
        "packing", "steps", "imbalance", "mean delay", "p99", "max", "CV of tokens", "flushed",
        "cut", *weights, "gradient norm", "its variance",
    )  # fmt: skip
    return Table(
        name="order",
        title="What packing does to the order of training",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(("imbalance", "CV of tokens", *weights), ".3f")
        | {"steps": ".0f", "mean delay": ".2f", "p99": ".0f", "flushed": ".2%", "cut": ".1%"}
        | {"gradient norm": ".3f", "its variance": ".4f"},
        note="Delays in steps, of tokens. flushed: share of tokens trained after the last global "
        "batch had come. cut: share of documents trained in more than one piece. weight: what a "
        "label counts in the loss under a step's mean, by length of its document in windows, where "
        "1 is as if all labels counted the same (with the constant normaliser all are 1). Gradient "
        "norms before clipping, second half of training.",
    )


def classes_table(groups: Sequence[Group]) -> Table:
    rows: list[list[Any]] = []
    for g in groups:
        if g.is_baseline or not all(r.class_losses for r in (*g.results, *g.baseline)):
            continue
        by_class = g.class_differences()
        for i, name in enumerate(CLASS_NAMES):
            own = by_class[:, i]
            if np.isfinite(own).all():
                spread = float(own.std(ddof=1)) if len(own) > 1 else None
                rows.append([g.arm.title, name, float(own.mean()), spread])
    return Table(
        name="classes",
        title="Held-out loss by document length, less the baseline's",
        columns=("arm", "length (windows)", "less baseline", "sd"),
        rows=rows,
        formats={"less baseline": "+.4f", "sd": ".4f"},
        note="After the whole epoch, mean and standard deviation of seeds.",
        most_rows=0,
    )


def runs_table(groups: Sequence[Group]) -> Table:
    """Returns the table of all runs, for readers who want to compute other statistics."""
    rows = [
        [g.arm.name, i, r.num_steps, r.num_tokens, r.num_labels, r.final, r.train_loss, r.commit]
        for g in groups
        for i, r in zip(g.seeds, g.results, strict=True)
    ]
    return Table(
        name="runs",
        title="Runs",
        columns=("arm", "seed", "steps", "tokens", "labels", "held-out", "training", "commit"),
        rows=rows,
        most_rows=0,
    )


def curves_table(groups: Sequence[Group]) -> Table:
    rows = [
        [g.arm.name, seed, kind, tokens, loss]
        for g in groups
        for seed, r in zip(g.seeds, g.results, strict=True)
        for kind, curve in (("held-out", r.curve), ("training", r.trained))
        for tokens, loss in curve
    ]
    return Table(
        name="curves",
        title="Loss curves",
        columns=("arm", "seed", "of", "tokens", "loss"),
        rows=rows,
        most_rows=0,
    )


def draw_curves(groups: Sequence[Group], grid: Sequence[int]) -> Any:
    """Draws Figure 16: losses (left), and their small differences from the baseline (right)."""
    figure, (left, right) = new_figure(ncols=2, height=4.2)
    shown = [g for g in groups if g.arm.group == "policy"]
    at = np.array(grid) / 1e6
    for i, g in enumerate(shown):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i % len(LINES)]}
        losses = np.array([g.values(loss_at(n)) for n in grid])
        # Leave out the loss of the untrained model, which would flatten the rest of the curve.
        later = losses[1:]
        left.plot(at[1:], later.mean(axis=1), label=g.arm.title, linewidth=1.4, **style)
        if len(g.results) > 1:
            left.fill_between(
                at[1:], later.min(axis=1), later.max(axis=1), color=style["color"], alpha=0.12, lw=0
            )
        if g.is_baseline:
            right.axhline(0, linewidth=1.4, **style)
            continue
        means = np.array([g.differences(loss_at(n)).mean() for n in grid])
        right.plot(at, means, linewidth=1.4, **style)
    if shown:
        # Arms with equally many seeds have intervals of equal width, so one band around 0 suffices.
        fewest = min(shown, key=lambda g: len(g.results))
        width = np.array([band(groups, fewest, loss_at(n)) for n in grid])
        if np.isfinite(width).all():
            said = "noise (95%)"
            right.fill_between(at, -width, width, color="#000000", alpha=0.12, lw=0, label=said)
            right.legend(frameon=False, fontsize=9)
    left.set(xlabel="tokens (millions)", ylabel="held-out loss (nats)")
    right.set(xlabel="tokens (millions)", ylabel="less original's")
    left.legend(frameon=False, fontsize=9)
    return figure


def draw_delays(groups: Sequence[Group], tokens: int) -> Any:
    """Draws the difference of loss by the forced delay of long documents."""
    figure, (axis,) = new_figure(height=3.6)
    found = {g.arm.name: g for g in groups}
    named = [(d, found[f"hold-{d}"]) for d in DELAYS if f"hold-{d}" in found]
    measures: tuple[tuple[str, Measure], ...] = (
        ("after the whole epoch", final),
        (f"at {tokens / 1e6:g}M tokens, before the flush", loss_at(tokens)),
    )
    for i, (label, measure) in enumerate(measures):
        at = np.array([d for d, _ in named]) * (1 + 0.06 * i)
        means = [float(g.differences(measure).mean()) for _, g in named]
        widths = [band(groups, g, measure) for _, g in named]
        axis.errorbar(
            at, means, yerr=widths if np.isfinite(widths).all() else None, label=label, capsize=3,
            color=COLOURS[i], marker=MARKERS[i], linestyle=LINES[i],
        )  # fmt: skip
    axis.axhline(0, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(DELAYS, [str(d) for d in DELAYS])
    axis.minorticks_off()
    axis.set(xlabel="steps that long documents wait", ylabel="held-out loss less no delay's")
    axis.legend(frameon=False)
    return figure


def draw_classes(groups: Sequence[Group]) -> Any:
    """Draws the weight of a label (left) and the difference of loss (right) by document length."""
    figure, (left, right) = new_figure(ncols=2, height=4.2)
    at = np.arange(len(CLASS_NAMES))
    shown = [g for g in groups if g.arm.group != "delay" and not g.is_baseline]
    for i, g in enumerate(shown):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINES[i % len(LINES)],
        }
        weights = np.ones(len(at)) if g.arm.name != g.arm.packing else g.class_weights
        left.plot(at, weights, label=g.arm.title, **style)
        if all(r.class_losses for r in (*g.results, *g.baseline)):
            right.plot(at, g.class_differences().mean(axis=0), **style)
    right.axhline(0, color="black", linewidth=1)
    for axis in (left, right):
        axis.set_xticks(at, CLASS_NAMES, fontsize=9)
        axis.set_xlabel("document length (windows)")
    left.set_ylabel("weight of a label in the loss")
    right.set_ylabel("held-out loss less original's")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False,
        fontsize=9,
    )  # fmt: skip
    return figure


def pictures(groups: Sequence[Group], grid: Sequence[int]) -> list[Picture]:
    out = [
        Picture(
            name="curves",
            caption="Held-out loss by tokens trained (Figure 16): means of seeds, their range; "
            "right the difference from original, which is noise within the grey band (95%)",
            figure=draw_curves(groups, grid),
        ),
        Picture(
            name="classes",
            caption="By document length: what a label weighs in the loss, and held-out loss less "
            "original's",
            figure=draw_classes(groups),
        ),
    ]
    if any(g.arm.group == "delay" and g.arm.name != NO_DELAY for g in groups):
        drawn = draw_delays(groups, grid[-1])
        out.append(
            Picture(
                name="delays",
                caption="Held-out loss where documents of 0.2 windows and more wait, less the loss "
                "without waiting; bars: 95% intervals",
                figure=drawn,
            )
        )
    return out


def _packings(groups: Sequence[Group]) -> list[Group]:
    return [g for g in groups if g.arm.name == g.arm.packing]


def _width(groups: Sequence[Group], group: Group, measure: Measure) -> float | None:
    width = band(groups, group, measure)
    return width if np.isfinite(width) else None
