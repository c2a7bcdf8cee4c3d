"""Reads Figure 6's losses from the convergence study's results.

The study trains fixed-length packing over 1 and 8 global batches, Algorithm 1 and `bounded` beside
the loader's own order (`experiments/paper/fig16`); nothing is trained here. Its model is another,
much smaller one than the model whose balance Figure 6 shows.
"""

import csv
from pathlib import Path
from typing import NamedTuple

from experiments.paper.fig16.arms import BASELINE, arm_of

RESULTS = Path(__file__).parents[1] / "fig16" / "results" / "quality.csv"
ARMS = {"fixed-1": 1, "fixed-8": 8, "var_len": None, "bounded": None}
"""Each arm of the study has this packing window."""


class Loss(NamedTuple):
    """Holds an arm's held-out loss beside that of the loader's order.

    window: packing window in global batches, None for packing without one
    relative: held-out loss over the loader's, minus 1
    half: half of the 95% interval of `relative`, NaN for one seed
    verdict: "noise", "worse", "better" or "one seed"
    """

    name: str
    window: int | None
    relative: float
    half: float
    verdict: str


def read_losses(path: Path = RESULTS) -> list[Loss]:
    """Returns the losses of the arms that were trained, none if the study has no results yet."""
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
