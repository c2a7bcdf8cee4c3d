"""The part of an exchange of keys that CP ranks wait for: transfers less the work that hides them.

Forward, rows travel while the query projection runs. Backward, they travel again while the MLP's
and the output projection's backward run, and gradients return during the query projection's
(`wlb.parallel.context`). With `cp.overlap`, attention over a rank's own keys hides rows in forward
and gradients in backward as well. What hides is priced; nobody has measured it.
"""

from dataclasses import replace

import numpy as np

from wlb.cost.latency import exchange_ns
from wlb.cost.workload import HiddenExchange, WorkloadModel
from wlb.plan import FloatArray, IntArray, KeyExchange, ShardingPlan, rows_moved
from wlb.plan.exchange import rank_of_span


def waits_ns(
    plan: ShardingPlan, cost: WorkloadModel, *, num_rows: int | None = None, overlaps: bool = True
) -> tuple[FloatArray, FloatArray]:
    """What each CP rank waits for its exchange, forward and backward, shape [cp] each.

    num_rows: of `exchange_ns`. overlaps: False leaves `cp.overlap` out.
    """
    if plan.cp == 1:
        return np.zeros(1), np.zeros(1)
    if not isinstance(cost, HiddenExchange):
        whole = exchange_ns(plan, cost, num_rows=num_rows)
        forward, backward = (np.full(plan.cp, float(ns)) for ns in whole)
        return forward, backward
    moved = None if plan.exchange == KeyExchange.GATHER else rows_moved(plan)
    rows = plan.num_tokens if num_rows is None else num_rows
    there, again, back = cost.transfers_ns(moved, rows, cp=plan.cp)
    hidden = cost.products_ns(rows)
    is_split = overlaps and cost.overlaps
    own = _own_attention_ns(plan, cost) if is_split else np.zeros((2, plan.cp))
    forward = np.maximum(0.0, there - hidden.there - own[0])
    backward = np.maximum(0.0, back - hidden.back - own[1]) + max(0.0, again - hidden.again)
    return forward, backward


def over_gather_ns(
    plan: ShardingPlan, cost: WorkloadModel, *, num_rows: int | None = None
) -> tuple[int, int]:
    """How much longer than for a plain all-gather the slowest rank waits for the plan's exchange,
    mostly negative: (forward, backward). Linear work (`ns_per_token`) has the price of an
    all-gather that nothing hides. num_rows: of `exchange_ns`.
    """
    overlaps = isinstance(cost, HiddenExchange) and cost.overlaps
    if plan.cp == 1 or (plan.exchange == KeyExchange.GATHER and not overlaps):
        return 0, 0
    gather = replace(plan, exchange=KeyExchange.GATHER)
    waits = waits_ns(plan, cost, num_rows=num_rows)
    plain = waits_ns(gather, cost, num_rows=num_rows, overlaps=False)
    forward, backward = (round(float(a.max() - b.max())) for a, b in zip(waits, plain, strict=True))
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
