"""`wlb plan --html`: packing policies on the same documents, as tables and figures."""

from collections.abc import Sequence

from wlb.packing.study.measure import PackingRun
from wlb.plan import IntArray
from wlb.report.packing.plots import delay_figure, imbalance_figure, length_figure, trade_figure
from wlb.report.packing.tables import COLUMNS, SourceFacts, remarks
from wlb.report.render import render


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
    """The page as HTML. own: label of the run's own policy. provenance: names and values shown
    below the tables, such as the command."""
    summaries = [run.summary for run in runs]
    labels = [s.label for s in summaries]
    # A policy that made no step before the data ended has no balance.
    stepped = [s for s in summaries if s.num_steps]
    return render(
        "packing",
        title=title,
        facts=facts.lines,
        best=min(stepped, key=lambda s: s.step_time_weighted, default=None),
        notes=[*notes, *remarks(runs)],
        head=["policy", *(name for name, _ in COLUMNS)],
        rows=[[s.label, *(cell(s) for _, cell in COLUMNS)] for s in summaries],
        own=labels.index(own) if own in labels else None,
        figures={
            "trade": trade_figure(summaries, own=own),
            "imbalance": imbalance_figure(runs, own=own),
            "delay": delay_figure(runs, own=own),
            "lengths": length_figure(lengths, window=facts.window),
        },
        provenance=provenance,
    )
