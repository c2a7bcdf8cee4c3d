"""Predicted times of what a rank can time: each micro-batch on each stage, in the terms of Eq. 2.

Only decoder layers are priced: the cost model has no embedding and no head yet, so what telemetry
compares leaves those out of the measured times as well. W_l is per token here as in packing: costs
once a micro-batch (element-wise launches, collective latency) are not in it, so measured over
predicted time of small micro-batches is above that of large ones.
"""

from dataclasses import dataclass, replace

import numpy as np

from wlb.cost.latency import attention_latency
from wlb.cost.workload import ProfiledWorkload
from wlb.plan import IntArray, PipelinePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Of the layers of one stage (all stages hold equally many), for n micro-batches, int64 ns.

    attention_*: kernels and launches of each CP rank, shape [n, cp]. linear_*: everything else in a
    layer, equal on all CP ranks (they hold equally many tokens), shape [n].
    """

    attention_forward_ns: IntArray
    attention_backward_ns: IntArray
    linear_forward_ns: IntArray
    linear_backward_ns: IntArray


def stage_times(plan: PipelinePlan, cost: ProfiledWorkload, *, virtual_stages: int) -> StageTimes:
    """Prices each micro-batch of `plan`; `cost` is that of a pipeline rank's stages together."""
    latencies = [attention_latency(sharding, cost) for sharding in plan.shardings]
    shape = (len(latencies), cost.parallel.cp)
    forward = np.array([a.forward_ns for a in latencies], np.int64).reshape(shape)
    backward = np.array([a.backward_ns for a in latencies], np.int64).reshape(shape)
    # As one document each: W_l is proportional to tokens.
    tokens = np.array([sharding.num_tokens for sharding in plan.shardings], np.int64)
    linear = cost.linear_ns(tokens)
    linear_forward = cost.forward_latency_ns(tokens) - cost.terms(tokens)["attention_forward"]
    return StageTimes(
        attention_forward_ns=forward // virtual_stages,
        attention_backward_ns=backward // virtual_stages,
        linear_forward_ns=linear_forward // virtual_stages,
        linear_backward_ns=(linear - linear_forward) // virtual_stages,
    )


def without_collectives(cost: ProfiledWorkload) -> ProfiledWorkload:
    """`cost` on a machine whose collectives take no time: what thread CPU time is compared with."""
    free = tuple(replace(c, alpha_ns=0, bytes_per_s=float("inf")) for c in cost.profile.collectives)
    return replace(cost, profile=replace(cost.profile, collectives=free))
