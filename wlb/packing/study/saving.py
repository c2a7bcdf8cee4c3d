"""Recommends the policy that saves most time over the usual loader.

Policies are compared by their time-weighted imbalance over both passes
(`PackingSummary.step_time_weighted`). If every micro-batch took as long as the slowest one of its
step, a policy's time for the same work would be proportional to this imbalance. Real steps lose
less, because the micro-batches of a pipeline overlap. Real runs also have a flush, which is left
out here. `wlb.simulate.forecast.simulated_shares` simulates whole runs.
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
"""Names of two rows of the comparison. The first is the usual loader, which cuts documents
anywhere, as Megatron and torchtitan do. The second is the paper's loader, which cuts only short
documents and therefore makes less balanced steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The policy that a comparison recommends, and what it saves."""

    best: PackingSummary  # result of the fastest policy whose mean delay is permitted
    usual: PackingSummary  # result of the usual loader

    @property
    def gain(self) -> BalanceGain:
        """Imbalance of the usual loader and of the best policy, from which the saving follows."""
        return gain_over(self.usual, self.best)

    def to_json(self) -> dict[str, Any]:
        """Return the recommended policy, the usual loader and the share of time saved, as JSON."""
        return {
            "best": self.best.label,
            "usual": self.usual.label,
            "share": self.gain.saved,
            "figure": "step_time_weighted",
        }


def saving_of(rows: Sequence[PackingSummary], *, mean_delay: float = MEAN_DELAY) -> Saving | None:
    """Return the policy that saves most time over the usual loader.

    Args:
        rows: Results of the compared policies, including the usual loader.
        mean_delay: Largest mean delay that the recommended policy may have, in steps.

    Returns:
        The recommendation, or None if there is no result of a usual loader that made steps.
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
    """Return the time-weighted imbalance of the usual loader and of a policy, from their results.

    The time that the policy saves follows from the two (`BalanceGain.saved`).
    """
    return BalanceGain(usual.step_time_weighted, ours.step_time_weighted)


def gain_of(spec: RunSpec, batches: Sequence[GlobalBatch], cost: WorkloadModel) -> BalanceGain:
    """Return the imbalance with the usual loader and with the run's packing.

    The steps of the flush are left out of both.
    """
    return gain_over(*usual_and_own(spec, batches, cost))


def usual_and_own(
    spec: RunSpec, batches: Sequence[GlobalBatch], cost: WorkloadModel
) -> tuple[PackingSummary, PackingSummary]:
    """Return the results of the usual loader and of the run's packing on the same documents."""
    usual, own = (
        measure(made(spec, cost), batches, cost=cost).summary for made in (baseline_for, packer_for)
    )
    return usual, own


def loader_of(row: PackingSummary) -> str:
    """Return a policy's name without " (run)", which marks the policy that the run is set to."""
    return row.label.removesuffix(" (run)")
