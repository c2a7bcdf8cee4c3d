"""Recommends the policy that saves most time over the usual loader.

The figure is the time-weighted imbalance of both passes (`PackingSummary.step_time_weighted`). A
policy's time for the same work would be proportional to it if every micro-batch took as long as the
slowest one of its step. Real steps lose less, because the micro-batches of a pipeline overlap, and
they include the flush. `wlb.simulate.forecast.simulated_shares` simulates them.
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
"""Largest mean delay of a token, in steps, that the recommended policy may have."""
ANYWHERE, SHORT = "original", "original, long whole"
"""Labels of two rows. The first is the usual loader, which cuts documents anywhere, as Megatron and
torchtitan do. The second is the paper's loader, which cuts only short documents and is balanced
worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The policy that a comparison recommends, and what it saves."""

    best: PackingSummary  # the row with the least time among those whose delay is permitted
    usual: PackingSummary  # the row of the usual loader

    @property
    def gain(self) -> BalanceGain:
        """What the best policy gains over the usual loader."""
        return gain_over(self.usual, self.best)

    def to_json(self) -> dict[str, Any]:
        """Return labels and figures, for `json.dumps`."""
        return {
            "best": self.best.label,
            "usual": self.usual.label,
            "share": self.gain.saved,
            "figure": "step_time_weighted",
        }


def saving_of(rows: Sequence[PackingSummary], *, mean_delay: float = MEAN_DELAY) -> Saving | None:
    """Return the recommendation among the rows of a comparison.

    Args:
        rows: The rows of a comparison.
        mean_delay: Largest mean delay that the recommended policy may have, in steps.

    Returns:
        None if no row of a loader made steps.
    """
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
    """Return what the row of a policy gains over the row of the usual loader."""
    return BalanceGain(usual.step_time_weighted, ours.step_time_weighted)


def gain_of(spec: RunSpec, batches: Sequence[GlobalBatch], cost: WorkloadModel) -> BalanceGain:
    """Return what the run's packing gains over the usual loader on these batches.

    The flush at the end of the batches does not count.
    """
    rows = [
        measure(made(spec, cost), batches, cost=cost).summary for made in (baseline_for, packer_for)
    ]
    return gain_over(*rows)


def loader_of(row: PackingSummary) -> str:
    """Return a row's label without the mark of the run's configured policy."""
    return row.label.removesuffix(" (run)")
