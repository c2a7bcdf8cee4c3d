"""`wlb tune packing --html`: the front of packing settings, and the recommended ones."""

from collections.abc import Sequence

from wlb.packing.study.tune import Tuning
from wlb.report.packing.plots import tuning_figure
from wlb.report.packing.tables import SourceFacts, tuning_rows
from wlb.report.plots import svg
from wlb.report.render import render


def tuning_page(
    tuning: Tuning,
    *,
    title: str,
    facts: SourceFacts,
    command: str,
    toml: str,
    provenance: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
) -> str:
    """The page as HTML. command: starts a run with the recommended settings, as `toml` holds
    them."""
    head, rows = tuning_rows(tuning, rows=len(tuning.front))
    return render(
        "tuning",
        title=title,
        facts=facts.lines,
        tuning=tuning,
        notes=notes,
        command=command,
        toml=toml,
        head=["setting", *head],
        rows=[[point.summary.label, *cells] for point, cells in rows],
        own=[point for point, _ in rows].index(tuning.recommended),
        figures={"front": svg(tuning_figure(tuning), "front")},
        provenance=provenance,
    )
