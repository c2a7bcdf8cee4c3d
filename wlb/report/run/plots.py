"""Figures of a training run. They need matplotlib.

Points are values of steps, and lines are running means over all steps. If there are more than
`MOST_POINTS` steps, only every k-th point is drawn, so that the page of a long run stays small.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wlb.plan import TERMS, ExpertLoads, FloatArray, RankTable
from wlb.report.plots import (
    DASHES,
    RUNS,
    draw_means,
    heat_map_figure,
    keep_far_points_at_the_edge,
    legend_above,
    new_figure,
    stride,
)
from wlb.report.run.records import RunRecords
from wlb.spec import ParallelSpec

MOST_POINTS = 800
"""Most points of a line, so that the page of a long run stays small."""
MOST_RANK_LABELS = 32
"""A heat map labels each row if it has at most this many ranks."""
MOST_ROWS = 256
"""Most rows and columns of a heat map. More would be less than a pixel high."""


class StepSeries(NamedTuple):
    """The values of one line of a figure over the steps of a run."""

    label: str  # label of the line in the legend
    values: FloatArray  # value of each step, shape [num_steps]; NaN where there is none
    # weight of each step in the running mean, shape [num_steps]; None means equal weights
    weights: FloatArray | None = None


def loss_figure(records: RunRecords) -> Any:
    """Return a figure of training and held-out loss and, below it, of the gradient norm."""
    figure, (above, below) = new_figure(height=5.0, nrows=2, sharex=True)
    loss = records.column(lambda s: s.measured.loss)
    tokens = records.column(lambda s: s.measured.num_targets)
    _draw(above, records, [StepSeries("training", loss, tokens)])
    if records.evaluations:
        xs, ys = zip(*records.evaluations, strict=True)
        label = f"held out: {ys[0]:.3f}" + (f" to {ys[-1]:.3f}" if len(ys) > 1 else "")
        above.plot(xs, ys, "D", color=RUNS[1], markersize=6, ls="--", lw=1, label=label)
    above.set_ylabel("loss (nats a token)")
    norm = records.column(lambda s: s.measured.grad_norm)
    _draw(below, records, [StepSeries("gradient norm", norm)])
    below.set_ylabel("gradient norm")
    _finish(figure, [above, below], records)
    return figure


def rate_figure(records: RunRecords) -> Any:
    """Return a figure of the tokens per second and, below it, of the time of each step."""
    figure, (above, below) = new_figure(height=4.6, nrows=2, sharex=True)
    time_s = records.column(lambda s: s.measured.step_time_s)
    tokens = records.column(lambda s: s.measured.num_tokens)
    rate = tokens / np.where(time_s > 0, time_s, np.nan)
    _draw(above, records, [StepSeries("tokens/s", rate, time_s)])
    above.set_ylabel("tokens/s")
    _draw(below, records, [StepSeries("step time", time_s)])
    below.set_ylabel("step time (s)")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
    _finish(figure, [above, below], records, legend=False)
    return figure


def ratio_figure(records: RunRecords) -> Any:
    """Return a figure of measured / predicted time at each step.

    It has four lines: attention and everything else in decoder layers, each forward and backward.
    """
    figure, (axes,) = new_figure(height=3.4)
    found = records.telemetry
    steps = np.array([done for done, _ in found], np.float64)
    for k, name in enumerate(TERMS):
        moments = [dict(record.terms)[name] for _, record in found]
        ratio = np.array([np.nan if m.ratio is None else m.ratio for m in moments], np.float64)
        weights = np.array([m.predicted_s for m in moments], np.float64)
        keep = ~np.isnan(ratio)
        style: dict[str, Any] = {
            "color": RUNS[k + 1],
            "ls": DASHES[k],
            "label": name.replace("_", " "),
        }
        some = (steps[keep], ratio[keep], weights[keep])
        draw_means(axes, *some, most=MOST_POINTS, alpha=0.4, **style)
    axes.axhline(1.0, color="grey", lw=0.8)
    axes.set(ylabel="measured / predicted time", xlabel="step")
    axes.set_ylim(bottom=0)
    _finish(figure, [axes], records)
    return figure


def balance_figure(records: RunRecords) -> Any:
    """Return a figure of the imbalance of steps: predicted, measured, and of the usual loader."""
    figure, (axes,) = new_figure(height=3.8)
    series = [
        StepSeries(
            "this run, predicted",
            records.column(lambda s: s.predicted.imbalance),
            records.column(lambda s: s.predicted.mean_workload_ns),
        ),
        StepSeries(
            "usual loader on the same documents, predicted",
            records.column(lambda s: s.plain and s.plain.imbalance),
            records.column(lambda s: s.plain and s.plain.mean_workload_ns),
        ),
        StepSeries(
            "this run, measured",
            records.column(lambda s: s.measured.imbalance),
            records.column(lambda s: s.measured.telemetry and s.measured.telemetry.mean_ns),
        ),
    ]
    # Leave out lines for which the run recorded no value.
    series = [s for s in series if not np.isnan(s.values).all()]
    _draw(axes, records, series)
    axes.set(ylabel="imbalance (slowest / mean micro-batch)", xlabel="step")
    points = [
        (records.steps_done[known], s.values[known], _colour(series, k))
        for k, s in enumerate(series)
        for known in [~np.isnan(s.values)]
    ]
    keep_far_points_at_the_edge(axes, points)
    _finish(figure, [axes], records)
    return figure


def expert_figure(records: RunRecords) -> Any:
    """Return a figure of how unevenly CP ranks and EP ranks are loaded.

    The upper panel shows, over steps, the attention time of the slowest CP rank and the rows of the
    most loaded EP rank, each divided by the mean over ranks. The lower panel shows for each layer
    the rows of the most loaded expert, divided by the mean over experts, and those of the most
    loaded EP rank, divided by the mean over EP ranks. Both ratios are averaged over steps.
    """
    figure, (above, below) = new_figure(height=5.4, nrows=2)
    series = [
        StepSeries(
            "attention of CP ranks, predicted", records.column(lambda s: s.measured.cp_imbalance)
        ),
        StepSeries(
            "experts of EP ranks, measured",
            records.column(lambda s: s.measured.experts and s.measured.experts.mean_rank),
        ),
    ]
    _draw(above, records, series)
    above.set(ylabel="slowest rank / mean over ranks")
    _finish(figure, [above], records)
    sums = ExpertLoads()
    for step in records.steps:
        if step.measured.experts is not None:
            sums.add(step.measured.experts, attention=step.measured.cp_imbalance)
    layers = sorted(sums.rank)
    for k, (label, of_layer) in enumerate((("expert", sums.expert), ("EP rank", sums.rank))):
        ratios = [of_layer[layer] / sums.steps for layer in layers]
        style: dict[str, Any] = {"color": RUNS[k + 1], "ls": DASHES[k], "marker": "o", "ms": 3.5}
        below.plot(layers, ratios, label=f"most loaded {label}", **style)
    below.set(ylabel="rows / mean", xlabel="layer")
    below.set_ylim(bottom=0)
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend(fontsize=9)
    return figure


def delay_figure(records: RunRecords) -> Any:
    """Return a figure of the delay of each step's tokens and, below it, of the tokens that wait."""
    figure, (above, below) = new_figure(height=4.6, nrows=2, sharex=True)
    tokens = records.column(lambda s: s.measured.num_tokens)
    mean = records.column(lambda s: s.measured.mean_delay)
    _draw(above, records, [StepSeries("mean delay of a step's tokens", mean, tokens)])
    most = records.column(lambda s: s.measured.max_delay)
    every = stride(most.size, MOST_POINTS)
    x = records.steps_done
    above.plot(x[::every], most[::every], "_", color=RUNS[1], ms=5, label="longest delay in a step")
    above.set_ylabel("delay (steps)")
    held = records.column(lambda s: s.measured.num_held_tokens)
    below.fill_between(x[::every], held[::every], step="mid", color=RUNS[2], alpha=0.5, lw=0)
    below.set(ylabel="tokens that wait")
    below.set_ylim(bottom=0)
    _finish(figure, [above, below], records)
    return figure


def ranks_figure(values: FloatArray, parallel: ParallelSpec, *, what: str) -> Any:
    """Return a heat map of a value of each rank, relative to the mean over ranks.

    The rows are DP, CP and TP ranks, and the columns are pipeline ranks.

    Args:
        values: Value of each rank, shape [ranks].
        parallel: The parallel layout.
        what: Name of the values, for the title.
    """
    p = parallel
    grid = values.reshape(max(1, p.dp), p.pp, p.cp, p.tp)
    inner = [f"cp {c}, tp {t}" for c in range(p.cp) for t in range(p.tp)] if p.tp > 1 else ()
    # If there are too many rows, show only the slowest rank of each TP group.
    if max(1, p.dp) * p.cp * p.tp > MOST_ROWS:
        return heat_map_figure(grid.max(3), what=what, tp=p.tp, devices="ranks")
    cells = grid.reshape(grid.shape[0], p.pp, p.cp * p.tp)
    return heat_map_figure(cells, what=what, inner=inner, devices="ranks")


def ranks_over_time_figure(tables: Sequence[RankTable], *, threshold: float) -> Any:
    """Return a heat map of how slow each rank was in the course of the run.

    The values are `RankTable.over_median`.

    Args:
        tables: Tables of all ranks' times, in order of steps. Each table is a column.
        threshold: A rank counts as slow if its value exceeds 1 + `threshold`, which the range of
            colours includes.
    """
    # Shape [ranks, tables].
    values = np.stack([t.over_median for t in tables], axis=1)
    # If there are too many ranks, show only the slowest.
    order = np.argsort(-values.max(1), kind="stable").tolist()
    kept: list[int] = sorted(order[:MOST_ROWS])
    every = stride(values.shape[1], MOST_ROWS)
    values = values[kept][:, ::every]
    rows = len(kept)
    figure, (axes,) = new_figure(height=1.4 + min(5.0, max(1.2, 0.22 * rows)))
    # Make the range of colours symmetric around 1, and so wide that it includes the threshold.
    spread = max(threshold, float(np.abs(values - 1).max()))
    mesh = axes.pcolormesh(values, cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread)
    axes.invert_yaxis()
    axes.grid(visible=False)
    if rows <= MOST_RANK_LABELS:
        axes.set(yticks=np.arange(rows) + 0.5, yticklabels=kept)
    shown = [t.steps_done for t in tables[::every]]
    at = np.unique(np.linspace(0, len(shown) - 1, min(10, len(shown))).astype(int))
    axes.set(xticks=at + 0.5, xticklabels=[shown[i] for i in at])
    axes.tick_params(length=0)
    axes.set(xlabel="last step of the table", ylabel="rank")
    figure.colorbar(mesh, ax=axes, label="relative to the median rank")
    return figure


def _draw(axes: Any, records: RunRecords, series: Sequence[StepSeries]) -> None:
    """Draw each series as faint points and a running mean, without steps that have no value."""
    for k, (label, values, weights) in enumerate(series):
        keep = ~np.isnan(values)
        x, y = records.steps_done[keep], values[keep]
        if not y.size:
            continue
        weighted = np.ones_like(y) if weights is None else np.nan_to_num(weights[keep])
        style: dict[str, Any] = {"color": _colour(series, k), "ls": DASHES[k], "label": label}
        draw_means(axes, x, y, weighted, most=MOST_POINTS, **style)


def _colour(series: Sequence[StepSeries], k: int) -> str:
    """Return the colour of line `k` of a figure; if there is only one line, it is black."""
    return RUNS[0 if len(series) == 1 else k + 1]


def _finish(
    figure: Any, panels: Sequence[Any], records: RunRecords, *, legend: bool = True
) -> None:
    """Add a label of the x axis, a dotted line at each restart of the run, and a legend.

    Args:
        figure: The figure.
        panels: All its axes, from top to bottom.
        records: Everything that was recorded about the run.
        legend: Whether to add a legend of the first axes.
    """
    for axes in panels:
        for at in records.restarts:
            axes.axvline(at + 0.5, color="grey", ls=":", lw=1)
        axes.margins(x=0.02)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    if legend:
        legend_above(figure, panels[:1], ncols=4, fontsize=9)
