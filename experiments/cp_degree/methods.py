"""The schedulers that are compared, each with how its ranks exchange keys, and what comes of them.

Time of a step is that of its slowest rank. Megatron's hybrid scheduler has ranks meet at the end of
a group; elsewhere a sub-group begins as soon as its ranks are free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.cp_degree import megatron, planner, steps
from experiments.cp_degree.groups import Call, Schedule, SubGroup, check, finished_ns
from experiments.cp_degree.prices import Exchange, Priced, Prices
from experiments.cp_degree.steps import Layout, Step
from wlb.plan import UserError

Make = Callable[[Step, Layout, Prices, Callable[[Call, int], float]], Schedule]
"""A schedule of a step; the last argument is the predicted time of a call on so many ranks."""
FIXED, BASELINE = "fixed degree", "fixed degree, per document"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A scheduler, and how its calls are sharded. barrier: whether ranks meet after each group."""

    name: str
    make: Make
    strategy: str
    exchange: Exchange
    barrier: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Sums over steps. time: of the slowest ranks; ideal: see `Prices.ideal_ns`, both in ns.

    waits, idle: of all ranks, for keys and for other ranks, over all ranks' time. calls: micro-
    batches of the mean rank in a step. degree: of the mean token.
    """

    time: float
    ideal: float
    waits: float
    idle: float
    calls: float
    degree: float

    @property
    def over_ideal(self) -> float:
        return self.time / self.ideal


def methods(dev: megatron.DevSchedulers | None, *, has_hybrid: bool) -> list[Method]:
    """Returns the methods; dev, has_hybrid: which of Megatron's schedulers are here."""
    ring = {"strategy": "per_document", "exchange": Exchange.RING}
    balanced = {"strategy": "balanced", "exchange": Exchange.OVERLAP}
    found = [
        Method(name=BASELINE, make=_fixed, strategy="per_document", exchange=Exchange.GATHER),
        Method(name=BASELINE, make=_fixed, **ring),
        Method(name=FIXED, make=_fixed, strategy="balanced", exchange=Exchange.NEEDED),
        Method(name=FIXED, make=_fixed, **balanced),
        Method(name=FIXED, make=_fixed, strategy="balanced", exchange=Exchange.STAGED),
        Method(name="all ranks pooled", make=_pooled, **balanced),
        Method(name="dynamic, equal counts", make=_mixed, **balanced),
        Method(name="dynamic", make=_planned, strategy="balanced", exchange=Exchange.NEEDED),
        Method(name="dynamic", make=_planned, **balanced),
        Method(name="dynamic", make=_planned, strategy="balanced", exchange=Exchange.STAGED),
    ]
    if dev is not None:
        found.append(Method(name="Megatron, in order", make=_in_order(dev), **ring))
    if has_hybrid:
        found += [
            Method(name="Megatron hybrid", make=_hybrid, barrier=True, **ring),
            Method(name="Megatron hybrid, our prices", make=_hybrid_priced, barrier=True, **ring),
        ]
    if dev is not None:
        found.append(Method(name="Megatron dynamic", make=_dynamic(dev), **ring))
    return found


def outcome(
    method: Method, given: Sequence[Step], layout: Layout, prices: Prices
) -> Outcome | megatron.Failed:
    """Returns the outcome of a method for these steps, or the error of its scheduler.

    Raises ValueError for a schedule that leaves a sample out or overfills a rank.
    """
    num = layout.num_ranks
    time = ideal = waits = busy = tokens = calls = by_token = 0.0
    for step in given:

        def priced(call: Call, degree: int, step: Step = step) -> Priced:
            return prices.of(
                step.lengths[list(call)], degree, strategy=method.strategy, exchange=method.exchange
            )

        def price(call: Call, degree: int, priced: Callable[..., Priced] = priced) -> float:
            return priced(call, degree).total

        try:
            schedule = method.make(step, layout, prices, price)
        except megatron.Failed as error:
            return error
        check(schedule, step.lengths, num_ranks=num, rows=layout.rows)
        time += float(finished_ns(schedule, price, num_ranks=num, barrier=method.barrier).max())
        ideal += prices.ideal_ns(step.lengths, num_ranks=num)
        for call, degree in _calls(schedule):
            found, size = priced(call, degree), int(step.lengths[list(call)].sum())
            waits += found.waits * degree
            busy += found.total * degree
            calls += degree
            tokens += size
            by_token += size * degree
    return Outcome(
        time=time,
        ideal=ideal,
        waits=waits / (time * num),
        idle=1 - busy / (time * num),
        calls=calls / (num * len(given)),
        degree=by_token / tokens,
    )


def _calls(schedule: Schedule) -> list[tuple[Call, int]]:
    return [(call, len(sub.ranks)) for group in schedule for sub in group for call in sub.calls]


def _fixed(step: Step, layout: Layout, *_: object) -> Schedule:
    return steps.fixed(step, layout, degree=layout.cp)


def _pooled(step: Step, layout: Layout, *_: object) -> Schedule:
    return steps.fixed(step, layout, degree=layout.num_ranks)


def _mixed(step: Step, layout: Layout, prices: Prices, price: Callable[..., float]) -> Schedule:
    try:
        return steps.mixed(step, layout, prices.work_ns(step.lengths), price)
    except UserError:
        # It widens no micro-batch to occupy ranks, so a step of few samples has no place in it.
        return steps.fixed(step, layout, degree=layout.cp)


def _planned(step: Step, layout: Layout, prices: Prices, price: Callable[..., float]) -> Schedule:
    near = prices.cost(layout.cp).cp_ranks_per_node
    how = {"num_ranks": layout.num_ranks, "near": near, "rows": layout.rows}
    return planner.planned(step.lengths, prices.work_ns(step.lengths), price, **how)


def _hybrid(step: Step, layout: Layout, *_: object) -> Schedule:
    return megatron.hybrid(step.lengths, num_ranks=layout.num_ranks, rows=layout.rows)


def _hybrid_priced(
    step: Step, layout: Layout, prices: Prices, price: Callable[..., float]
) -> Schedule:
    def estimate(tokens: int, degree: int) -> float:
        of = {"strategy": "per_document", "exchange": Exchange.RING}
        return prices.of(np.array([tokens]), degree, **of).total

    return megatron.hybrid(
        step.lengths, num_ranks=layout.num_ranks, rows=layout.rows, estimate=estimate
    )


def _dynamic(dev: megatron.DevSchedulers) -> Make:
    def make(step: Step, layout: Layout, *_: object) -> Schedule:
        how = {"num_ranks": layout.num_ranks, "cp": layout.cp, "rows": layout.rows}
        return dev.dynamic(step.lengths, **how)

    return make


def _in_order(dev: megatron.DevSchedulers) -> Make:
    """The samples of a step in a random order, as a stream would bring them."""

    def make(step: Step, layout: Layout, *_: object) -> Schedule:
        order = np.random.default_rng(0).permutation(step.lengths.size)
        how = {"num_ranks": layout.num_ranks, "cp": layout.cp, "rows": layout.rows}
        made = dev.in_order(step.lengths[order], **how)
        return [
            [
                SubGroup(sub.ranks, tuple(tuple(order[list(c)].tolist()) for c in sub.calls))
                for sub in group
            ]
            for group in made
        ]

    return make
