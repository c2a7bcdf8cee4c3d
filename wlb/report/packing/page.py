"""The HTML page of `wlb plan --html`: packing policies compared on the same documents."""

from collections.abc import Sequence

from wlb.packing.study.measure import PackingRun
from wlb.packing.study.saving import Saving
from wlb.plan import IntArray
from wlb.report.packing.plots import delay_figure, imbalance_figure, length_figure, trade_figure
from wlb.report.packing.tables import (
    COLUMNS,
    FEW_CAPTION,
    FEW_COLUMNS,
    SourceFacts,
    few_rows,
    remarks,
)
from wlb.report.render import render


def packing_page(
    *,
    title: str,
    facts: SourceFacts,
    lengths: IntArray,
    runs: Sequence[PackingRun],
    own: str,
    answer: Sequence[str],
    saving: Saving | None,
    hours: float | None,
    assumes: tuple[str, str],
    provenance: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
) -> str:
    """Return the HTML page of a comparison of packing policies.

    Args:
        title: Title of the page.
        facts: Statistics of the documents.
        lengths: Length of each document in tokens.
        runs: Results of all policies.
        own: Label of the run's present policy.
        answer: Sentences on what balanced packing saves and what to do.
        saving: Results of the best policy and of the usual loader; None if the usual loader
            completes no step.
        hours: Fraction of the usual loader's GPU hours that the best policy saves in simulated
            steps; None without a simulation.
        assumes: A sentence in two parts that says what the numbers are based on: the name of the
            kernel profile, then the model with its number of GPUs.
        provenance: Names and values for the end of the page, such as the command.
        notes: Remarks for a section that is collapsed at first.
    """
    summaries = [run.summary for run in runs]
    labels = [s.label for s in summaries]
    half = (len(COLUMNS) + 1) // 2
    best = saving.best.label if saving else None
    return render(
        "packing",
        title=title,
        facts=facts.lines,
        answer=answer,
        saving=saving,
        hours=hours,
        assumes=assumes,
        few={
            "head": ["policy", *FEW_COLUMNS],
            "rows": few_rows(summaries, saving),
            "best": labels.index(best) if best in labels else None,
            "caption": FEW_CAPTION,
        },
        notes=[*notes, *remarks(runs)],
        tables=[
            {
                "head": ["policy", *(name for name, _ in columns)],
                "rows": [[s.label, *(cell(s) for _, cell in columns)] for s in summaries],
            }
            for columns in (COLUMNS[:half], COLUMNS[half:])
        ],
        own=labels.index(own) if own in labels else None,
        figures={
            "trade": trade_figure(summaries, own=own),
            "imbalance": imbalance_figure(runs, own=own),
            "delay": delay_figure(runs, own=own),
            "lengths": length_figure(lengths, window=facts.window),
        },
        provenance=provenance,
    )
