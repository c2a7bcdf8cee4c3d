"""solve: the units of one mini-batch to ranks and micro-batches.

As few micro-batches as the cap permits: units are placed (`fill`), then bins exchange units while
the step becomes shorter (`exchange`) and is not yet at the bound. Where ranks must hold equal
counts, or groups, units go to ranks first and then to each rank's bins.
"""

from dataclasses import dataclass, replace

import numpy as np

from wlb.balance.bound import least_time
from wlb.balance.exchange import SharedBins, share, sums_by
from wlb.balance.fill import fewest_bins, fill, fill_empty
from wlb.balance.waits import RankSlots, RankTotals, Slots, Waits
from wlb.plan import IntArray, UserError
from wlb.plan.arrays import FloatArray

GOOD_ENOUGH = 1.0003
"""Time over the bound at which exchanges end."""
STALE, WORTHWHILE = 10, 1e-4
"""Exchanges end once this many rounds together have gained less than this share of the time."""
MOST_PAIRS = 7_000
"""Pairs of bins looked at in all, which bounds the time: rounds = MOST_PAIRS / pairs of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an assignment has to keep to; see `balance_step`.

    counts: fewest and most samples of a rank, None where any number will do. name: of the
    mini-batch, for errors.
    """

    num_ranks: int
    cap: int
    slots_wait: bool
    multiple: int = 1
    at_least: int = 1
    num: int | None = None
    counts: tuple[int, int] | None = None
    name: str = "the step"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """What is placed as a whole, heaviest first: float64 whole numbers, shape [num_units].

    group: of each unit, numbered from 0, where the units of a group must meet on one rank.
    rank: of each unit, where they stay on the ranks that have them.
    """

    work: FloatArray
    tokens: FloatArray
    samples: FloatArray
    group: IntArray | None = None
    rank: IntArray | None = None

    def select(self, chosen: IntArray) -> "Units":
        return Units(
            work=self.work[chosen], tokens=self.tokens[chosen], samples=self.samples[chosen]
        )

    @property
    def stay(self) -> bool:
        """Whether exchanges may not take a unit from its rank."""
        return self.group is not None or self.rank is not None

    def padded(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        work, tokens, samples = (np.append(x, 0.0) for x in (self.work, self.tokens, self.samples))
        return work, tokens, samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """bin_of: rank * num + micro-batch of each unit. bound: of the time, in units of work."""

    bin_of: IntArray
    num: int
    bound: float


def solve(units: Units, rules: Rules) -> Placed:
    """Place all units; UserError where the rules cannot be met."""
    bound = least_time(
        units.work, units.tokens, num_ranks=rules.num_ranks, cap=rules.cap,
        slots_wait=rules.slots_wait,
    )  # fmt: skip
    fewest = fewest_bins(units.tokens, num_ranks=rules.num_ranks, cap=rules.cap)
    least = max(rules.at_least, fewest)
    num = rules.num or -(-least // rules.multiple) * rules.multiple
    is_ranked = rules.counts is not None or units.stay
    while True:
        if rules.num_ranks * num > units.work.size:
            raise UserError(
                f"{rules.name} has {units.work.size} samples or atoms, which cannot fill {num} "
                f"micro-batches of at most {rules.cap} tokens on each of {rules.num_ranks} ranks; "
                f"give it more samples, fewer ranks or a larger max_tokens"
            )
        tried = (_by_rank if is_ranked else _free)(units, rules, num, bound)
        if tried is not None:
            return Placed(bin_of=tried, num=num, bound=bound)
        if rules.num is not None:
            raise UserError(
                f"{rules.name}: {units.tokens.sum():.0f} tokens found no place in {num} "
                f"micro-batches of at most {rules.cap} on each of {rules.num_ranks} ranks; raise "
                f"num_micro_batches or max_tokens"
            )
        num += rules.multiple


def _free(units: Units, rules: Rules, num: int, bound: float) -> IntArray | None:
    ranks = rules.num_ranks
    bin_of = fill(units.work, units.tokens, num_ranks=ranks, num=num, cap=rules.cap)
    if bin_of is None:
        return None
    everywhere = np.zeros(ranks * num, np.int64)
    fill_empty(bin_of, units.work, everywhere)
    if rules.slots_wait:
        bin_of = improve(units, bin_of, everywhere, Slots(ranks), rules, bound)
    bin_of = _deal(units.work, bin_of, ranks)[bin_of]
    if rules.slots_wait:
        return bin_of
    return improve(units, bin_of, np.arange(ranks * num) // num, RankTotals(ranks), rules, bound)


def _deal(work: FloatArray, bin_of: IntArray, ranks: int) -> IntArray:
    """A new number rank * num + slot for each bin: slot after slot, heavy bins to light ranks."""
    loads = sums_by(bin_of, work)
    slots = np.argsort(-loads, kind="stable").reshape(-1, ranks)
    total, out = np.zeros(ranks), np.empty(loads.size, np.int64)
    for slot, members in enumerate(slots):
        order = np.argsort(total, kind="stable")
        out[members] = order * len(slots) + slot
        total[order] += loads[members]
    return out


def _by_rank(units: Units, rules: Rules, num: int, bound: float) -> IntArray | None:
    ranks = rules.num_ranks
    rank_of = _ranks(units, rules, num) if units.rank is None else units.rank
    bin_of = np.empty(units.work.size, np.int64)
    for rank in range(ranks):
        mine = np.flatnonzero(rank_of == rank)
        if mine.size < num:
            return None
        part = units.select(mine)
        bins = fill(part.work, part.tokens, num_ranks=1, num=num, cap=rules.cap)
        if bins is None:
            return None
        bin_of[mine] = rank * num + bins
    rank_of_bin = np.arange(ranks * num) // num
    fill_empty(bin_of, units.work, rank_of_bin)
    if rules.slots_wait:
        bin_of = improve(units, bin_of, rank_of_bin, RankSlots(ranks, units.stay), rules, bound)
    elif not units.stay:
        bin_of = improve(units, bin_of, rank_of_bin, RankTotals(ranks), rules, bound)
    return _heaviest_first(units.work, bin_of, ranks, num)


def _heaviest_first(work: FloatArray, bin_of: IntArray, ranks: int, num: int) -> IntArray:
    loads = sums_by(bin_of, work, ranks * num).reshape(ranks, num)
    place = np.argsort(np.argsort(-loads, 1, kind="stable"), 1, kind="stable")
    return (np.arange(ranks)[:, None] * num + place).ravel()[bin_of]


def _ranks(units: Units, rules: Rules, num: int) -> IntArray:
    """The rank of each unit: block by block of as many as there are ranks, then by exchanges."""
    group = np.arange(units.work.size) if units.group is None else units.group
    sums = [sums_by(group, x) for x in (units.work, units.tokens, units.samples)]
    # Blocks of equal counts, heaviest first: a rank gets one of each.
    order = np.lexsort((-sums[0], -sums[2]))
    if order.size < rules.num_ranks:
        raise UserError(
            f"{rules.name} has {order.size} groups, which cannot fill {rules.num_ranks} ranks; "
            f"give it more groups, or groups_on='mini_batch'"
        )
    whole = Units(work=sums[0][order], tokens=sums[1][order], samples=sums[2][order])
    has_counts = rules.counts is not None
    rank_of = deal_blocks(whole.work, whole.samples, rules.num_ranks, counts=has_counts)
    every = np.arange(rules.num_ranks)
    if has_counts:
        _check_counts(sums_by(rank_of, whole.samples, rules.num_ranks), rules)
    totals = replace(rules, cap=rules.cap * num)
    # `SharedBins` wants the heaviest first.
    again = np.argsort(-whole.work, kind="stable")
    improved = np.empty_like(rank_of)
    improved[order[again]] = improve(
        whole.select(again), rank_of[again], every, RankTotals(rules.num_ranks), totals, 0.0
    )
    return improved[group]


def deal_blocks(work: FloatArray, samples: FloatArray, num: int, *, counts: bool) -> IntArray:
    """`num` parts of items, each block's heaviest to the part with least work (with counts: of
    those with fewest samples)."""
    total, out, held = np.zeros(num), np.empty(work.size, np.int64), np.zeros(num)
    for start in range(0, work.size, num):
        block = work[start : start + num]
        items = start + np.argsort(-block, kind="stable")
        order = np.lexsort((total, held)) if counts else np.argsort(total, kind="stable")
        out[items] = order[: block.size]
        total[order[: block.size]] += work[items]
        held[order[: block.size]] += samples[items]
    return out


def _check_counts(held: FloatArray, rules: Rules) -> None:
    least, most = rules.counts or (0, 0)
    if held.min() < least or held.max() > most:
        raise UserError(
            f"{rules.name}: groups and atoms give ranks {held.min():.0f} to {held.max():.0f} "
            f"samples, and equal_counts asks for {least} to {most}; raise count_slack, or give "
            f"groups of equal size"
        )


def improve(
    units: Units, bin_of: IntArray, rank: IntArray, waits: Waits, rules: Rules, bound: float
) -> IntArray:
    """Exchanges between bins while they shorten the step; the best assignment found."""
    bins = SharedBins.of(units.padded(), bin_of, rank)
    loads = bins.work[bins.members].sum(1)
    best, best_members = waits.time(loads), bins.members
    stale_from, worth, turn, rounds = 0, best, 0, 1
    while turn < rounds and best > bound * GOOD_ENOUGH:
        if turn % 6 == 0:
            waits.aim(bins, loads)
        excess = waits.excess(loads)
        top, low = waits.pairs(excess, turn)
        if not top.size:  # one bin a rank, whose units may not leave it
            break
        rounds = min(60, max(16, MOST_PAIRS // top.size))
        spare = None if rules.counts is None else _spare(bins, rules, top, low)
        before = bins.members
        bins.members = before.copy() if before is best_members else before
        share(bins, top, low, excess=excess, cap=rules.cap, spare=spare, turn=turn)
        loads = bins.work[bins.members].sum(1)
        now = waits.time(loads)
        if now < best:
            best, best_members = now, bins.members
        if best < worth * (1 - WORTHWHILE):
            worth, stale_from = best, turn
        turn += 1
        if turn - stale_from > STALE:
            break
    bins.members = best_members
    return bins.bin_of()


def _spare(bins: SharedBins, rules: Rules, top: IntArray, low: IntArray) -> FloatArray:
    """Samples that each bin may gain and lose: what its rank may, divided over the rank's bins of
    this round."""
    least, most = rules.counts or (0, 0)
    held = sums_by(bins.rank, bins.samples[bins.members].sum(1))
    busy = np.bincount(bins.rank[np.concatenate([top, low])], minlength=held.size).clip(1)
    return np.stack([(most - held) // busy, (held - least) // busy])[:, bins.rank]
