"""adaptive: the static strategy whose slowest rank is predicted to finish first (Section 5.3).

Ties go to per_sequence. Cost: that of both strategies, and of pricing their spans (`cheapest`).
"""

from wlb.cost import WorkloadModel
from wlb.plan import IntLike, ShardingPlan
from wlb.sharding.per_document import per_document
from wlb.sharding.per_sequence import per_sequence
from wlb.sharding.prices import cheapest
from wlb.spec import Remainder


def adaptive(
    lengths: IntLike, *, cp: int, cost: WorkloadModel, remainder: Remainder | str = Remainder.MERGED
) -> ShardingPlan:
    """Shard a micro-batch of pieces of `lengths` (shape [num_pieces], tokens) over `cp` ranks.

    The plan's `strategy` is the one that was chosen.
    """
    remainder = Remainder(remainder)
    plans = [per_sequence(lengths, cp=cp)]
    if cp > 1 and len(lengths):  # otherwise both give the same spans
        plans.append(per_document(lengths, cp=cp, remainder=remainder))
    return cheapest(plans, cost)
