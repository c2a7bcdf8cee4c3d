"""Times of whole stages for the micro-batches of a plan, as telemetry can measure them."""

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
    """Times of a stage's layers for n micro-batches, int64 ns, as a rank can measure them.

    attention_*: kernels and launches of each CP rank, [n, cp]. linear_*: all else, [n], equal on
    all CP ranks; unlike W_l with calls and collectives' latency, without embedding and head.
    """

    attention_forward_ns: IntArray
    attention_backward_ns: IntArray
    linear_forward_ns: IntArray
    linear_backward_ns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What a stage's price depends on; stages with equal ones have equal prices."""

    counts: tuple[int, ...]  # layers of each of `ModelSpec.layer_kinds`
    with_experts: int = 0  # layers with experts
    # Layers that do not see all keys, sliding or linear ones, less those of a stage with the
    # model's share, over the model's share of layers that do; 0 where all stages have that share.
    more_others: float = 0.0

    @classmethod
    def of(cls, spec: RunSpec, stage: int) -> "StageLayers":
        """The layers of one stage of a run."""
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
        """Decoder layers."""
        return sum(self.counts)


class LinearPrices(NamedTuple):
    """Linear work of a stage's layers, (forward, backward): ns a token, and ns a micro-batch."""

    per_token: tuple[float, float]
    per_call: tuple[float, float]


@lru_cache(maxsize=64)  # about 0.5 ms; telemetry asks for them in every step
def linear_prices(cost: ProfiledWorkload, stage: StageLayers) -> LinearPrices:
    """Sums layers of all kinds, each at its own price."""
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
    """Prices in a layer with experts, forward and backward, of one token's experts: ns that grow
    with load.
    """
    model = cost.model.layer_kinds[0].model
    routed = replace(cost.linear, model=model)
    once, more = routed.ns_per_token, replace(routed, expert_load=routed.expert_load + 1)
    forward, backward = (
        sum(ns - once[name] for name, ns in more.ns_per_token.items() if name.endswith(end))
        for end in ("_forward", "_backward")
    )
    return forward / routed.num_layers, backward / routed.num_layers


def stage_times(plan: PipelinePlan, cost: ProfiledWorkload, stage: StageLayers) -> StageTimes:
    """Prices each micro-batch of `plan` on a stage."""
    forward, backward, over = _of_layers(plan, cost, stage.layers)
    if stage.more_others:
        # Each further layer that does not see all keys replaces one that does, whose time follows
        # from the means of all layers and of those that do not.
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
    """Attention forward and backward of `layers` layers of `cost`, [n, cp], and how much longer
    their exchanges of keys take than all-gathers, [n, 2].
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
    """Embedding (first stage) and head with loss (last stage), both passes of all micro-batches,
    padding included.
    """
    linear = cost.linear
    rows = sum(plan.local_tokens) * cost.parallel.cp
    head = rows * linear.head_ns_per_token + len(plan.micro_batches) * linear.head_backward_ns
    return round(rows * sum(linear.embedding_ns_per_token)), round(head)
