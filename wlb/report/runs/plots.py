"""Figures of several training runs over the tokens that they have trained; needs matplotlib."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from wlb.plan import FloatArray
from wlb.report.plots import DASHES, RUNS, draw_means, legend_above, new_figure
from wlb.report.run.plots import MOST_POINTS
from wlb.report.run.records import RunRecords


def losses_figure(runs: Sequence[RunRecords], names: Sequence[str]) -> Any:
    """Training loss of each run above, held-out loss below."""
    figure, (above, below) = new_figure(height=5.6, nrows=2, sharex=True)
    for k, (run, name) in enumerate(zip(runs, names, strict=True)):
        tokens = tokens_of(run)
        loss = run.column(lambda s: s.measured.loss)
        weights = run.column(lambda s: s.measured.num_targets)
        known = ~np.isnan(loss)
        style = _style(k, name)
        some = (tokens[known], loss[known], weights[known])
        draw_means(above, *some, most=MOST_POINTS, **style)
        if run.evaluations:
            xs, ys = zip(*run.evaluations, strict=True)
            at = np.interp(xs, [0.0, *run.steps_done], [0.0, *tokens])
            below.plot(at, ys, "D", markersize=5, lw=1, **style)
    above.set_ylabel("training loss (nats a token)")
    below.set(ylabel="held-out loss", xlabel="tokens trained")
    legend_above(figure, [above])
    return figure


def rates_figure(runs: Sequence[RunRecords], names: Sequence[str]) -> Any:
    """Tokens a second of each run above, imbalance of its steps below."""
    figure, (above, below) = new_figure(height=5.2, nrows=2, sharex=True)
    for k, (run, name) in enumerate(zip(runs, names, strict=True)):
        tokens, style = tokens_of(run), _style(k, name)
        time_s = run.column(lambda s: s.measured.step_time_s)
        trained = run.column(lambda s: s.measured.num_tokens)
        timed = time_s > 0
        rate = trained[timed] / time_s[timed]
        draw_means(above, tokens[timed], rate, time_s[timed], most=MOST_POINTS, **style)
        work = run.column(lambda s: s.predicted.mean_workload_ns)
        ratio = run.column(lambda s: s.predicted.imbalance)
        draw_means(below, tokens, ratio, work, most=MOST_POINTS, **style)
    above.set_ylabel("tokens/s")
    above.set_ylim(bottom=0)
    below.set(ylabel="predicted imbalance", xlabel="tokens trained")
    legend_above(figure, [above])
    return figure


def tokens_of(run: RunRecords) -> FloatArray:
    """Tokens that were trained up to each step, shape [steps]."""
    return np.cumsum(run.column(lambda s: s.measured.num_tokens))


def _style(k: int, name: str) -> dict[str, Any]:
    return {"color": RUNS[k], "ls": DASHES[k], "label": name}
