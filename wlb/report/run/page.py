"""`wlb report RUN`: the page of a run, finished or still going."""

from typing import Any

import numpy as np

from wlb.plan import TERMS, MeasuredTimeline, RankTable, UserError
from wlb.plan.tally import Tally
from wlb.report.plots import svg
from wlb.report.render import render
from wlb.report.run.plots import (
    balance_figure,
    delay_figure,
    loss_figure,
    ranks_figure,
    ranks_over_time_figure,
    rate_figure,
    ratio_figure,
)
from wlb.report.run.records import RunRecords
from wlb.report.run.simulated import simulate_step
from wlb.report.run.timeline import measured_timeline_figure, slowest_pipeline
from wlb.report.simulation.tables import layout_text
from wlb.report.timeline import timeline_figure
from wlb.simulate import critical_path
from wlb.spec import to_toml

MOST_HOSTS = 8


def run_page(records: RunRecords, *, step: int | None = None, command: str = "") -> str:
    """The page as HTML. step: the one whose passes are drawn, counted from 1 as in the run's table
    (default: the last one that was recorded). command: shown among the facts of the run."""
    spec, totals = records.spec, tally_of(records)
    device = records.starts[-1].get("device") if records.starts else None
    figures = {
        "loss": loss_figure(records),
        "rate": rate_figure(records),
        "balance": balance_figure(records),
        "delays": delay_figure(records),
        **({"ratio": ratio_figure(records)} if totals.telemetry.terms else {}),
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
        terms=_terms(totals),
        measured_over_predicted=_measured_over_predicted(totals),
        figures={name: svg(figure, name) for name, figure in figures.items()},
        ranks=_ranks(records) if records.tables else None,
        timeline=_timeline(records, step),
        stragglers=_stragglers(totals),
        events=_events(records.events),
        facts=_facts(records, command),
        toml=to_toml(
            spec, comments=("What wlb train ran; most keys at their defaults are left out.",)
        ),
    )


def tally_of(records: RunRecords) -> Tally:
    """The sums that training prints, over what was recorded."""
    totals = Tally()
    for step in records.steps:
        totals.add(step.measured, step.predicted, step.plain)
    for _, record in records.telemetry:
        totals.telemetry.add(record)
    for table in records.tables:
        totals.stragglers.add(table)
    return totals


def _terms(totals: Tally) -> list[tuple[str, ...]]:
    """Rows: term, cells, predicted and measured seconds, ratio, MAPE, correlation."""
    found = totals.telemetry.terms
    return [
        (
            name.replace("_", " "),
            f"{m.num_cells:,}",
            f"{m.predicted_s:.2f}",
            f"{m.measured_s:.2f}",
            "-" if m.ratio is None else f"{m.ratio:.3f}",
            "-" if m.mape is None else f"{m.mape:.0%}",
            "-" if m.correlation is None else f"{m.correlation:.3f}",
        )
        for name, m in ((name, found[name]) for name in TERMS if found)
    ]


def _measured_over_predicted(totals: Tally) -> float | None:
    """Of all terms together; None where nothing was predicted."""
    moments = totals.telemetry.terms.values()
    predicted_s = sum(m.predicted_s for m in moments)
    return sum(m.measured_s for m in moments) / predicted_s if predicted_s else None


def _ranks(records: RunRecords) -> dict[str, Any]:
    """Computing time of ranks in all tables, and who was busiest in the last one."""
    tables, spec = records.tables, records.spec
    num_steps = sum(t.num_steps for t in tables)
    compute = np.sum([t.compute_us for t in tables], axis=0).astype(np.float64)
    over_time = ranks_over_time_figure(tables, threshold=spec.telemetry.straggler_threshold)
    return {
        "num_steps": num_steps,
        "mean_s": compute.mean() / num_steps * 1e-6,
        "figure": svg(ranks_figure(compute, spec.parallel, what="computing time"), "ranks"),
        "over_time": svg(over_time, "over"),
        "worst": max(float(t.over_median.max()) for t in tables),
        "last": _last_table(tables[-1]),
    }


def _last_table(table: RankTable) -> dict[str, float]:
    steps = table.num_steps
    busiest, idlest = int(table.compute_us.argmax()), int(table.bubble_us.argmax())
    return {
        "num_steps": steps,
        "busiest": busiest,
        "compute_s": table.compute_us[busiest] / steps * 1e-6,
        "idlest": idlest,
        "bubble_s": table.bubble_us[idlest] / steps * 1e-6,
        "loading_ms": float(table.loading_us.max()) / steps * 1e-3,
    }


def _timeline(records: RunRecords, step: int | None) -> dict[str, Any]:
    """Measured where it was recorded, else simulated; `kind` says which, or why there is none."""
    chosen = None if step is None else records.at(step)
    found = [t for t in records.timelines if chosen is None or t.step == chosen.step]
    if found:
        return _measured_timeline(records, found[-1])
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


def _measured_timeline(records: RunRecords, timeline: MeasuredTimeline) -> dict[str, Any]:
    parallel = records.spec.parallel
    pipeline = slowest_pipeline(timeline, parallel)
    return {
        "kind": "measured",
        "steps_done": timeline.steps_done,
        "pipeline": pipeline,
        "figure": svg(measured_timeline_figure(timeline, parallel, pipeline), "timeline"),
    }


def _stragglers(totals: Tally) -> list[tuple[str, ...]]:
    """Rows: rank, host, place, worst measured over predicted time, first and last step."""
    return [
        (
            str(s.rank),
            s.host,
            *(str(n) for n in (s.node, s.tp, s.cp, s.pp, s.dp)),
            f"{s.over:.2f}x",
            str(named.first),
            str(named.last),
        )
        for named in totals.stragglers.worst_first
        for s in (named.worst,)
    ]


def _events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Checkpoints, steps that were not finite, stops."""
    saves = [e for e in events if e["kind"] == "checkpoint"]
    written = [e for e in saves if not e["error"]]
    out: dict[str, Any] = {
        "written": written,
        "failed": [e for e in saves if e["error"]],
        "nonfinite": [e for e in events if e["kind"] == "nonfinite"],
        "stops": [e for e in events if e["kind"] == "stop"],
    }
    for name in ("stall_s", "write_s") if written else ():
        times = [e[name] for e in written]
        out |= {f"mean_{name}": sum(times) / len(times), f"max_{name}": max(times)}
    return out


def _facts(records: RunRecords, command: str) -> list[tuple[str, str]]:
    """Rows above the configuration: the folder, every start, the hosts, the command."""
    rows: list[tuple[str, str]] = [("folder", str(records.folder))]
    for i, start in enumerate(records.starts):
        text = str(start.get("time", "at an unknown time"))
        version, device = start.get("version"), start.get("device")
        text += f", wlb {version} on {device}" if version else ""
        if start.get("resumed_from"):
            text += f", from {start['resumed_from']}"
        rows.append(("started" if i == 0 else f"restart {i}", text))
    hosts = sorted({p.host for p in records.places})
    if hosts:
        more = f" and {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else ""
        rows.append(("hosts", ", ".join(hosts[:MOST_HOSTS]) + more))
    return [*rows, ("page", command)] if command else rows
