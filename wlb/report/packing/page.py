"""`wlb plan --html`: one page that needs nothing else: tables, figures, what they mean."""

from collections.abc import Sequence
from html import escape

from wlb.packing.study.measure import PackingRun, PackingSummary
from wlb.plan import IntArray
from wlb.report.packing.plots import delay_figure, imbalance_figure, length_figure, trade_figure
from wlb.report.packing.source import SourceFacts
from wlb.report.packing.tables import COLUMNS, remarks

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --soft: #f3f3f1; --line: #d8d8d4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e3; --paper: #1c1c1b; --soft: #2a2a29; --line: #444 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; width: 100% }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap }
th:first-child, td:first-child { text-align: left } tr.own { font-weight: 600 }
thead th { background: var(--soft); position: sticky; top: 0 }
figure { margin: 1rem 0; overflow-x: auto }
figcaption { max-width: 46rem }
figure svg { max-width: 100%; height: auto } dt { font-weight: 600; margin-top: .5rem }
dd { margin: 0 0 0 1rem } code { background: var(--soft); padding: .1rem .3rem }
"""

WORDS = (
    ("imbalance", "slowest micro-batch x number of micro-batches / total predicted forward latency "
     "(Section 7.4 of the paper), mean over steps; p95: the step that 5% are worse than"),
    ("time-w.", "sum of the slowest / sum of the means: what the run waits for in all. It is the "
     "fairer number, since slow steps count for as long as they take"),
    ("F+B", "the same of forward and backward together, which is what packing balances and a step "
     "takes"),
    ("attention", "the same of attention alone (Section 3.3)"),
    ("bound", "what no packing of the same documents into the same steps could go below"),
    ("delay, p99, max", "iterations a token waits after its global batch came: mean, 99th "
     "percentile, maximum; the paper reports 0.5 on average. Tokens flushed at the end count"),
    ("late", "pieces that were trained later than the policy's maximum delay"),
    ("tok. CV", "standard deviation / mean of tokens per step"),
    ("long wt", "what a label of the longest documents (which hold a tenth of the labels) counts "
     "in the loss if every step's is the mean of its labels; 1: as if all labels counted the same, "
     "which training.loss_normalizer = constant makes them do"),
    ("longest step, longest mb", "most tokens of a step and of a micro-batch: what memory must "
     "hold"),
    ("held, flushed", "tokens that wait after a step on average, and that were left when the data "
     "ended: holding documents back must not look like a gain"),
    ("cut docs", "documents trained in more than one piece"),
    ("ms", "time to pack a global batch, one core"),
)  # fmt: skip


def packing_page(
    *,
    title: str,
    facts: SourceFacts,
    lengths: IntArray,
    runs: Sequence[PackingRun],
    own: str,
    provenance: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
) -> str:
    """The page as text. own: label of the run's own policy. provenance: what it was made with."""
    summaries = [run.summary for run in runs]
    lines = [*facts.lines, *_lead(summaries), *notes, *remarks(summaries)]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        "<h2>Policies on the same documents</h2>",
        _table(summaries, own),
        *_figures(runs, own, lengths, facts.window),
        "<h2>What the columns mean</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in WORDS),
        "</dl><h2>Made with</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd><code>{escape(v)}</code></dd>" for name, v in provenance),
        "</dl>",
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def _lead(summaries: Sequence[PackingSummary]) -> list[str]:
    """Which policy balances best, of those that made a step at all."""
    stepped = [s for s in summaries if s.num_steps]
    if not stepped:
        return []
    best = min(stepped, key=lambda s: s.step_time_weighted)
    return [
        f"{best.label} balances best here: a step waits {best.step_time_weighted - 1:.1%} longer "
        f"than its mean micro-batch takes, at a mean delay of {best.mean_delay:.2f} iterations."
    ]


def _figures(
    runs: Sequence[PackingRun], own: str, lengths: IntArray, window: int
) -> tuple[str, ...]:
    """Headings and figures, each with a word on how to read it."""
    return (
        "<h2>What balance costs in delay</h2>",
        _figure(
            trade_figure([run.summary for run in runs], own=own),
            "Imbalance of forward and backward together, time-weighted. Down and left is better: "
            "less waiting for the slowest micro-batch, and documents closer to the loader's order. "
            "The large mark is this run's policy.",
        ),
        "<h2>Imbalance of the steps</h2>",
        _figure(
            imbalance_figure(runs, own=own),
            "Steps from the worst to the best: at 10% stands the imbalance that a tenth of the "
            "steps exceed. Shown are this run's policy (thick) and the best balanced of the others "
            "of each kind.",
        ),
        "<h2>Delay of tokens</h2>",
        _figure(
            delay_figure(runs, own=own),
            "Share of all tokens that are trained more than so many iterations after they came, "
            "what was flushed at the end included.",
        ),
        "<h2>Document lengths (the paper's Figure 3)</h2>",
        _figure(
            length_figure(lengths, window=window),
            "Left: how many documents there are of each length, both axes logarithmic. Right: the "
            "share of all tokens in documents up to a length. Long documents are few and make the "
            "imbalance, since attention is quadratic in the length.",
        ),
    )


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(summaries: Sequence[PackingSummary], own: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _, _ in COLUMNS)
    rows: list[str] = []
    for summary in summaries:
        cells = "".join(f"<td>{escape(cell(summary))}</td>" for _, cell, _ in COLUMNS)
        mark = ' class="own"' if summary.label == own else ""
        rows.append(f"<tr{mark}><td>{escape(summary.label)}</td>{cells}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th>policy</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
