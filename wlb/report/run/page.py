"""`wlb report RUN`: one page of a run that needs nothing else, finished or still going."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from wlb.plan import TERMS, MeasuredTimeline, Moments, RankTable
from wlb.report.packing.page import STYLE
from wlb.report.plots import svg
from wlb.report.run.events import event_lines
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
from wlb.report.run.words import Totals, lead_lines, straggler_rows, straggler_words, tiles
from wlb.report.timeline import timeline_figure
from wlb.simulate import critical_path
from wlb.spec import to_toml

RUN_STYLE = (
    STYLE
    + """
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem }
.tiles div { background: var(--soft); padding: .6rem .8rem; border-radius: .4rem }
.tiles b { display: block; font-size: 1.3rem } .tiles span { font-size: 13px }
nav { margin-top: 1rem; font-size: 14px; line-height: 1.9 }
nav a { margin-right: .9rem; white-space: nowrap }
a { color: inherit } td.text { white-space: normal }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: 13px }
summary { cursor: pointer }
@media (max-width: 700px) {
  body { margin: 1rem auto } figure svg { max-width: none; width: 680px }
  .tiles { grid-template-columns: repeat(2, 1fr) }
}
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """parts: HTML."""

    name: str
    title: str
    parts: tuple[str, ...]


def run_page(records: RunRecords, *, step: int | None = None, command: str = "") -> str:
    """The page as text. step: whose passes are drawn, counted from 1 as the run's table does;
    default: the last step that was recorded."""
    totals = Totals.of(records)
    sections = [
        _loss(records),
        _rate(records, totals),
        _predicted(records, totals),
        _balance(records),
        _ranks(records),
        _timeline(records, step),
        _delays(records, totals),
        _stragglers(records),
        _events(records),
        _configuration(records, command),
    ]
    title = f"{records.spec.run.name}: training run"
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lead_lines(records, totals)),
        f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles(records, totals))}</div>',
        "<nav>",
        *(f'<a href="#{s.name}">{escape(s.title)}</a>' for s in sections),
        "</nav>",
    ]
    for section in sections:
        body += [f'<h2 id="{section.name}">{escape(section.title)}</h2>', *section.parts]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{RUN_STYLE}</style></head><body>"
    )
    return head + "\n".join(body) + "</body></html>\n"


def _loss(records: RunRecords) -> Section:
    text = (
        "Training loss of every step and its running mean by trained tokens; held-out loss is on "
        "files that are never trained. Below, the norm of the gradient before clipping."
    )
    if records.restarts:
        text += " Dotted: where the run went on after a break."
    return Section(
        name="loss", title="Loss", parts=(_drawn(svg(loss_figure(records), "loss"), text),)
    )


def _rate(records: RunRecords, totals: Totals) -> Section:
    text = (
        f"Real tokens, padding apart ({totals.padding_share:.2%} on top). The line is tokens over "
        f"time of a twentieth of the run."
    )
    return Section(
        name="rate",
        title="Tokens a second",
        parts=(_drawn(svg(rate_figure(records), "rate"), text),),
    )


def _predicted(records: RunRecords, totals: Totals) -> Section:
    if not totals.terms:
        parts = (_none("The run recorded no times (telemetry.enabled = false)."),)
    else:
        text = (
            "What ranks measured over what the kernel profile that plans are priced with says, "
            "for each of the terms that plans compare. Plans depend on how terms compare with "
            "each other, not on a common factor."
        )
        parts = (_terms(totals.terms), _drawn(svg(ratio_figure(records), "ratio"), text))
    return Section(name="predicted", title="Predicted and measured", parts=parts)


def _terms(terms: dict[str, Moments]) -> str:
    rows = [
        (
            name.replace("_", " "),
            f"{m.num_cells:,}",
            f"{m.predicted_s:.2f}",
            f"{m.measured_s:.2f}",
            "-" if m.ratio is None else f"{m.ratio:.3f}",
            "-" if m.mape is None else f"{m.mape:.0%}",
            "-" if m.correlation is None else f"{m.correlation:.3f}",
        )
        for name, m in ((name, terms[name]) for name in TERMS)
    ]
    heads = ("term", "cells", "predicted s", "measured s", "ratio", "MAPE", "correlation")
    return _table(heads, rows)


def _balance(records: RunRecords) -> Section:
    text = (
        "Slowest over mean micro-batch of a step (Section 7.4 of the paper); 1 is perfect. "
        "Plain-4D is what the usual loader would do with the same documents. Lines are weighted "
        "by the steps' work; triangles stand for steps above the axis, with their values."
    )
    figure = svg(balance_figure(records), "balance")
    return Section(
        name="balance", title="Imbalance: ours and Plain-4D", parts=(_drawn(figure, text),)
    )


def _ranks(records: RunRecords) -> Section:
    tables = records.tables
    parts: list[str] = []
    if not tables:
        parts.append(
            _none(
                "No table of ranks was recorded: telemetry.ranks_interval is 0, telemetry is off, "
                "or the run has not been past its warm-up for that many steps."
            )
        )
    else:
        parallel, steps = records.spec.parallel, sum(t.num_steps for t in tables)
        compute = np.sum([t.compute_us for t in tables], axis=0).astype(np.float64)
        mean_s = compute.mean() / steps * 1e-6
        figure = svg(ranks_figure(compute, parallel, what="computing time"), "ranks")
        text = (
            f"Time in passes over {steps} steps after the warm-up, {mean_s:.3f} s a step on the "
            f"mean rank. Pipeline ranks differ by what stages hold (embedding, output head), CP "
            f"ranks by sharding, pipelines by what was dealt to them."
        )
        over = svg(
            ranks_over_time_figure(tables, threshold=records.spec.telemetry.straggler_threshold),
            "over",
        )
        parts += [
            _drawn(figure, text),
            _drawn(
                over,
                "The same ranks over time, now by measured over predicted time and relative to the "
                "median rank: what is left when differences of work are taken out. A row that "
                "turns red is a slow rank.",
            ),
            _waits(tables[-1]),
        ]
    return Section(name="ranks", title="Ranks", parts=tuple(parts))


def _waits(table: RankTable) -> str:
    """The last table in one line."""
    steps = table.num_steps
    busiest, idlest = int(table.compute_us.argmax()), int(table.bubble_us.argmax())
    loading = float(table.loading_us.max()) / steps * 1e-3
    return (
        f"<p>In the last {steps} of them: rank {busiest} computed longest "
        f"({table.compute_us[busiest] / steps * 1e-6:.3f} s a step), rank {idlest} waited longest "
        f"({table.bubble_us[idlest] / steps * 1e-6:.3f} s a step), and no rank waited more than "
        f"{loading:.2f} ms a step for its inputs.</p>"
    )


def _timeline(records: RunRecords, step: int | None) -> Section:
    chosen = None if step is None else records.at(step)
    found = [t for t in records.timelines if chosen is None or t.step == chosen.step]
    parts = _measured_timeline(records, found[-1]) if found else None
    return Section(
        name="timeline",
        title="Timeline of a step",
        parts=parts or _simulated_timeline(records, step),
    )


def _measured_timeline(records: RunRecords, timeline: MeasuredTimeline) -> tuple[str, ...]:
    parallel = records.spec.parallel
    pipeline = slowest_pipeline(timeline, parallel)
    figure = svg(measured_timeline_figure(timeline, parallel, pipeline), "timeline")
    recorded = ", ".join(str(t.steps_done) for t in records.timelines[-8:])
    earlier = ".., " if len(records.timelines) > 8 else ""
    return (
        f"<p><strong>Measured</strong>: step {timeline.steps_done}, pipeline {pipeline}, TP rank "
        f"0.</p>",
        _drawn(
            figure,
            "A bar is a pass, forward light and backward dark, its number and colour the "
            "micro-batch; blank is idle, and so is its share at the right. Bars are wall time: "
            "they hold a rank's waits for its CP and TP group, and on a CPU for a core.",
        ),
        f"<p>Recorded: steps {earlier}{recorded} (wlb report --step N draws one of them, and "
        f"simulates any other).</p>",
    )


def _simulated_timeline(records: RunRecords, step: int | None) -> tuple[str, ...]:
    trained = [s for s in records.steps if s.measured.num_targets]
    if not trained:
        return (_none("No step trained anything yet."),)
    record = trained[-1] if step is None else records.at(step)
    try:
        simulation = simulate_step(records, record)
    except (ValueError, OSError) as error:
        return (
            _none(
                f"Step {record.steps_done} has no measured timeline (telemetry.timeline_interval), "
                f"and it cannot be simulated here: {error}"
            ),
        )
    pipeline = critical_path(simulation).main_pipeline
    title = f"step {record.steps_done}, pipeline {pipeline}, simulated"
    took = record.measured.step_time_s or 0.0
    return (
        f"<p><strong>Simulated, not measured</strong>: step {record.steps_done} from its plan and "
        f"the kernel profile, {simulation.step_time_s[0]:.3f} s; it took {took:.3f} s.</p>",
        _drawn(
            svg(timeline_figure(simulation, 0, pipeline, title=title), "timeline"),
            "A bar is a pass, forward light and backward dark, its number and colour the "
            "micro-batch; blank is idle. Outlined: what the step's time is made of.",
        ),
    )


def _delays(records: RunRecords, totals: Totals) -> Section:
    text = (
        f"How many steps later a token is trained than its global batch came: "
        f"{totals.mean_delay:.2f} on average, {totals.max_delay} at most. Below, tokens that wait "
        f"in the queues after each step; they are in the checkpoint."
    )
    return Section(
        name="delays", title="Delays", parts=(_drawn(svg(delay_figure(records), "delays"), text),)
    )


def _stragglers(records: RunRecords) -> Section:
    parts = [f"<p>{escape(straggler_words(records))}</p>"]
    rows = straggler_rows(records)
    if rows:
        heads = ("rank", "host", "node", "tp", "cp", "pp", "dp", "worst", "from step", "to step")
        parts.append(_table(heads, rows))
    return Section(name="stragglers", title="Stragglers", parts=tuple(parts))


def _events(records: RunRecords) -> Section:
    lines = tuple(f"<p>{escape(line)}</p>" for line in event_lines(records.events))
    return Section(name="events", title="Checkpoints and events", parts=lines)


def _configuration(records: RunRecords, command: str) -> Section:
    rows: list[tuple[str, str]] = [("folder", str(records.folder))]
    for i, start in enumerate(records.starts):
        words = str(start.get("time", "at an unknown time"))
        version, device = start.get("version"), start.get("device")
        words += f", wlb {version} on {device}" if version else ""
        if start.get("resumed_from"):
            words += f", from {start['resumed_from']}"
        rows.append(("started" if i == 0 else f"restart {i}", words))
    hosts = sorted({p.host for p in records.places})
    if hosts:
        more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
        rows.append(("hosts", ", ".join(hosts[:8]) + more))
    rows += [("page", command)] if command else []
    toml = to_toml(
        records.spec, comments=("What wlb train ran; most keys at their defaults are left out.",)
    )
    return Section(
        name="configuration",
        title="Configuration",
        parts=(
            '<div class="scroll"><table><tbody>',
            *(
                f'<tr><td>{escape(k)}</td><td class="text" style="text-align:left">'
                f"<code>{escape(v)}</code></td></tr>"
                for k, v in rows
            ),
            "</tbody></table></div>",
            f"<details open><summary>as TOML</summary><pre>{escape(toml)}</pre></details>",
        ),
    )


def _tile(name: str, value: str, note: str) -> str:
    return f"<div>{escape(name)}<b>{escape(value)}</b><span>{escape(note)}</span></div>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>"
    )


def _none(text: str) -> str:
    return f"<p><em>{escape(text)}</em></p>"


def _drawn(figure: str, caption: str) -> str:
    return f"<figure>{figure}<figcaption>{escape(caption)}</figcaption></figure>"
