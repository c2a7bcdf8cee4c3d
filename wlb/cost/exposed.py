"""The exposed time of an exchange of keys and values: how long CP ranks wait in spite of overlap.

Computation runs during three transfers (`wlb.parallel.context`):

- Forward: keys and values travel while the query projection runs.
- Backward: keys and values travel a second time while the backward of the MLP and of the output
  projection runs.
- Backward: gradients of keys and values return while the query projection's backward runs.

With `cp.overlap_stages`, attention over a rank's local keys also hides the transfer of keys in
forward and of gradients in backward, and attention over the keys of each stage hides the transfer
of the next stage.

The hidden time is computed from prices. It was not measured.
"""

from dataclasses import replace

import numpy as np

from wlb.cost.protocol import (
    HiddenExchange,
    SlidingLayers,
    WorkloadModel,
    exchange_ns,
    rows_of_layer,
    summaries_ns,
)
from wlb.plan import FloatArray, IntArray, KeyExchange, ShardingPlan, exchange_of, rank_of_span


def waits_ns(
    plan: ShardingPlan, cost: WorkloadModel, *, num_rows: int | None = None, overlaps: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Return for how many ns each CP rank waits for keys, values and gradients of a micro-batch.

    Args:
        plan: The sharded micro-batch.
        cost: Prices.
        num_rows: Rows of all ranks together, including padding rows, which an all-gather also
            moves; None means that there is no padding.
        overlaps: Whether to apply `cp.overlap_stages` if it is set. Layers with a sliding window
            never overlap attention with the exchange. If the exchange has several stages, the wait
            of these layers is computed from the average number of rows that a layer receives.

    Returns:
        Waits in forward and in backward, in all layers of a pipeline rank, shape [cp] each.
    """
    if plan.cp == 1:
        return np.zeros(1), np.zeros(1)
    if not isinstance(cost, HiddenExchange):
        whole = exchange_ns(plan, cost, num_rows=num_rows)
        forward, backward = (np.full(plan.cp, float(ns)) for ns in whole)
        return forward, backward
    rows = plan.num_tokens if num_rows is None else num_rows
    is_split = overlaps and cost.overlaps
    sliding_share = cost.sliding_share if isinstance(cost, SlidingLayers) else 0.0
    if is_split and cost.stages > 1 and sliding_share < 1:
        staged = _waits_in_stages_ns(plan, cost, rows)
        if not sliding_share:
            return staged
        plain = waits_ns(plan, cost, num_rows=num_rows, overlaps=False)
        both = zip(staged, plain, strict=True)
        forward, backward = (s * (1 - sliding_share) + p * sliding_share for s, p in both)
        return forward, backward
    moved = None if plan.exchange == KeyExchange.GATHER else rows_of_layer(plan, cost)
    sent, resent, returned = cost.transfers_ns(moved, rows, cp=plan.cp)
    hidden = cost.products_ns(rows)
    own = _own_attention_ns(plan, cost) if is_split else np.zeros((2, plan.cp))
    # A layer with a sliding window computes attention in one call when all keys have arrived, so
    # its attention hides no transfer.
    own = own * (1 - sliding_share)
    forward = np.maximum(0.0, sent - hidden.forward - own[0])
    backward = np.maximum(0.0, returned - hidden.gradients - own[1]) + max(
        0.0, resent - hidden.repeated
    )
    return forward, backward


def _waits_in_stages_ns(
    plan: ShardingPlan, cost: WorkloadModel, num_rows: int
) -> tuple[FloatArray, FloatArray]:
    """Return how many ns each CP rank waits for an exchange of keys that has several stages.

    There is one array for forward and one for backward, shape [cp] each. All ranks get the wait of
    the slowest rank. Each stage has its own attention call, so the launches of these calls count
    too. Stages travel one after the other, on one communicator. Rows of a later stage may arrive
    while attention over earlier stages runs. In backward the gradients of a stage leave when its
    attention ends.
    """
    assert isinstance(cost, HiddenExchange)
    exchange = exchange_of(
        plan, local_tokens=-(-num_rows // plan.cp), own_first=True, stages=cost.stages
    )
    # The price of an all-gather depends only on the number of rows. The price of an all-to-all
    # depends on how many rows each pair of ranks exchanges.
    is_gather = plan.exchange == KeyExchange.GATHER
    travels = np.array(
        [
            cost.transfers_ns(None if is_gather else rows, int(rows[0].sum()), cp=plan.cp)
            for rows in exchange.rows
        ]
    )
    hidden = cost.products_ns(num_rows)
    own, parts, calls = attention_in_stages_ns(plan, cost, exchange.keys_by_stage)
    zero = np.zeros(plan.cp)
    # Times count from the start of the first transfer. `at` is when the kernels so far end on each
    # rank, and `arrived` is when the rows of the stages so far have arrived.
    at, arrived = hidden.forward + own[0], zero
    for travel, part in zip(travels, parts, strict=True):
        arrived = arrived + travel[0]
        at = np.maximum(at, arrived) + part[0]
    computes = own + parts.sum(axis=0)
    forward = float(at.max() - hidden.forward - computes[0].max())
    at, arrived = zero + hidden.repeated, zero
    ends: list[FloatArray] = []
    for travel, part in zip(travels, parts, strict=True):
        arrived = arrived + travel[1]
        at = np.maximum(at, arrived) + part[1]
        ends.append(at)
    returned = arrived
    for travel, end in zip(travels, ends, strict=True):
        # The gradients of a stage travel in one collective, so they wait for the slowest rank.
        returned = np.maximum(returned, end.max()) + travel[2]
    done = np.maximum(at + own[1] + hidden.gradients, returned)
    backward = float(done.max() - hidden.repeated - hidden.gradients - computes[1].max())
    return max(0.0, forward) + calls[0], max(0.0, backward) + calls[1]


def attention_in_stages_ns(
    plan: ShardingPlan, cost: WorkloadModel, keys: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return attention's kernel times over a rank's local keys and over the keys of each stage.

    The time of a span over other ranks' keys is divided among the stages in proportion to `keys`.

    Args:
        plan: The sharded micro-batch.
        cost: Prices.
        keys: Number of keys that arrive for each span in each stage, [stages, spans]
            (`ContextExchange.keys_by_stage`). If the rank has a later span of the same piece, a few
            of these keys may lie after the end of the span. They count here all the same.

    Returns:
        Three arrays of ns, in which an axis of size 2 stands for forward and backward: attention
        over local keys, [2, cp]; attention over the keys of each stage, [stages, 2, cp]; launches
        of the attention calls of all stages after the first, [2, cp].
    """
    rank, num_q = rank_of_span(plan), plan.stop - plan.start
    own = np.array(cost.segment_times_ns(num_q, own_keys(plan)), np.float64)
    others = np.array(cost.segment_times_ns(num_q, plan.stop), np.float64) - own
    shares = keys / np.maximum(1, keys.sum(axis=0))
    launches = cost.attention_call_ns(num_q, plan.stop, plan.rank_offsets)

    def of_ranks(times: FloatArray) -> FloatArray:
        sums = [np.bincount(rank, weights=t, minlength=plan.cp) for t in times]
        return np.array(sums, np.float64)

    parts = np.array([of_ranks(others * share) for share in shares])
    return of_ranks(own), parts, (len(keys) - 1) * np.array(launches, np.float64)


def over_gather_ns(
    plan: ShardingPlan, cost: WorkloadModel, *, num_rows: int | None = None
) -> tuple[int, int]:
    """Return by how many ns the slowest rank waits longer for its exchange than for an all-gather.

    W_l (`LinearCost.ns_per_token`) includes an all-gather whose transfer nothing hides. Adding the
    result corrects a micro-batch's W_l for the plan's exchange and for overlap. Ranks mostly
    wait less than for an all-gather, so the result is mostly negative. The result also includes the
    time of linear attention's summaries, which nothing hides.

    Args:
        plan: The sharded micro-batch.
        cost: Prices.
        num_rows: Rows of all ranks together, including padding rows; None means that there is no
            padding.

    Returns:
        (forward, backward) in ns, for all layers of a pipeline rank.
    """
    overlaps = isinstance(cost, HiddenExchange) and cost.overlaps
    summaries = summaries_ns(plan, cost)
    if plan.cp == 1 or (plan.exchange == KeyExchange.GATHER and not overlaps):
        return summaries, summaries
    # W_l assumes a plain all-gather. So the wait for an all-gather is computed without overlap with
    # attention. Matrix products run during the transfers of both exchanges.
    gather = replace(plan, exchange=KeyExchange.GATHER)
    waits = waits_ns(plan, cost, num_rows=num_rows)
    plain = waits_ns(gather, cost, num_rows=num_rows, overlaps=False)
    forward, backward = (round(float(a.max() - b.max())) for a, b in zip(waits, plain, strict=True))
    return forward + summaries, backward + summaries


def own_keys(plan: ShardingPlan) -> IntArray:
    """Count for each span the keys on its own rank to which it attends, shape [num_spans].

    These keys belong to the span itself and to the rank's earlier spans of the same piece.
    """
    rank = rank_of_span(plan)
    # Sort spans by rank, piece and start. A span's local keys are then the running sum of rows in
    # its rank and piece.
    order = np.lexsort((plan.start, plan.piece, rank))
    group = rank[order] * max(1, plan.lengths.size) + plan.piece[order]
    running = np.cumsum((plan.stop - plan.start)[order])
    first = np.searchsorted(group, group, side="left")
    before = np.where(first > 0, running[first - 1], 0)
    out = np.empty_like(running)
    out[order] = running - before
    return out


def _own_attention_ns(plan: ShardingPlan, cost: WorkloadModel) -> FloatArray:
    """Return forward and backward kernel ns of attention over each rank's local keys, [2, cp]."""
    times = cost.segment_times_ns(plan.stop - plan.start, own_keys(plan))
    rank = rank_of_span(plan)
    sums = [np.bincount(rank, weights=t, minlength=plan.cp) for t in times]
    return np.array(sums, np.float64)
