"""The price of a micro-batch on a number of ranks, the same for every scheduler.

One layer, forward and backward: matrix products, element-wise operators and exposed TP collectives
of the fullest rank's rows, at the throughput of so many rows; the slowest rank's attention kernels;
and what is waited for keys. Launches of linear layers, embedding and head, gradients among replicas
and the barriers' own time are left out.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from experiments.paper.fig15.case import MODEL
from wlb.cost import (
    KernelProfile,
    ProfiledWorkload,
    ideal_kernels_ns,
    kernels_ns,
    load_profile,
    waits_ns,
)
from wlb.plan import FloatArray, IntArray, KeyExchange, ShardingPlan, rows_moved
from wlb.sharding import shard
from wlb.spec import ExchangeChoice, ParallelSpec

TP_OVERLAP = 0.85
"""Share of TP collectives behind matrix products, as in `experiments.harness.constants`."""
ROW_STEP = 128
"""Throughput of matrix products is looked up at multiples of this many rows."""


class Exchange(StrEnum):
    """How ranks of a sub-group get keys, and what hides that.

    GATHER: an all-gather, behind the products that run meanwhile. NEEDED: by need or an all-gather,
    whichever is cheaper, likewise; OVERLAP: the same, own keys' attention first; STAGED: in as many
    stages as ranks, behind the attention of all stages but one, without launches (`cp.stages` has
    them). RING: from neighbour to neighbour while attention over the chunk before runs.
    """

    GATHER = "gather"
    NEEDED = "needed"
    OVERLAP = "needed, overlap"
    STAGED = "needed, staged"
    RING = "ring"


@dataclass(frozen=True, slots=True)
class Priced:
    """ns of a micro-batch. waits: how much of it is waited for keys. rows: of the fullest rank."""

    total: float
    waits: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices micro-batches of one layer of the 7B model on sub-groups of any degree.

    rows: most tokens of a rank. Sharding and prices are kept, as several schedules share them.
    """

    tp: int
    rows: int
    profile: KernelProfile = field(default_factory=lambda: load_profile("h100"))
    _costs: dict[tuple[int, bool], ProfiledWorkload] = field(default_factory=dict, repr=False)
    _per_row: dict[int, float] = field(default_factory=dict, repr=False)
    _found: dict[tuple[object, ...], Priced] = field(default_factory=dict, repr=False)

    def cost(self, degree: int, *, overlaps: bool = False) -> ProfiledWorkload:
        key = degree, overlaps
        if key not in self._costs:
            self._costs[key] = self._cost_of(degree, self.rows * degree, overlaps=overlaps)
        return self._costs[key]

    def _cost_of(self, degree: int, tokens: int, *, overlaps: bool = False) -> ProfiledWorkload:
        return ProfiledWorkload(
            model=MODEL,
            parallel=ParallelSpec(tp=self.tp, cp=degree, pp=1, dp=1),
            profile=self.profile,
            micro_batch_tokens=tokens,
            tp_overlap=TP_OVERLAP,
            overlaps=overlaps,
        )

    def linear_ns(self, rows: int) -> float:
        """Returns the time of all but attention for so many rows of a rank, both passes."""
        at = min(self.rows, -(-rows // ROW_STEP) * ROW_STEP)
        if at not in self._per_row:
            linear = replace(self.cost(1).linear, micro_batch_tokens=at)
            self._per_row[at] = sum(linear.ns_per_token.values())
        return rows * self._per_row[at]

    def ideal_ns(self, lengths: IntArray, *, num_ranks: int) -> float:
        """Returns the time of a step if ranks shared attention of uncut samples and the rows of
        full micro-batches evenly, and waited for nothing."""
        attention = ideal_kernels_ns(lengths, self.cost(1), cp=num_ranks)
        return attention + self.linear_ns(self.rows) / self.rows * int(lengths.sum()) / num_ranks

    def work_ns(self, lengths: IntArray) -> FloatArray:
        """Returns the time of each sample on one rank, in a full micro-batch."""
        forward, backward = self.cost(1).segment_times_ns(lengths, lengths)
        return forward + backward + lengths * (self.linear_ns(self.rows) / self.rows)

    def of(self, lengths: IntArray, degree: int, *, strategy: str, exchange: Exchange) -> Priced:
        """Returns the price of a micro-batch of samples of these lengths, shape [num_samples]."""
        lengths = np.sort(lengths)
        key = (degree, strategy, exchange, lengths.tobytes())
        if key not in self._found:
            self._found[key] = self._priced(lengths, degree, strategy, exchange)
        return self._found[key]

    def _priced(self, lengths: IntArray, degree: int, strategy: str, exchange: Exchange) -> Priced:
        overlaps = exchange in (Exchange.OVERLAP, Exchange.STAGED)
        cost = self.cost(degree, overlaps=overlaps)
        is_whole = exchange in (Exchange.GATHER, Exchange.RING)
        choice = ExchangeChoice.GATHER if is_whole else ExchangeChoice.AUTO
        plan = shard(lengths, cp=degree, strategy=strategy, cost=cost, exchange=choice)
        kernels = [passes[0] for passes in kernels_ns([plan], cost, cp=degree)]
        match exchange:
            case Exchange.RING:
                waits = ring_waits_ns(plan, cost)
            case Exchange.STAGED:
                waits = staged_waits_ns(plan, cost)
            case _:
                waits = waits_ns(plan, cost)
        rows = int(plan.tokens.max())
        slowest = [float((k + w).max()) for k, w in zip(kernels, waits, strict=True)]
        waited = sum(slowest) - sum(float(k.max()) for k in kernels)
        return Priced(self.linear_ns(rows) + sum(slowest), waited, rows)


def ring_waits_ns(plan: ShardingPlan, cost: ProfiledWorkload) -> tuple[float, float]:
    """Returns what a ring is waited for, forward and backward: all rows go round, as many bytes as
    in an all-gather, while attention over the chunk before runs, that is all but one in m."""
    if plan.cp == 1:
        return 0.0, 0.0
    there, again, back = cost.transfers_ns(None, plan.num_tokens, cp=plan.cp)
    forward, backward = (float(passes[0].min()) for passes in kernels_ns([plan], cost, cp=plan.cp))
    hides = (plan.cp - 1) / plan.cp
    return max(0.0, there - hides * forward), max(0.0, again + back - hides * backward)


def staged_waits_ns(plan: ShardingPlan, cost: ProfiledWorkload) -> tuple[FloatArray, FloatArray]:
    """Returns what each rank waits for its plan's exchange in stages, forward and backward, shape
    [cp] each: behind the products that run meanwhile, and the attention of all stages but one."""
    if plan.cp == 1:
        return np.zeros(1), np.zeros(1)
    moved = None if plan.exchange == KeyExchange.GATHER else rows_moved(plan)
    there, again, back = cost.transfers_ns(moved, plan.num_tokens, cp=plan.cp)
    hidden = cost.products_ns(plan.num_tokens)
    forward, backward = (
        (plan.cp - 1) / plan.cp * passes[0] for passes in kernels_ns([plan], cost, cp=plan.cp)
    )
    products = hidden.again + hidden.back
    return (
        np.maximum(0.0, there - hidden.there - forward),
        np.maximum(0.0, again + back - products - backward),
    )
