"""adaptive: the static strategy whose slowest rank is predicted to finish first (Section 5.3).

For each strategy the attention kernel's segments (q = span tokens, kv = span end) of every rank are
priced (`wlb.cost.attention_latency`), forward and backward; the micro-batch is sharded by the one
that takes less. Collectives and linear layers do not enter: both strategies give every rank the
same number of rows. Ties go to per_sequence. Cost: one pricing call over all spans of each.
"""

from wlb.cost import WorkloadModel, attention_latency
from wlb.plan import IntLike, ShardingPlan
from wlb.sharding.per_document import per_document
from wlb.sharding.per_sequence import per_sequence
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
    return min(plans, key=lambda plan: attention_latency(plan, cost).slowest_kernels_ns)
