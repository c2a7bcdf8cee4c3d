"""adaptive: the static strategy whose slowest rank is predicted to finish first (Section 5.3).

For each strategy the attention kernel's segments (q = span tokens, kv = span end) of every rank are
priced by the injected cost, forward plus backward; the micro-batch is sharded by the strategy with
the least maximum over ranks. Collectives and linear layers do not enter: both strategies give every
rank the same number of rows. Ties go to the earlier strategy in the list. Cost: one pricing call
over all spans of each strategy.
"""

from collections.abc import Callable
from dataclasses import replace

from wlb.cost import WorkloadModel
from wlb.plan import IntArray, IntLike, ShardingPlan, offsets_of
from wlb.sharding.per_document import per_document
from wlb.sharding.per_sequence import per_sequence

STRATEGIES: dict[str, Callable[..., ShardingPlan]] = {
    "per_sequence": per_sequence,
    "per_document": per_document,
}


def rank_latency_ns(plan: ShardingPlan, cost: WorkloadModel) -> IntArray:
    """Predicted attention time of each rank's one varlen call, shape [cp]."""
    running = offsets_of(cost.segments_ns(plan.stop - plan.start, plan.stop))
    return running[plan.rank_offsets[1:]] - running[plan.rank_offsets[:-1]]


def shard(lengths: IntLike, *, cp: int, strategy: str, cost: WorkloadModel) -> ShardingPlan:
    """Shard a micro-batch by a strategy's name or "adaptive", with each rank's predicted latency.

    lengths: tokens of each piece, shape [num_pieces]. Raises ValueError for an unknown strategy.
    """
    if strategy == "adaptive":
        # With one rank, or nothing to divide, every strategy gives the same spans.
        names = list(STRATEGIES) if cp > 1 and len(lengths) else ["per_sequence"]
    elif strategy in STRATEGIES:
        names = [strategy]
    else:
        known = ", ".join([*STRATEGIES, "adaptive"])
        raise ValueError(f"unknown sharding strategy {strategy!r}; known: {known}")
    plans = [STRATEGIES[name](lengths, cp=cp) for name in names]
    priced = [replace(plan, latency_ns=rank_latency_ns(plan, cost)) for plan in plans]
    return min(priced, key=lambda plan: int(plan.latency_ns.max()))
