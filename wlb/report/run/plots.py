"""Figures of a training run; needs matplotlib.

Points are steps, and lines are their running means. Of more than `MOST_POINTS` steps, every k-th
point is drawn, so that the page of a long run stays small. Lines are means over all steps.
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
MOST_RANK_LABELS = 32
MOST_ROWS = 256


class StepSeries(NamedTuple):
    """A value of every step, drawn as a line."""

    label: str
    values: FloatArray
    # weight of each step in the running mean; None means equal weights
    weights: FloatArray | None = None


def loss_figure(records: RunRecords) -> Any:
    """Draw training and held-out loss and, below, the gradient norm."""
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
    """Draw tokens per second and the time of each step."""
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
    """Draw measured over predicted time of each term, over steps."""
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
    """Draw the imbalance of steps, predicted for the usual loader and for ours, and measured."""
    figure, (axes,) = new_figure(height=3.8)
    series = [
        StepSeries(
            "ours, predicted",
            records.column(lambda s: s.predicted.imbalance),
            records.column(lambda s: s.predicted.mean_workload_ns),
        ),
        StepSeries(
            "usual loader, predicted, same documents",
            records.column(lambda s: s.plain and s.plain.imbalance),
            records.column(lambda s: s.plain and s.plain.mean_workload_ns),
        ),
        StepSeries(
            "ours, measured",
            records.column(lambda s: s.measured.imbalance),
            records.column(lambda s: s.measured.telemetry and s.measured.telemetry.mean_ns),
        ),
    ]
    # Leave out what was not recorded.
    series = [s for s in series if not np.isnan(s.values).all()]
    _draw(axes, records, series)
    axes.set(ylabel="slowest / mean micro-batch", xlabel="step")
    points = [
        (records.steps_done[known], s.values[known], _colour(series, k))
        for k, s in enumerate(series)
        for known in [~np.isnan(s.values)]
    ]
    keep_far_points_at_the_edge(axes, points)
    _finish(figure, [axes], records)
    return figure


def expert_figure(records: RunRecords) -> Any:
    """Draw how unevenly CP ranks and EP ranks are loaded over steps and, below, over layers.

    The upper panel shows what the ranks of a layer wait for: the slowest CP rank's attention, and
    the EP rank with the most rows. The lower one shows the load of each layer, mean over steps.
    """
    figure, (above, below) = new_figure(height=5.4, nrows=2)
    series = [
        StepSeries("attention, predicted", records.column(lambda s: s.measured.cp_imbalance)),
        StepSeries(
            "experts, measured",
            records.column(lambda s: s.measured.experts and s.measured.experts.mean_rank),
        ),
    ]
    _draw(above, records, series)
    above.set(ylabel="slowest / mean rank")
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
    """Draw the delay of each step's tokens and, below, the tokens that wait after it."""
    figure, (above, below) = new_figure(height=4.6, nrows=2, sharex=True)
    tokens = records.column(lambda s: s.measured.num_tokens)
    mean = records.column(lambda s: s.measured.mean_delay)
    _draw(above, records, [StepSeries("mean of a step's tokens", mean, tokens)])
    most = records.column(lambda s: s.measured.max_delay)
    every = stride(most.size, MOST_POINTS)
    x = records.steps_done
    above.plot(x[::every], most[::every], "_", color=RUNS[1], ms=5, label="longest of a step")
    above.set_ylabel("delay (steps)")
    held = records.column(lambda s: s.measured.num_held_tokens)
    below.fill_between(x[::every], held[::every], step="mid", color=RUNS[2], alpha=0.5, lw=0)
    below.set(ylabel="tokens held back")
    below.set_ylim(bottom=0)
    _finish(figure, [above, below], records)
    return figure


def ranks_figure(values: FloatArray, parallel: ParallelSpec, *, what: str) -> Any:
    """Draw a value of each rank relative to the mean: rows are DP, CP and TP ranks, columns PP.

    Args:
        values: The values, shape [ranks].
        parallel: Degrees of parallelism.
        what: What the values are.
    """
    p = parallel
    grid = values.reshape(max(1, p.dp), p.pp, p.cp, p.tp)
    inner = [f"cp {c}, tp {t}" for c in range(p.cp) for t in range(p.tp)] if p.tp > 1 else ()
    # With too many rows, a TP group is shown by its slowest rank.
    if max(1, p.dp) * p.cp * p.tp > MOST_ROWS:
        return heat_map_figure(grid.max(3), what=what, tp=p.tp, devices="ranks")
    cells = grid.reshape(grid.shape[0], p.pp, p.cp * p.tp)
    return heat_map_figure(cells, what=what, inner=inner, devices="ranks")


def ranks_over_time_figure(tables: Sequence[RankTable], *, threshold: float) -> Any:
    """Draw measured over predicted time of each rank, relative to the median rank, over tables."""
    # The values have shape [ranks, tables].
    values = np.stack([t.over_median for t in tables], axis=1)
    # With too many rows, only the slowest ranks are shown.
    order = np.argsort(-values.max(1), kind="stable").tolist()
    kept: list[int] = sorted(order[:MOST_ROWS])
    every = stride(values.shape[1], MOST_ROWS)
    values = values[kept][:, ::every]
    rows = len(kept)
    figure, (axes,) = new_figure(height=1.4 + min(5.0, max(1.2, 0.22 * rows)))
    # Colours are symmetric around 1, and their range includes the threshold of stragglers.
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
    axes.set(xlabel="step at which the table ends", ylabel="rank")
    figure.colorbar(mesh, ax=axes, label="over the median rank")
    return figure


def _draw(axes: Any, records: RunRecords, series: Sequence[StepSeries]) -> None:
    """Draw faint points and running means; steps without a value are skipped."""
    for k, (label, values, weights) in enumerate(series):
        keep = ~np.isnan(values)
        x, y = records.steps_done[keep], values[keep]
        if not y.size:
            continue
        weighted = np.ones_like(y) if weights is None else np.nan_to_num(weights[keep])
        style: dict[str, Any] = {"color": _colour(series, k), "ls": DASHES[k], "label": label}
        draw_means(axes, x, y, weighted, most=MOST_POINTS, **style)


def _colour(series: Sequence[StepSeries], k: int) -> str:
    """Return the colour of the k-th line; a single line is black."""
    return RUNS[0 if len(series) == 1 else k + 1]


def _finish(
    figure: Any, panels: Sequence[Any], records: RunRecords, *, legend: bool = True
) -> None:
    """Add the axis label, a dotted line at each restart, and a legend above."""
    for axes in panels:
        for at in records.restarts:
            axes.axvline(at + 0.5, color="grey", ls=":", lw=1)
        axes.margins(x=0.02)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    if legend:
        legend_above(figure, panels[:1], ncols=4, fontsize=9)
