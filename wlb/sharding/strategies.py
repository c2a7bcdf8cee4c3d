"""Strategies by name, as a run's `sharding.strategy` chooses them, and the paper's choice."""

from collections.abc import Callable

from wlb.cost import WorkloadModel
from wlb.plan import IntLike, ShardingPlan, UserError
from wlb.sharding.attention_price import GATHER, cheapest
from wlb.sharding.balanced import balanced
from wlb.sharding.hybrid import hybrid
from wlb.sharding.per_document import per_document
from wlb.sharding.per_sequence import per_sequence
from wlb.spec import ExchangeChoice, Remainder


def adaptive(
    lengths: IntLike,
    *,
    cp: int,
    cost: WorkloadModel,
    remainder: Remainder | str = Remainder.MERGED,
    exchange: ExchangeChoice | str = GATHER,
) -> ShardingPlan:
    """The static strategy whose slowest rank is predicted to finish first (Section 5.3).

    For a micro-batch of pieces of `lengths` (shape [num_pieces], tokens) over `cp` ranks. The
    plan's `strategy` is the one that was chosen; per_sequence in a tie. exchange: see `cheapest`.
    """
    remainder = Remainder(remainder)
    plans = [per_sequence(lengths, cp=cp)]
    # With one rank or no piece, both strategies give the same spans.
    if cp > 1 and len(lengths):
        plans.append(per_document(lengths, cp=cp, remainder=remainder))
    return cheapest(plans, cost, exchange=exchange)


STRATEGIES: dict[str, Callable[..., ShardingPlan]] = {
    "per_sequence": per_sequence,
    "per_document": per_document,
    "hybrid": hybrid,
    "balanced": balanced,
}
"""Values of a plan's `strategy`; a plan by "adaptive" has the name of the chosen one."""

NAMES = (*STRATEGIES, "adaptive")
WITH_REMAINDER = ("per_document", "adaptive")
"""Strategies that may deal left-over tokens one by one."""


def shard(
    lengths: IntLike,
    *,
    cp: int,
    strategy: str,
    cost: WorkloadModel,
    remainder: Remainder | str = Remainder.MERGED,
    exchange: ExchangeChoice | str = ExchangeChoice.GATHER,
) -> ShardingPlan:
    """Shard a micro-batch by a strategy's name, with each rank's predicted latency in the plan.

    lengths: tokens of each piece, shape [num_pieces]. remainder: treatment of left-over tokens by
    per_document (also as adaptive's candidate). exchange: how ranks get each other's keys, auto by
    `cost`; strategies take account of it, and one rank needs none. UserError for an unknown
    strategy, for a remainder that the strategy does not have; ValueError for a plan that would lose
    or repeat a token.
    """
    if Remainder(remainder) != Remainder.MERGED and strategy not in WITH_REMAINDER:
        raise UserError(f"{strategy} merges left-over tokens; it has no remainder {remainder!r}")
    match strategy:
        case "per_sequence":
            plan = cheapest([per_sequence(lengths, cp=cp)], cost, exchange=exchange)
        case "per_document":
            made = per_document(lengths, cp=cp, remainder=remainder)
            plan = cheapest([made], cost, exchange=exchange)
        case "adaptive":
            plan = adaptive(lengths, cp=cp, cost=cost, remainder=remainder, exchange=exchange)
        case "hybrid" | "balanced":
            plan = STRATEGIES[strategy](lengths, cp=cp, cost=cost, exchange=exchange)
        case _:
            raise UserError(f"unknown sharding strategy {strategy!r}; known: {', '.join(NAMES)}")
    return plan.validate()
