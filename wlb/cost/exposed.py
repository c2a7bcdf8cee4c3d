"""The part of an exchange of keys that CP ranks wait for: transfers less the work that hides them.

Forward, rows travel while the query projection runs. Backward, they travel again while the MLP's
and the output projection's backward run, and gradients return during the query projection's
(`wlb.parallel.context`). With `cp.overlap`, attention over a rank's own keys hides rows in forward
and gradients in backward as well. What hides is priced; nobody has measured it.
"""

import numpy as np

from wlb.cost.latency import exchange_ns
from wlb.cost.workload import HiddenExchange, WorkloadModel
from wlb.plan import FloatArray, IntArray, KeyExchange, ShardingPlan, rows_moved
from wlb.plan.exchange import rank_of_span


def waits_ns(plan: ShardingPlan, cost: WorkloadModel) -> tuple[FloatArray, FloatArray]:
    """What each CP rank waits for its exchange, forward and backward, shape [cp] each."""
    if plan.cp == 1:
        return np.zeros(1), np.zeros(1)
    if not isinstance(cost, HiddenExchange):
        forward, backward = (np.full(plan.cp, float(ns)) for ns in exchange_ns(plan, cost))
        return forward, backward
    moved = None if plan.exchange == KeyExchange.GATHER else rows_moved(plan)
    there, again, back = cost.transfers_ns(moved, plan.num_tokens, cp=plan.cp)
    hidden = cost.products_ns(plan.num_tokens)
    own = _own_attention_ns(plan, cost) if cost.overlaps else np.zeros((2, plan.cp))
    forward = np.maximum(0.0, there - hidden.there - own[0])
    backward = np.maximum(0.0, back - hidden.back - own[1]) + max(0.0, again - hidden.again)
    return forward, backward


def own_keys(plan: ShardingPlan) -> IntArray:
    """Keys of each span that its rank holds itself, its queries' own included, [num_spans]."""
    rank = rank_of_span(plan)
    order = np.lexsort((plan.start, plan.piece, rank))
    group = rank[order] * max(1, plan.lengths.size) + plan.piece[order]
    running = np.cumsum((plan.stop - plan.start)[order])
    first = np.searchsorted(group, group, side="left")
    before = np.where(first > 0, running[first - 1], 0)
    out = np.empty_like(running)
    out[order] = running - before
    return out


def _own_attention_ns(plan: ShardingPlan, cost: WorkloadModel) -> FloatArray:
    """Forward and backward kernels of each rank's own keys, shape [2, cp]."""
    times = cost.segment_times_ns(plan.stop - plan.start, own_keys(plan))
    rank = rank_of_span(plan)
    sums = [np.bincount(rank, weights=t, minlength=plan.cp) for t in times]
    return np.array(sums, np.float64)
