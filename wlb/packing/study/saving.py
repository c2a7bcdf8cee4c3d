"""Which policy a comparison recommends over the usual loader, by one figure.

If every micro-batch of a step took as long as its slowest one, forward and backward, a policy's
time for the same work would be its time-weighted imbalance of both passes
(`PackingSummary.step_time_weighted`). Real steps wait less, since micro-batches of a pipeline
follow each other, and a flush counts: `wlb.simulate.forecast.simulated_share` simulates them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wlb.packing.study.measure import PackingSummary

MEAN_DELAY = 1.0
"""Most steps that a token may wait on average under the policy that is chosen."""
USUAL = ("original, long whole", "original")
"""Labels of the usual loader's rows, the paper's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """best: the row with the least time within the delay; usual: the usual loader's."""

    best: PackingSummary
    usual: PackingSummary

    @property
    def share(self) -> float:
        """Share of the usual loader's time that the best policy saves by its slowest micro-batches;
        below 0 if it is slower."""
        return 1 - self.best.step_time_weighted / self.usual.step_time_weighted

    def to_json(self) -> dict[str, Any]:
        """Labels and figures, for `json.dumps`."""
        return {
            "best": self.best.label,
            "usual": self.usual.label,
            "share": self.share,
            "figure": "step_time_weighted",
        }


def saving_of(rows: Sequence[PackingSummary], *, mean_delay: float = MEAN_DELAY) -> Saving | None:
    """The saving among `rows`; None without a row of the usual loader that made steps."""
    stepped = [row for row in rows if row.num_steps]
    usual = next((row for label in USUAL for row in stepped if _is(row, label)), None)
    if usual is None:
        return None
    prompt = [row for row in stepped if row.mean_delay <= mean_delay] or [usual]
    return Saving(best=min(prompt, key=lambda row: row.step_time_weighted), usual=usual)


def _is(row: PackingSummary, label: str) -> bool:
    return row.label.removesuffix(" (run)") == label
