"""The price by which strategies choose: predicted time of a micro-batch's attention, kept in the
plan.

Section 5.3: segments (q = span tokens, kv = span end) of every rank are priced, forward and
backward. Collectives and linear layers do not enter, because every strategy gives all ranks the
same number of rows. Cost: one pricing call over the spans of all candidates.
"""

from collections.abc import Sequence
from dataclasses import replace

from wlb.cost import WorkloadModel, kernels_ns
from wlb.plan import ShardingPlan


def cheapest(
    plans: Sequence[ShardingPlan], cost: WorkloadModel, *, strategy: str = ""
) -> ShardingPlan:
    """The plan whose slowest rank is predicted to finish first, with its price; ties: the first.

    strategy: the name that the plan takes; "" leaves its own.
    """
    forward, backward = kernels_ns(plans, cost, cp=plans[0].cp)
    best = int((forward.max(1) + backward.max(1)).argmin())
    plan = plans[best]
    return replace(
        plan,
        strategy=strategy or plan.strategy,
        forward_ns=forward[best],
        backward_ns=backward[best],
    )
