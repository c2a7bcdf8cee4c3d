"""`wlb plan --html`: packing policies on the same documents, as tables and figures."""

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
    """Return the page as HTML.

    Args:
        title: Title of the page.
        facts: Facts about the documents.
        lengths: Lengths of the documents, in tokens.
        runs: One packing run for each policy.
        own: Label of the policy that the run has now.
        answer: Sentences on what balance saves and what to do, the verdict first.
        saving: The best policy and the usual loader; None if the latter made no step.
        hours: Share of GPU hours that the best policy saves in whole simulated steps; None if
            unknown.
        assumes: Whose prices, and for which model and number of GPUs.
        provenance: Names and values that are listed last, such as the command.
        notes: Remarks in a section that is folded at first.
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
