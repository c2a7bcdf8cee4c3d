"""Times of whole stages for the micro-batches of a plan, as telemetry can measure them."""

from dataclasses import dataclass

import numpy as np

from wlb.cost.exposed import over_gather_ns
from wlb.cost.latency import attention_latency
from wlb.cost.workload import ProfiledWorkload
from wlb.plan import IntArray, PipelinePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Times of a stage's layers for n micro-batches, int64 ns, as a rank can measure them.

    attention_*: kernels and launches of each CP rank, [n, cp]. linear_*: all else, [n], equal on
    all CP ranks; unlike W_l with calls and collectives' latency, without embedding and head.
    """

    attention_forward_ns: IntArray
    attention_backward_ns: IntArray
    linear_forward_ns: IntArray
    linear_backward_ns: IntArray


def stage_times(plan: PipelinePlan, cost: ProfiledWorkload, *, layers: int) -> StageTimes:
    """Prices each micro-batch of `plan` on a stage of `layers` layers."""
    priced = cost.num_layers_per_rank
    latencies = [attention_latency(sharding, cost) for sharding in plan.shardings]
    shape = (len(latencies), cost.parallel.cp)
    forward = np.array([a.forward_ns for a in latencies], np.int64).reshape(shape)
    backward = np.array([a.backward_ns for a in latencies], np.int64).reshape(shape)
    tokens = np.array([sharding.num_tokens for sharding in plan.shardings], np.int64)
    over = [over_gather_ns(sharding, cost) for sharding in plan.shardings]
    linear = [
        np.rint(
            sum(ns for name, ns in cost.ns_per_token.items() if name.endswith(one_pass)) * tokens
            + call_ns
        ).astype(np.int64)
        + np.array([both[i] for both in over], np.int64)
        for i, (one_pass, call_ns) in enumerate(
            zip(("_forward", "_backward"), cost.linear.call_ns, strict=True)
        )
    ]
    return StageTimes(
        attention_forward_ns=forward * layers // priced,
        attention_backward_ns=backward * layers // priced,
        linear_forward_ns=linear[0] * layers // priced,
        linear_backward_ns=linear[1] * layers // priced,
    )


def end_times_ns(plan: PipelinePlan, cost: ProfiledWorkload) -> tuple[int, int]:
    """Embedding (first stage) and head with loss (last stage), both passes of all micro-batches,
    padding included."""
    linear = cost.linear
    rows = sum(plan.local_tokens) * cost.parallel.cp
    head = rows * linear.head_ns_per_token + len(plan.micro_batches) * linear.head_backward_ns
    return round(rows * sum(linear.embedding_ns_per_token)), round(head)
