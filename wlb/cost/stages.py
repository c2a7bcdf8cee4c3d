"""Predicted times of whole pipeline stages for the micro-batches of a plan.

Telemetry compares the predicted with measured times. Stages may have different numbers and kinds of
layers, so the price of a stage depends on its layers (`StageLayers`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from wlb.cost.exposed import over_gather_ns
from wlb.cost.protocol import kernels_ns
from wlb.cost.workload import ProfiledWorkload
from wlb.plan import FloatArray, IntArray, PipelinePlan
from wlb.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Predicted times of the layers of a stage for n micro-batches, in int64 ns.

    The linear part is everything besides attention. Unlike W_l, it includes kernel launches and the
    latency of collectives. The embedding and the head are not included.
    """

    attention_forward_ns: IntArray  # forward attention and its launches on each CP rank, [n, cp]
    attention_backward_ns: IntArray  # backward attention and its launches on each CP rank, [n, cp]
    linear_forward_ns: IntArray  # linear part in forward, equal on all CP ranks, [n]
    linear_backward_ns: IntArray  # linear part in backward, equal on all CP ranks, [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What the price of a stage depends on: how many layers of which kind it has.

    Stages in which all these fields are equal have equal prices.
    """

    counts: tuple[int, ...]  # number of layers of each kind in `ModelSpec.layer_kinds`
    with_experts: int = 0  # number of layers with experts
    # To price the attention of a stage, first every layer gets the price of the model's average
    # layer. Then this many average layers are replaced by layers without full attention (with a
    # sliding window or linear attention). Negative if the stage has more full attention than the
    # average; 0 if all stages have the same share of full attention.
    more_others: float = 0.0

    @classmethod
    def of(cls, spec: RunSpec, stage: int) -> "StageLayers":
        """Return the layers of one stage of a run; `stage` is its index, virtual stages counted."""
        model, layers = spec.model, spec.stage_layers[stage]
        more = 0.0
        if spec.has_uneven_attention:
            full = model.num_full_layers / model.num_layers
            more = (spec.stage_other_layers[stage] - (1 - full) * layers) / full
        counts = tuple(of_stage[stage] for of_stage in spec.stage_kind_layers)
        experts = spec.stage_expert_layers[stage]
        return cls(counts=counts, with_experts=experts, more_others=more)

    @property
    def layers(self) -> int:
        """Number of decoder layers of the stage."""
        return sum(self.counts)


class LinearPrices(NamedTuple):
    """Prices of a stage's layers without attention; each field is a pair (forward, backward)."""

    per_token: tuple[float, float]  # ns for each token
    per_call: tuple[float, float]  # ns for each micro-batch, independent of its tokens


@lru_cache(maxsize=64)  # computing prices takes 0.5 ms, and telemetry needs them in every step
def linear_prices(cost: ProfiledWorkload, stage: StageLayers) -> LinearPrices:
    """Return the prices of everything but attention in a stage, added up over its layers."""
    kinds, counts = cost.model.layer_kinds, stage.counts
    per_token, per_call = [0.0, 0.0], [0.0, 0.0]
    for kind, count in zip(kinds, counts, strict=True):
        linear = replace(cost.linear, model=kind.model)
        ns_per_token, share = linear.ns_per_token, count / linear.num_layers
        for k, one_pass in enumerate(("_forward", "_backward")):
            ns = sum(ns for name, ns in ns_per_token.items() if name.endswith(one_pass))
            per_token[k] += ns * share
            per_call[k] += linear.call_ns[k] * share
    return LinearPrices((per_token[0], per_token[1]), (per_call[0], per_call[1]))


def experts_ns_per_token(cost: ProfiledWorkload) -> tuple[float, float]:
    """Return the experts' time for one token in one layer with experts, as (forward, backward) ns.

    This is the part of the price that is proportional to `cost.expert_load`.
    """
    model = cost.model.layer_kinds[0].model
    routed = replace(cost.linear, model=model)
    # The price is proportional to `expert_load`. So if `expert_load` is raised by 1, all prices
    # together grow by the price of the experts at a load of 1.
    once, more = routed.ns_per_token, replace(routed, expert_load=routed.expert_load + 1)
    forward, backward = (
        sum(ns - once[name] for name, ns in more.ns_per_token.items() if name.endswith(end))
        for end in ("_forward", "_backward")
    )
    return forward / routed.num_layers, backward / routed.num_layers


def stage_times(plan: PipelinePlan, cost: ProfiledWorkload, stage: StageLayers) -> StageTimes:
    """Return the predicted times of a stage's layers for each micro-batch of a pipeline's plan."""
    forward, backward, over = _of_layers(plan, cost, stage.layers)
    if stage.more_others:
        # `cost` prices the average over all layers of the model, with and without full attention.
        # If this stage has more layers without full attention than average, add `more_others` such
        # layers and subtract as many average layers.
        for priced, sign in ((cost.of_other_layers, 1), (cost, -1)):
            more = _of_layers(plan, priced, sign * stage.more_others)
            forward, backward, over = forward + more[0], backward + more[1], over + more[2]
    tokens = np.array([sharding.num_tokens for sharding in plan.shardings], np.int64)
    linear = [
        per_token * tokens + call_ns + over[:, k]
        for k, (per_token, call_ns) in enumerate(zip(*linear_prices(cost, stage), strict=True))
    ]
    return StageTimes(
        attention_forward_ns=np.rint(forward).astype(np.int64),
        attention_backward_ns=np.rint(backward).astype(np.int64),
        linear_forward_ns=np.rint(linear[0]).astype(np.int64),
        linear_backward_ns=np.rint(linear[1]).astype(np.int64),
    )


def _of_layers(
    plan: PipelinePlan, cost: ProfiledWorkload, layers: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the times of attention and of the exchange of keys in some layers of a pipeline.

    Each layer is priced as the average of all layers of the model.

    Args:
        plan: The n micro-batches of a pipeline.
        cost: Prices.
        layers: Number of layers; may be a fraction, or negative to subtract layers.

    Returns:
        Three arrays of ns for the n micro-batches: forward attention, [n, cp]; backward attention,
        [n, cp]; and how much longer the exchange of keys takes than an all-gather, in forward and
        in backward, [n, 2].
    """
    share = layers / cost.num_layers_per_rank
    forward, backward = kernels_ns(plan.shardings, cost, cp=cost.parallel.cp)
    over = [over_gather_ns(sharding, cost) for sharding in plan.shardings]
    exchanges = np.array(over, np.float64).reshape(len(over), 2)
    return (
        forward.astype(np.float64) * share,
        backward.astype(np.float64) * share,
        exchanges * share,
    )


def end_times_ns(plan: PipelinePlan, cost: ProfiledWorkload) -> tuple[int, int]:
    """Return (ns of the embedding, ns of the head and the loss) for all micro-batches of a plan.

    Forward and backward are added up, and padding rows count. The embedding is on the first stage,
    the head and the loss are on the last stage.
    """
    linear = cost.linear
    rows = sum(plan.local_tokens) * cost.parallel.cp
    head = rows * linear.head_ns_per_token + len(plan.micro_batches) * linear.head_backward_ns
    return round(rows * sum(linear.embedding_ns_per_token)), round(head)
