"""Times of whole pipeline stages for the micro-batches of a plan, as telemetry can measure them.

Telemetry compares these predictions with measured times. Stages may have different numbers and
kinds of layers, so each is priced by its layers (`StageLayers`).
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
    """Predicted times of a stage's layers for n micro-batches, as a rank can measure them.

    All are int64 ns. The linear part differs from W_l: it includes kernel launches and the latency
    of collectives, but neither embedding nor head. It is equal on all CP ranks.
    """

    attention_forward_ns: IntArray  # kernels and launches of each CP rank, [n, cp]
    attention_backward_ns: IntArray  # the same in backward, [n, cp]
    linear_forward_ns: IntArray  # everything else, [n]
    linear_backward_ns: IntArray  # the same in backward, [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """The layers of a stage, as far as its price depends on them.

    Stages with equal records have equal prices.
    """

    counts: tuple[int, ...]  # number of layers of each of `ModelSpec.layer_kinds`
    with_experts: int = 0  # layers with experts
    # Layers of this stage that do not see all keys (sliding or linear) beyond the model's share,
    # divided by the model's share of layers that see all keys. 0 if all stages have the model's
    # share.
    more_others: float = 0.0

    @classmethod
    def of(cls, spec: RunSpec, stage: int) -> "StageLayers":
        """Return the layers of one stage of a run."""
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
        """Number of decoder layers."""
        return sum(self.counts)


class LinearPrices(NamedTuple):
    """Linear work of a stage's layers, (forward, backward)."""

    per_token: tuple[float, float]  # ns for each token
    per_call: tuple[float, float]  # ns for each micro-batch


@lru_cache(maxsize=64)  # takes 0.5 ms, and telemetry needs it in every step
def linear_prices(cost: ProfiledWorkload, stage: StageLayers) -> LinearPrices:
    """Return the linear prices of a stage: the sum over its layers by kind."""
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
    """Return the experts' time for one token in one layer with experts: (forward, backward).

    This is the part of the price that grows with the load of experts.
    """
    model = cost.model.layer_kinds[0].model
    routed = replace(cost.linear, model=model)
    # Load is a factor of the experts' price, so raising it by 1 adds that price once.
    once, more = routed.ns_per_token, replace(routed, expert_load=routed.expert_load + 1)
    forward, backward = (
        sum(ns - once[name] for name, ns in more.ns_per_token.items() if name.endswith(end))
        for end in ("_forward", "_backward")
    )
    return forward / routed.num_layers, backward / routed.num_layers


def stage_times(plan: PipelinePlan, cost: ProfiledWorkload, stage: StageLayers) -> StageTimes:
    """Price each micro-batch of `plan` on a stage."""
    forward, backward, over = _of_layers(plan, cost, stage.layers)
    if stage.more_others:
        # A stage with more sliding or linear layers has fewer layers that see all keys. `cost` is
        # the mean of both kinds, so both are corrected.
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
    """Return prices of `layers` mean layers of `cost`.

    Returns:
        Attention forward and attention backward, [n, cp]; and how much longer the exchanges of keys
        take than all-gathers, [n, 2].
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
    """Return the times of the embedding and of the head with the loss, over all micro-batches.

    Both passes and padding are included. The embedding is on the first stage, the head on the last.
    """
    linear = cost.linear
    rows = sum(plan.local_tokens) * cost.parallel.cp
    head = rows * linear.head_ns_per_token + len(plan.micro_batches) * linear.head_backward_ns
    return round(rows * sum(linear.embedding_ns_per_token)), round(head)
