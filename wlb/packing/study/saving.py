"""Which policy a comparison recommends over the usual loader, by one figure.

If every micro-batch of a step took as long as its slowest one, forward and backward, a policy's
time for the same work would be its time-weighted imbalance of both passes
(`PackingSummary.step_time_weighted`). Real steps wait less, since micro-batches of a pipeline
follow each other, and a flush counts: `wlb.simulate.forecast.simulated_shares` simulates them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wlb.cost import WorkloadModel
from wlb.packing.policies import baseline_for, packer_for
from wlb.packing.study.measure import PackingSummary, measure
from wlb.plan import GlobalBatch
from wlb.plan.tally import BalanceGain
from wlb.spec import RunSpec

MEAN_DELAY = 1.0
"""Most steps that a token may wait on average under the policy that is chosen."""
ANYWHERE, SHORT = "original", "original, long whole"
"""Labels of the loaders' rows: the one that cuts documents anywhere, as Megatron's and torchtitan's
do, is the usual one; the paper's cuts short documents only, and its steps are less balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a comparison recommends."""

    best: PackingSummary  # the row with the least time within the delay
    usual: PackingSummary  # the usual loader's

    @property
    def gain(self) -> BalanceGain:
        """Of the best policy over the usual loader."""
        return gain_over(self.usual, self.best)

    def to_json(self) -> dict[str, Any]:
        """Labels and figures, for `json.dumps`."""
        return {
            "best": self.best.label,
            "usual": self.usual.label,
            "share": self.gain.saved,
            "figure": "step_time_weighted",
        }


def saving_of(rows: Sequence[PackingSummary], *, mean_delay: float = MEAN_DELAY) -> Saving | None:
    """The saving among `rows`; None without a row of a loader that made steps."""
    stepped = [row for row in rows if row.num_steps]
    anywhere, short = (
        next((row for row in stepped if loader_of(row) == label), None)
        for label in (ANYWHERE, SHORT)
    )
    usual = anywhere or short
    if usual is None:
        return None
    prompt = [row for row in stepped if row.mean_delay <= mean_delay] or [usual]
    best = min(prompt, key=lambda row: row.step_time_weighted)
    return Saving(best=best, usual=usual)


def gain_over(usual: PackingSummary, ours: PackingSummary) -> BalanceGain:
    """What a policy's row gains over the usual loader's."""
    return BalanceGain(usual.step_time_weighted, ours.step_time_weighted)


def gain_of(spec: RunSpec, batches: Sequence[GlobalBatch], cost: WorkloadModel) -> BalanceGain:
    """What the run's own packing gains over the usual loader on these documents, without the flush
    at their end.
    """
    rows = [
        measure(made(spec, cost), batches, cost=cost).summary for made in (baseline_for, packer_for)
    ]
    return gain_over(*rows)


def loader_of(row: PackingSummary) -> str:
    """The label of a row without the mark of the run's own policy."""
    return row.label.removesuffix(" (run)")
