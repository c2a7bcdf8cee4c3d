"""Predicted times of sharded micro-batches' attention, for strategies and simulator.

Section 5.3: tile-quantised FLOPs of each segment over the throughput measured at its (query rows,
keys, heads), forward and backward apart. Launches and CP's collectives are added: K and V are
exchanged forward and, by default, again in backward, and their gradients return. CP ranks meet in
every layer, so a micro-batch waits for the slowest rank of each pass, not of the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wlb.cost.protocol import ExchangePrices, WorkloadModel, rows_of_layer
from wlb.plan import IntArray, IntLike, KeyExchange, ShardingPlan, UserError, offsets_of
from wlb.plan.sharding import RankTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLatency(RankTimes):
    """Attention times of a pipeline rank's layers. forward_ns, backward_ns: kernels and launches of
    each CP rank, [cp]. gather_forward_ns, exchange_backward_ns: collectives, of the slowest rank.
    """

    forward_ns: IntArray
    backward_ns: IntArray
    gather_forward_ns: int
    exchange_backward_ns: int

    @property
    def slowest_ns(self) -> int:
        """Time of the micro-batch's attention: `slowest_kernels_ns` and the collectives."""
        return self.slowest_kernels_ns + self.gather_forward_ns + self.exchange_backward_ns

    @property
    def imbalance(self) -> float:
        """Slowest rank over the mean rank, kernels and launches of both passes."""
        mean = float(self.forward_ns.mean() + self.backward_ns.mean())
        return self.slowest_kernels_ns / mean if mean else 1.0


def attention_latency(plan: ShardingPlan, cost: WorkloadModel) -> AttentionLatency:
    """Predicted attention time of each rank of `plan`; pure, integer nanoseconds."""
    forward, backward = kernels_ns([plan], cost, cp=plan.cp)
    gather, exchange = exchange_ns(plan, cost)
    return AttentionLatency(
        forward_ns=forward[0],
        backward_ns=backward[0],
        gather_forward_ns=gather,
        exchange_backward_ns=exchange,
    )


def exchange_ns(
    plan: ShardingPlan, cost: WorkloadModel, *, num_rows: int | None = None
) -> tuple[int, int]:
    """(forward, backward) collectives of a micro-batch's keys and values by the plan's exchange.

    num_rows: rows of all ranks, padding included, which an all-gather moves as well; None: without
    padding. UserError if the workload does not price the plan's exchange.
    """
    if plan.exchange == KeyExchange.GATHER:
        return cost.kv_exchange_ns(plan.num_tokens if num_rows is None else num_rows, cp=plan.cp)
    if not isinstance(cost, ExchangePrices):
        raise UserError(
            f"{type(cost).__name__} has no method needed_exchange_ns, by which an exchange by need "
            f"is priced; add it, or set exchange = gather"
        )
    return cost.needed_exchange_ns(rows_of_layer(plan, cost))


def kernels_ns(
    plans: Sequence[ShardingPlan], cost: WorkloadModel, *, cp: int
) -> tuple[IntArray, IntArray]:
    """Kernels and launches of each of `cp` ranks, forward and backward, shape [num_plans, cp].

    Pricing all segments together takes a tenth of the time of one plan after the other.
    """
    if not plans:
        return np.zeros((0, cp), np.int64), np.zeros((0, cp), np.int64)
    stop = np.concatenate([plan.stop for plan in plans])
    rows = stop - np.concatenate([plan.start for plan in plans])
    offsets = offsets_of(np.concatenate([np.diff(plan.rank_offsets) for plan in plans]))
    times = cost.segment_times_ns(rows, stop)
    calls = cost.attention_call_ns(rows, stop, offsets)
    forward, backward = (
        (_of_ranks(segments, offsets) + call).reshape(len(plans), cp)
        for segments, call in zip(times, calls, strict=True)
    )
    return forward, backward


def ideal_kernels_ns(lengths: IntLike, cost: WorkloadModel, *, cp: int) -> int:
    """`slowest_kernels_ns` if `cp` ranks shared uncut documents evenly; lengths: [num_pieces].

    A yardstick, not a bound: spans cost mostly more than whole documents, sometimes a little less.
    A rank's call is taken to hold every `cp`-th document, the longest one with them.
    """
    forward, backward = cost.segment_times_ns(lengths, lengths)
    mine = np.sort(np.asarray(lengths))[::-1][::cp]
    calls = cost.attention_call_ns(mine, mine, np.array([0, mine.size]))
    return (int(forward.sum()) + int(backward.sum())) // cp + sum(int(x[0]) for x in calls)


def _of_ranks(times: IntArray, rank_offsets: IntArray) -> IntArray:
    if float(times.sum(dtype=np.float64)) >= 2.0**63:
        raise UserError("the cost model's times of micro-batches add up to over 292 years")
    running = offsets_of(times)
    return running[rank_offsets[1:]] - running[rank_offsets[:-1]]
