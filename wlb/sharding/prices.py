"""The price by which strategies choose: predicted time of a micro-batch's attention, in the plan.

Section 5.3: segments (q = span tokens, kv = span end) of every rank are priced, forward and
backward. Linear layers do not enter, because every strategy gives all ranks the same number of
rows, nor does an all-gather, which moves them all; an exchange by need enters with what is waited
for it. Candidates that choose their stages are compared in one and in the most, and the best takes
the number that is fastest. Cost: one pricing call over the spans of all candidates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from wlb.cost import (
    HiddenExchange,
    StagesByPrice,
    WorkloadModel,
    kernels_ns,
    rows_of_layer,
    waits_ns,
)
from wlb.plan import IntArray, KeyExchange, ShardingPlan, UserError
from wlb.spec import ExchangeChoice

GATHER = ExchangeChoice.GATHER


def cheapest(
    plans: Sequence[ShardingPlan],
    cost: WorkloadModel,
    *,
    strategy: str = "",
    exchange: ExchangeChoice | str = GATHER,
) -> ShardingPlan:
    """The plan whose slowest rank is predicted to finish first, with its price; ties: the first.

    strategy: the name that the plan takes; "" leaves its own. exchange: how ranks will get each
    other's keys; auto tries all that `cost` can price. With another than gather, what is waited
    for the exchange counts as well, and of plans that take equally long the one that moves fewest
    rows is taken. UserError for an unknown exchange.
    """
    if exchange not in set(ExchangeChoice):
        raise UserError(f"exchange = {exchange!r} is not one of {', '.join(ExchangeChoice)}")
    forward, backward = kernels_ns(plans, cost, cp=plans[0].cp)
    slowest = forward.max(1) + backward.max(1)
    if exchange == GATHER or plans[0].cp == 1:
        best = int(slowest.argmin())
        plan = plans[best]
    else:
        names = _tried(ExchangeChoice(exchange), cost, cp=plans[0].cp)
        found: list[tuple[tuple[float, float], int, ShardingPlan]] = []
        for i in map(int, np.argsort(slowest, kind="stable")):
            # Waits only add to the kernels, so no plan from here on can be the fastest.
            if found and slowest[i] > found[0][0][0]:
                break
            tried = chain.from_iterable(_exchanging(plans[i], name, cost) for name in names)
            kernels = forward[i], backward[i]
            found += [(_with_waits(plan, cost, kernels), i, plan) for plan in tried]
            found = [min(found, key=lambda one: one[:2])]
        _, best, plan = found[0]
    if most_stages(cost) > 1 and plan.cp > 1 and plan.exchange != KeyExchange.RELAYED:
        numbers = range(1, most_stages(cost) + 1)
        plan = min(
            (replace(plan, stages=stages) for stages in numbers),
            key=lambda one: _with_waits(one, cost, (forward[best], backward[best]))[0],
        )
    return replace(
        plan,
        strategy=strategy or plan.strategy,
        forward_ns=forward[best],
        backward_ns=backward[best],
    )


def _tried(exchange: ExchangeChoice, cost: WorkloadModel, *, cp: int) -> list[KeyExchange]:
    """The exchanges that are compared. auto passes rows on only where ranks share nodes, and the
    group has several; UserError for a workload that cannot tell where rows are to be passed on."""
    knows = isinstance(cost, HiddenExchange)
    if exchange == ExchangeChoice.RELAYED and not (knows and cost.overlaps):
        raise UserError(
            f"{type(cost).__name__} does not say which ranks share a node, or has no overlap; set "
            f"cp.overlap = true, or exchange = needed"
        )
    if exchange != ExchangeChoice.AUTO:
        return [KeyExchange(exchange)]
    passes_on = knows and cost.overlaps and 1 < cost.cp_ranks_per_node < cp
    return [name for name in KeyExchange if passes_on or name != KeyExchange.RELAYED]


def most_stages(cost: WorkloadModel) -> int:
    """Stages of which a micro-batch may choose any number; 1 if it has none to choose."""
    chooses = isinstance(cost, StagesByPrice) and cost.stages_by_price
    return cost.stages if chooses and isinstance(cost, HiddenExchange) and cost.overlaps else 1


def _exchanging(
    plan: ShardingPlan, name: KeyExchange, cost: WorkloadModel
) -> Iterator[ShardingPlan]:
    """The plan with this exchange, in one stage and in the most if it may choose."""
    if name == KeyExchange.RELAYED and isinstance(cost, HiddenExchange):
        near = cost.cp_ranks_per_node
        yield replace(plan, exchange=name, ranks_per_node=near, stages=0)
        return
    most = most_stages(cost)
    for stages in (1, most) if most > 1 else (0,):
        yield replace(plan, exchange=name, ranks_per_node=0, stages=stages)


def _with_waits(
    plan: ShardingPlan, cost: WorkloadModel, kernels: Sequence[IntArray]
) -> tuple[float, float]:
    """The slowest rank's time of both passes, with what is waited for the exchange, and the rows
    that travel by need. kernels: forward and backward of each rank, [cp] each."""
    both = zip(kernels, waits_ns(plan, cost), strict=True)
    slowest = sum(float((times + waits).max()) for times, waits in both)
    is_gather = plan.exchange == KeyExchange.GATHER
    return slowest, 0 if is_gather else float(rows_of_layer(plan, cost).sum())
