"""`wlb report RUN`: the HTML page of a run. The run may still be training."""

from typing import Any

import numpy as np

from wlb.plan import TERMS, UserError, late_remark, starved_remark
from wlb.plan.ranks import RANKS_INTERVAL, STRAGGLER_TABLES, STRAGGLER_THRESHOLD
from wlb.plan.tally import Tally
from wlb.report.plots import svg
from wlb.report.render import render
from wlb.report.run import plots
from wlb.report.run.records import RunRecords
from wlb.report.run.simulated import simulate_step
from wlb.report.run.timeline import measured_timeline_figure, slowest_pipeline
from wlb.report.simulation import layout_text
from wlb.report.timeline import timeline_figure
from wlb.simulate import critical_path
from wlb.spec import to_toml


def run_page(records: RunRecords, *, step: int | None = None, command: str = "") -> str:
    """Return the HTML page of a run.

    Args:
        records: Everything that was recorded about the run.
        step: Step whose timeline is drawn, counted from 1 as in the table that training prints.
            None means the last step with a measured timeline.
        command: The command line that made the page, which the page states.
    """
    spec, totals = records.spec, tally_of(records)
    device = records.starts[-1].get("device") if records.starts else None
    figures = {
        "loss": plots.loss_figure(records),
        "rate": plots.rate_figure(records),
        "balance": plots.balance_figure(records),
        "delays": plots.delay_figure(records),
        **({"experts": plots.expert_figure(records)} if totals.experts.steps else {}),
        **({"ratio": plots.ratio_figure(records)} if totals.telemetry.terms else {}),
    }
    return render(
        "run",
        title=f"{spec.run.name}: training run",
        records=records,
        spec=spec,
        device=device,
        layout=layout_text(spec).replace("GPUs", "GPUs" if device == "cuda" else "ranks"),
        steps_done=int(records.steps_done[-1]),
        totals=totals,
        late=late_remark(totals.overdue, totals.max_delay) if totals.overdue else "",
        starved=starved_remark(totals.step_tokens),
        term_names=TERMS,
        figures={name: svg(figure, name) for name, figure in figures.items()},
        ranks=_ranks(records) if records.tables else None,
        timeline=_timeline(records, step),
        straggler={
            "threshold": STRAGGLER_THRESHOLD,
            "tables": STRAGGLER_TABLES,
            "interval": RANKS_INTERVAL,
        },
        command=command,
        toml=to_toml(
            spec, comments=("The run's configuration, without most keys that have their default.",)
        ),
    )


def tally_of(records: RunRecords) -> Tally:
    """Return totals over the recorded steps, as training prints them at its end."""
    totals = Tally()
    for step in records.steps:
        totals.add(step.measured, step.predicted, step.plain)
    for _, record in records.telemetry:
        totals.telemetry.add(record)
    for table in records.tables:
        totals.stragglers.add(table)
    return totals


def _ranks(records: RunRecords) -> dict[str, Any]:
    """Return figures and numbers for the page's section on the times of all ranks."""
    tables, spec = records.tables, records.spec
    num_steps = sum(t.num_steps for t in tables)
    compute = np.sum([t.compute_us for t in tables], axis=0).astype(np.float64)
    over_time = plots.ranks_over_time_figure(tables, threshold=STRAGGLER_THRESHOLD)
    return {
        "num_steps": num_steps,
        "mean_s": compute.mean() / num_steps * 1e-6,
        "figure": svg(plots.ranks_figure(compute, spec.parallel, what="computing time"), "ranks"),
        "over_time": svg(over_time, "over"),
        "worst": max(float(t.over_median.max()) for t in tables),
    }


def _timeline(records: RunRecords, step: int | None) -> dict[str, Any]:
    """Return the values for the page's section on the timeline of a step.

    The timeline is the measured one if it was recorded, otherwise a simulated one.

    Args:
        records: Everything that was recorded about the run.
        step: Number of the step, counted from 1; None for the last recorded one.

    Returns:
        Values for the template. `kind` is "measured", "simulated", "none" (the run has no such
        step) or "refused" (the step cannot be simulated).
    """
    chosen = None if step is None else records.at(step)
    # 1. Prefer a measured timeline.
    found = [t for t in records.timelines if chosen is None or t.step == chosen.step]
    if found:
        timeline, parallel = found[-1], records.spec.parallel
        pipeline = slowest_pipeline(timeline, parallel)
        return {
            "kind": "measured",
            "steps_done": timeline.steps_done,
            "pipeline": pipeline,
            "figure": svg(measured_timeline_figure(timeline, parallel, pipeline), "timeline"),
        }
    # 2. Otherwise simulate the step from its plan.
    trained = [s for s in records.steps if s.measured.num_targets]
    if not trained:
        return {"kind": "none"}
    record = chosen or trained[-1]
    try:
        simulation = simulate_step(records, record)
    except (UserError, OSError) as error:
        return {"kind": "refused", "steps_done": record.steps_done, "error": error}
    pipeline = critical_path(simulation).main_pipeline
    title = f"step {record.steps_done}, pipeline {pipeline}, simulated"
    return {
        "kind": "simulated",
        "steps_done": record.steps_done,
        "simulated_s": simulation.step_time_s[0],
        "measured_s": record.measured.step_time_s or 0.0,
        "figure": svg(timeline_figure(simulation, 0, pipeline, title=title), "timeline"),
    }
