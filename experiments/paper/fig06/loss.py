"""Reads the losses of Figure 6 from the results of the convergence study (`fig16`).

The study trains with the loader's order, with fixed-length packing over 1 and 8 global batches,
with Algorithm 1 and with `bounded`. Its model is much smaller than the model whose balance Figure 6
shows. Nothing is trained here.
"""

import csv
from pathlib import Path
from typing import NamedTuple

from experiments.paper.fig16.arms import BASELINE, arm_of

RESULTS = Path(__file__).parents[1] / "fig16" / "results" / "quality.csv"
ARMS = {"fixed-1": 1, "fixed-8": 8, "var_len": None, "bounded": None}
"""Arms of the study that are read, with their packing windows in global batches."""


class Loss(NamedTuple):
    """Held-out loss of an arm of the study, compared with the loader's order."""

    name: str
    window: int | None  # packing window in global batches; None for packings without one
    relative: float  # held-out loss over the loss with the loader's order, minus 1
    half: float  # half width of the 95% interval of `relative`; NaN for one seed
    verdict: str  # "noise", "worse", "better" or "one seed"


def read_losses(path: Path = RESULTS) -> list[Loss]:
    """Returns the losses of the trained arms; the list is empty if the study has no results."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    if arm_of(BASELINE).title not in rows:
        raise ValueError(f"{path} has no row {arm_of(BASELINE).title!r}; make it again")
    original = float(rows[arm_of(BASELINE).title]["loss"])
    out: list[Loss] = []
    for name, window in ARMS.items():
        row = rows.get(arm_of(name).title)
        if row is not None:
            half = float(row["±, end"] or "nan") / original
            out.append(
                Loss(arm_of(name).title, window, float(row["relative"]), half, row["difference"])
            )
    return out
