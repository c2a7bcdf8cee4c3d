"""`wlb tune layout --html`: the best layouts, where their time goes, and why the others lost."""

from collections.abc import Sequence

from wlb.cost import gpu_budget
from wlb.report.layout.plots import account_figure, memory_figure
from wlb.report.layout.tables import (
    COLUMNS,
    LayoutReport,
    cells_of,
    effort_line,
    labelled_trials,
    lines_of,
    loser_lines,
    refusal_lines,
)
from wlb.report.render import render


def layout_page(
    report: LayoutReport,
    *,
    title: str,
    toml: str,
    facts: Sequence[str],
    provenance: Sequence[tuple[str, str]],
) -> str:
    """The page as HTML. toml: the winner's settings. provenance: names and values such as the
    command."""
    own_note = [report.own_note] if report.own_note else []
    return render(
        "layout",
        title=title,
        facts=[*facts, f"{effort_line(report)}.", *own_note],
        head=COLUMNS,
        rows=[
            {
                "label": label,
                "lines": lines_of(trial),
                "cells": cells_of(trial, report.own),
                "is_winner": trial is report.winner,
            }
            for label, trial in labelled_trials(report)
        ],
        figures={"account": account_figure(report), "memory": memory_figure(report)},
        losers=loser_lines(report),
        refusals=refusal_lines(report),
        toml=toml,
        budget=gpu_budget(report.winner.spec).explanation,
        provenance=provenance,
    )
