"""The price by which strategies choose: predicted time of a micro-batch's attention, in the plan.

Section 5.3: segments (q = span tokens, kv = span end) of every rank are priced, forward and
backward. Linear layers do not enter, because every strategy gives all ranks the same number of
rows, nor does an all-gather, which moves them all; an exchange by need enters with what is waited
for it. Cost: one pricing call over the spans of all candidates.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wlb.cost import WorkloadModel, kernels_ns, rows_of_layer, waits_ns
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
    other's keys; auto tries both. With another than gather, what is waited
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
        is_auto = exchange == ExchangeChoice.AUTO
        names = list(KeyExchange) if is_auto else [KeyExchange(exchange)]
        found: list[tuple[tuple[float, float], int, ShardingPlan]] = []
        for i in map(int, np.argsort(slowest, kind="stable")):
            # Waits only add to the kernels, so no plan from here on can be the fastest.
            if found and slowest[i] > found[0][0][0]:
                break
            tried = [replace(plans[i], exchange=name) for name in names]
            kernels = forward[i], backward[i]
            found += [(_with_waits(plan, cost, kernels), i, plan) for plan in tried]
            found = [min(found, key=lambda one: one[:2])]
        _, best, plan = found[0]
    return replace(
        plan,
        strategy=strategy or plan.strategy,
        forward_ns=forward[best],
        backward_ns=backward[best],
    )


def _with_waits(
    plan: ShardingPlan, cost: WorkloadModel, kernels: Sequence[IntArray]
) -> tuple[float, float]:
    """The slowest rank's time of both passes, with what is waited for the exchange, and the rows
    that travel by need. kernels: forward and backward of each rank, [cp] each."""
    both = zip(kernels, waits_ns(plan, cost), strict=True)
    slowest = sum(float((times + waits).max()) for times, waits in both)
    is_gather = plan.exchange == KeyExchange.GATHER
    return slowest, 0 if is_gather else float(rows_of_layer(plan, cost).sum())
