"""solve: the units of one mini-batch to ranks and micro-batches.

As few micro-batches as the cap permits: units are placed (`fill`), then bins exchange units while
the step becomes shorter (`exchange`) and is not yet at the bound. Where ranks must hold equal
counts, or groups, units go to ranks first and then to each rank's bins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from wlb.balance.bound import least_time
from wlb.balance.counted import even_counts
from wlb.balance.exchange import sums_by
from wlb.balance.fill import fewest_bins, fill, fill_empty
from wlb.balance.improve import GOOD_ENOUGH, Rules, Units, improve
from wlb.balance.waiting_times import RankSlots, RankTotals, Slots
from wlb.plan import IntArray, UserError
from wlb.plan.arrays import FloatArray

NEAR = 1.01
"""Time over the bound at which one start is enough."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """bin_of: rank * num + micro-batch of each unit. bound: of the time, in units of work."""

    bin_of: IntArray
    num: int
    bound: float


def solve(units: Units, rules: Rules) -> Placed:
    """Place all units; UserError where the rules cannot be met."""
    bound = least_time(
        units.work,
        units.tokens,
        num_ranks=rules.num_ranks,
        cap=rules.cap,
        slots_wait=rules.slots_wait,
    )
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
    """Any unit on any rank. Starts from slots of different levels, mostly the best start; where
    that does not come near the bound, also from equal slots and from one slot of heavy units.
    """
    ranks = rules.num_ranks
    everywhere = np.zeros(ranks * num, np.int64)
    best, least = None, float("inf")
    for heavy in (num, 0, 1):
        bin_of = fill(
            units.work, units.tokens, num_ranks=ranks, num=num, cap=rules.cap, heavy_slots=heavy
        )
        if bin_of is None:
            return None
        fill_empty(bin_of, units.work, everywhere)
        if not rules.slots_wait:
            best = bin_of
            break
        bin_of = improve(units, bin_of, everywhere, Slots(ranks), rules, bound)
        time = Slots(ranks).time(sums_by(bin_of, units.work, ranks * num))
        if time < least:
            best, least = bin_of, time
        if least <= bound * NEAR:
            break
    assert best is not None
    bin_of = _deal(units.work, best, ranks)[best]
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
    """Ranks first, then each rank's bins; with counts also bins first, and the better of both."""
    ranks = rules.num_ranks
    layout = RankSlots(ranks, units.stay) if rules.slots_wait else RankTotals(ranks)
    rank_of_bin = np.arange(ranks * num) // num
    best, least = None, float("inf")
    for start in _starts(units, rules, num):
        if start is None:
            continue
        fill_empty(start, units.work, rank_of_bin)
        if rules.slots_wait or not units.stay:
            start = improve(units, start, rank_of_bin, layout, rules, bound)
        time = layout.time(sums_by(start, units.work, ranks * num))
        if time < least:
            best, least = start, time
        if least <= bound * GOOD_ENOUGH:
            break
    return None if best is None else _heaviest_first(units.work, best, ranks, num)


def _starts(units: Units, rules: Rules, num: int) -> Iterator[IntArray | None]:
    ranks = rules.num_ranks
    yield _filled_by_rank(units, rules, num)
    if rules.counts is not None and not units.stay and rules.slots_wait:
        bin_of = fill(units.work, units.tokens, num_ranks=ranks, num=num, cap=rules.cap)
        if bin_of is not None:
            fill_empty(bin_of, units.work, np.zeros(ranks * num, np.int64))
            yield even_counts(units, bin_of, num, rules)


def _filled_by_rank(units: Units, rules: Rules, num: int) -> IntArray | None:
    rank_of = _ranks(units, rules, num) if units.rank is None else units.rank
    bin_of = np.empty(units.work.size, np.int64)
    for rank in range(rules.num_ranks):
        mine = np.flatnonzero(rank_of == rank)
        if mine.size < num:
            return None
        part = units.select(mine)
        bins = fill(part.work, part.tokens, num_ranks=1, num=num, cap=rules.cap)
        if bins is None:
            return None
        bin_of[mine] = rank * num + bins
    return bin_of


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
    those with fewest samples).
    """
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
