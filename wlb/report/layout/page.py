"""`wlb tune layout --html`: the best layouts, where their time goes, and why the others lost."""

from collections.abc import Sequence
from html import escape
from typing import Any

from wlb.report.layout.tables import (
    COLUMNS,
    LayoutReport,
    cells_of,
    effort_line,
    lines_of,
    loser_lines,
    refusal_lines,
)
from wlb.report.packing.page import STYLE
from wlb.report.plots import COLOURS, new_figure, svg
from wlb.simulate.layout_search.account import (
    BUBBLE,
    CP_RANKS,
    MICRO_BATCHES,
    RECOMPUTE,
    TermSeconds,
)
from wlb.simulate.layout_search.layouts import degrees_of
from wlb.simulate.layout_search.trial import Trial
from wlb.simulate.layout_search.why import COMPARED
from wlb.spec import PLANNED_MEMORY, Recompute

GIB = 2**30
GROUPS = (
    ("attention", ("attention",), "#0072B2"),
    ("matrix products, element-wise", ("gemm", "elementwise", "embedding", "head"), "#56B4E9"),
    ("TP communication", ("tp_comm",), "#E69F00"),
    ("CP communication", ("cp_comm",), "#D55E00"),
    ("recompute", (RECOMPUTE,), "#CC79A7"),
    ("bubble", (BUBBLE,), "#999999"),
    ("imbalance", (MICRO_BATCHES, CP_RANKS), "#000000"),
)
"""Terms that are drawn together; what is in none is drawn as `REST`."""
REST = ("launches, gradients, optimiser", "#009E73")
MOST_BARS = 8
WORDS = (
    ("s/step, ktok/s", "seconds a global batch and tokens a second: all simulated steps of the "
     "same documents, the flush of what was held back included"),
    ("gain", "time of the run's own settings / this, where they fit the devices"),
    ("MFU", "FLOPs of the model on the documents (not on windows) over what the devices could do"),
    ("GiB", "most that a rank needs, by the memory estimate; the search plans with 95% of "
     "cluster.memory_gib"),
    ("delay", "steps that a token waits: mean / most"),
    ("bubble", "share of the time that pipeline ranks are not in a pass, mean of all"),
    ("bound", "time with every micro-batch and CP rank at its step's mean / this: what is left to "
     "gain by packing and sharding"),
)  # fmt: skip


def layout_page(
    report: LayoutReport,
    *,
    title: str,
    toml: str,
    facts: Sequence[str],
    provenance: Sequence[tuple[str, str]],
) -> str:
    """The page as text. toml: the winner's settings. provenance: what the page was made with."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (*facts, *_lead(report))),
        "<h2>The best layouts</h2>",
        _table(report),
        "<h2>Where a step's time goes</h2>",
        _drawn(
            account_figure(report),
            "Work of the mean pipeline rank, then what it waits: for the pipeline, for collectives "
            "over the data-parallel axis that nothing hides, for unequal micro-batches and CP "
            "ranks. Terms add up to a step. Degrees are tp x cp x pp x dp; below the best ones are "
            "the run's own settings and the best of other degrees.",
        ),
        "<h2>Time and memory of all layouts that were packed</h2>",
        _drawn(
            memory_figure(report),
            "Each mark is a layout with one packing setting and even CP ranks, before its settings "
            "were tuned. The line is what the search plans with.",
        ),
        f"<h2>Why the others lost</h2><ul>{_items(loser_lines(report))}</ul>",
        f"<h2>What was left out</h2><ul>{_items(refusal_lines(report))}</ul>",
        f"<h2>The winner's settings</h2><pre>{escape(toml)}</pre>",
        "<h2>What the columns mean</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in WORDS),
        "</dl><h2>Made with</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd><code>{escape(v)}</code></dd>" for name, v in provenance),
        "</dl>",
    ]
    style = STYLE + "td.text { white-space: pre-line; text-align: left }\n"
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def account_figure(report: LayoutReport) -> str:
    """Bars of the best layouts, the run's own settings, and the best of each other tp, cp, pp."""
    bars = _bars(report)
    figure, (axes,) = new_figure(ncols=1, height=1.2 + 0.42 * len(bars), width=10.0)
    names = [label for label, _ in bars]
    left = [0.0] * len(bars)
    for name, _, colour in (*GROUPS, (REST[0], (), REST[1])):
        widths = [max(0.0, _grouped(trial.terms)[name]) for _, trial in bars]
        axes.barh(names, widths, left=left, color=colour, label=name, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set(xlabel="seconds a global batch")
    axes.grid(visible=False, axis="y")
    figure.legend(frameon=False, loc="outside upper center", ncols=4, fontsize=8)
    return svg(figure, "account")


def memory_figure(report: LayoutReport) -> str:
    """Step time against memory, by degree of TP."""
    figure, (axes,) = new_figure(ncols=1, height=4.2)
    trials = list(report.search.packed.values())
    for i, tp in enumerate(sorted({t.spec.parallel.tp for t in trials})):
        mine = [t for t in trials if t.spec.parallel.tp == tp]
        axes.scatter(
            [t.peak_memory_bytes / GIB for t in mine],
            [t.time_s for t in mine],
            s=26,
            color=COLOURS[i % len(COLOURS)],
            marker="osD^vPX"[i % 7],
            alpha=0.8,
            label=f"tp {tp}",
        )
    winner = report.winner
    at = (winner.peak_memory_bytes / GIB, winner.time_s)
    axes.plot(*at, "*", ms=15, color="#000000", label=f"winner, tuned: {degrees_of(winner.spec)}")
    limit = winner.spec.cluster.memory_gib * PLANNED_MEMORY
    axes.axvline(limit, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="fullest rank (GiB)", ylabel="seconds a global batch")
    figure.legend(frameon=False, loc="outside upper center", ncols=6, fontsize=8)
    return svg(figure, "memory")


def _bars(report: LayoutReport) -> list[tuple[str, Trial]]:
    out = [(f"{i + 1}: {_short(t)}", t) for i, t in enumerate(report.best[:MOST_BARS])]
    if report.own is not None:
        out.append((f"own: {_short(report.own)}", report.own))
    others: dict[str, tuple[list[str], Trial]] = {}
    for loser in report.losers:
        if loser.trial is not None and loser.label.split()[0] in COMPARED:
            labels, _ = others.setdefault(loser.trial.name, ([], loser.trial))
            labels.append(loser.label)
    shown = {trial.layout for _, trial in out}
    for labels, trial in others.values():
        if trial.layout not in shown:
            out.append((f"{', '.join(labels)}: {_short(trial)}", trial))
    return out


def _short(trial: Trial) -> str:
    p, v = trial.spec.parallel, trial.spec.pp.virtual_stages
    schedule = {"1f1b": "1f1b", "interleaved_1f1b": "int.", "interleaved_zero_bubble": "zero-b."}
    name = schedule[str(trial.spec.pp.schedule)]
    pipeline = f" {name} v {v}" if p.pp > 1 else ""
    recompute = trial.spec.training.recompute
    again = "" if recompute == Recompute.NONE else f" recompute {recompute}"
    return f"{p.tp} x {p.cp} x {p.pp} x {p.dp}{pipeline}{again}"


def _grouped(terms: TermSeconds) -> dict[str, float]:
    out = {name: sum(terms.get(t, 0.0) for t in members) for name, members, _ in GROUPS}
    out[REST[0]] = sum(terms.values()) - sum(out.values())
    return out


def _lead(report: LayoutReport) -> list[str]:
    lines = [effort_line(report) + "."]
    return [*lines, report.own_note] if report.own_note else lines


def _table(report: LayoutReport) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", "layout", *COLUMNS))
    rows: list[str] = []
    labelled = [(str(i + 1), trial) for i, trial in enumerate(report.best)]
    labelled += [("own", report.own)] if report.own is not None else []
    for label, trial in labelled:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells_of(trial, report.own))
        mark = ' class="own"' if trial is report.winner else ""
        text = escape("\n".join(lines_of(trial)))
        rows.append(f'<tr{mark}><td>{label}</td><td class="text">{text}</td>{cells}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _drawn(svg: Any, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
