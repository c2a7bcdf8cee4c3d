"""Assigns the units of one mini-batch to ranks and micro-batches.

A unit is a sample, or an atom (samples that share a micro-batch). A bin is one micro-batch of one
rank. A slot is the set of bins that run at the same time, one for each rank.

The number of micro-batches is the lowest that the token cap permits. While units do not fit, it is
raised. For each number there are two cases:

- Any unit may go to any rank (`_by_bins`). Fill bins by work (`fill`). Let bins exchange units
  until the time reaches its lower bound or does not become shorter (`improve`). Then assign bins to
  ranks.
- Ranks must have equal numbers of samples, or all samples of a group must be on one rank
  (`_by_rank`). Assign units to ranks first, then fill each rank's bins, and let bins exchange
  units.
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

CLOSE_ENOUGH = 1.01
"""Once the time is at most this factor times its lower bound, no further assignments are tried as a
start for exchanges."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """The assignment of a mini-batch's samples, or sets of samples that stay together (units)."""

    # Number of each unit's bin, shape [num_units]: rank * num + m is micro-batch m of a rank.
    bin_of: IntArray
    num: int  # number of micro-batches of each rank
    bound: float  # lower bound on the time of any assignment, in the unit of work


def solve(units: Units, rules: Rules) -> Placed:
    """Assign all units of a mini-batch to ranks and micro-batches.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        rules: What the assignment must satisfy.

    Raises:
        UserError: If the rules cannot be satisfied.
    """
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
    is_ranked = rules.counts is not None or units.stay_on_ranks
    while True:
        if rules.num_ranks * num > units.work.size:
            raise UserError(
                f"{rules.name}: {units.work.size} samples (those with equal `atoms` count as one) "
                f"are too few for {num} micro-batches of at most {rules.cap} tokens on each of "
                f"{rules.num_ranks} ranks, because each micro-batch needs at least one; give more "
                "samples, use fewer ranks, or raise max_tokens so that fewer micro-batches suffice"
            )
        tried = (_by_rank if is_ranked else _by_bins)(units, rules, num, bound)
        if tried is not None:
            return Placed(bin_of=tried, num=num, bound=bound)
        if rules.num is not None:
            raise UserError(
                f"{rules.name}: {units.tokens.sum():.0f} tokens do not fit into {num} "
                f"micro-batches of at most {rules.cap} tokens on each of {rules.num_ranks} ranks; "
                "raise num_micro_batches or max_tokens"
            )
        num += rules.multiple


def _by_bins(units: Units, rules: Rules, num: int, bound: float) -> IntArray | None:
    """Assign units to bins without regard to ranks, then bins to ranks.

    A bin is one micro-batch of one rank, and a slot is the set of bins that run at the same time.
    First, units are filled into bins such that the bins of one slot may have more work than those
    of another. Then bins exchange units, to shorten the time. This is usually best. If the time is
    still not close to the lower bound, two other ways to fill are tried: all slots with equal work,
    and only one slot with heavy units.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        rules: What the assignment must satisfy.
        num: Micro-batches of each rank.
        bound: Lower bound on the time.

    Returns:
        The number of each unit's bin (rank * num + m is micro-batch m of a rank), or None if units
        do not fit.
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
            # Only the total work of each rank matters, and the exchanges at the end of this
            # function make it equal.
            best = bin_of
            break
        bin_of = improve(units, bin_of, everywhere, Slots(ranks), rules, bound)
        time = Slots(ranks).time(sums_by(bin_of, units.work, ranks * num))
        if time < least:
            best, least = bin_of, time
        if least <= bound * CLOSE_ENOUGH:
            break
    assert best is not None
    bin_of = _assign_bins(units.work, best, ranks)[best]
    if rules.slots_wait:
        return bin_of
    return improve(units, bin_of, np.arange(ranks * num) // num, RankTotals(ranks), rules, bound)


def _assign_bins(work: FloatArray, bin_of: IntArray, ranks: int) -> IntArray:
    """Assign bins to ranks, so that ranks have nearly equal work in total.

    Bins are sorted by work and cut into slots of one bin for each rank. In every slot, the bin with
    most work goes to the rank with least work so far, and so on.

    Args:
        work: Work of each unit.
        bin_of: Bin of each unit.
        ranks: Number of ranks.

    Returns:
        The new index of each bin: rank * num + m for micro-batch m of a rank.
    """
    loads = sums_by(bin_of, work)
    slots = np.argsort(-loads, kind="stable").reshape(-1, ranks)
    total, out = np.zeros(ranks), np.empty(loads.size, np.int64)
    for slot, members in enumerate(slots):
        order = np.argsort(total, kind="stable")
        out[members] = order * len(slots) + slot
        total[order] += loads[members]
    return out


def _by_rank(units: Units, rules: Rules, num: int, bound: float) -> IntArray | None:
    """Assign units to ranks first, and then to each rank's bins (its micro-batches).

    If ranks must have equal numbers of samples, a second way is tried: fill bins first, and then
    assign them to ranks (`even_counts`). The better result is taken.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        rules: What the assignment must satisfy.
        num: Micro-batches of each rank.
        bound: Lower bound on the time of any assignment. The search stops if it gets close to it.

    Returns:
        The number of each unit's bin (rank * num + m is micro-batch m of a rank), or None if units
        do not fit.
    """
    ranks = rules.num_ranks
    layout = RankSlots(ranks, units.stay_on_ranks) if rules.slots_wait else RankTotals(ranks)
    rank_of_bin = np.arange(ranks * num) // num
    best, least = None, float("inf")
    for start in _starts(units, rules, num):
        if start is None:
            continue
        fill_empty(start, units.work, rank_of_bin)
        if rules.slots_wait or not units.stay_on_ranks:
            start = improve(units, start, rank_of_bin, layout, rules, bound)
        time = layout.time(sums_by(start, units.work, ranks * num))
        if time < least:
            best, least = start, time
        if least <= bound * GOOD_ENOUGH:
            break
    return None if best is None else _heaviest_first(units.work, best, ranks, num)


def _starts(units: Units, rules: Rules, num: int) -> Iterator[IntArray | None]:
    """Yield assignments of units to micro-batches (bins), which swaps of units then improve.

    Yields None in place of an assignment in which the units do not fit.
    """
    ranks = rules.num_ranks
    yield _filled_by_rank(units, rules, num)
    if rules.counts is not None and not units.stay_on_ranks and rules.slots_wait:
        bin_of = fill(units.work, units.tokens, num_ranks=ranks, num=num, cap=rules.cap)
        if bin_of is not None:
            fill_empty(bin_of, units.work, np.zeros(ranks * num, np.int64))
            yield even_counts(units, bin_of, num, rules)


def _filled_by_rank(units: Units, rules: Rules, num: int) -> IntArray | None:
    """Assign units to ranks, then to each rank's micro-batches (bins).

    Returns:
        The number of each unit's bin (rank * num + m is micro-batch m of a rank), or None if units
        do not fit.
    """
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
    """Sort each rank's micro-batches by descending work, so that similar ones run together.

    Args:
        work: Work of each unit.
        bin_of: Number of each unit's bin: rank * num + m is micro-batch m of a rank.
        ranks: Number of ranks.
        num: Micro-batches of each rank.

    Returns:
        The new bin of each unit.
    """
    loads = sums_by(bin_of, work, ranks * num).reshape(ranks, num)
    place = np.argsort(np.argsort(-loads, 1, kind="stable"), 1, kind="stable")
    return (np.arange(ranks)[:, None] * num + place).ravel()[bin_of]


def _ranks(units: Units, rules: Rules, num: int) -> IntArray:
    """Choose the rank of each unit, with all units of a group on the same rank.

    Groups (or units, if there are no groups) are sorted and cut into blocks. A block has as many
    groups as there are ranks, and every rank gets one of them. Then ranks exchange groups to make
    their work more equal.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        rules: What the assignment must satisfy.
        num: Micro-batches of each rank.

    Returns:
        The rank of each unit, shape [num_units].
    """
    group = np.arange(units.work.size) if units.group is None else units.group
    sums = [sums_by(group, x) for x in (units.work, units.tokens, units.samples)]
    # Sort by number of samples and then by work, so that the groups of a block have equally many
    # samples if possible.
    order = np.lexsort((-sums[0], -sums[2]))
    if order.size < rules.num_ranks:
        raise UserError(
            f"{rules.name}: {order.size} groups are too few for {rules.num_ranks} ranks, because "
            "groups_on='rank' keeps each group on one rank; give more groups, or set "
            "groups_on='mini_batch'"
        )
    wholes = Units(work=sums[0][order], tokens=sums[1][order], samples=sums[2][order])
    has_counts = rules.counts is not None
    rank_of = assign_blocks(wholes.work, wholes.samples, rules.num_ranks, counts=has_counts)
    every = np.arange(rules.num_ranks)
    if has_counts:
        _check_counts(sums_by(rank_of, wholes.samples, rules.num_ranks), rules)
    totals = replace(rules, cap=rules.cap * num)
    # `SharedBins` needs units by descending work.
    by_work = np.argsort(-wholes.work, kind="stable")
    improved = np.empty_like(rank_of)
    improved[order[by_work]] = improve(
        wholes.select(by_work), rank_of[by_work], every, RankTotals(rules.num_ranks), totals, 0.0
    )
    return improved[group]


def assign_blocks(work: FloatArray, samples: FloatArray, num: int, *, counts: bool) -> IntArray:
    """Divide items into `num` parts with nearly equal work.

    Items are cut into blocks of `num` consecutive ones. Each part gets one item of every block.

    Args:
        work: Work of each item, shape [num_items].
        samples: Number of samples of each item, shape [num_items].
        num: Number of parts.
        counts: If False, the item with most work in a block goes to the part with least work so
            far, the next item to the part with the next least work, and so on. If True, the item
            with most work goes to the part with fewest samples so far, and so on. Work decides only
            between parts with equally many samples.

    Returns:
        The part of each item, shape [num_items].
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
    """Raise UserError if a rank has fewer or more samples than the rules permit.

    Args:
        held: Number of samples of each rank, shape [num_ranks].
        rules: The permitted numbers.
    """
    least, most = rules.counts or (0, 0)
    if held.min() < least or held.max() > most:
        raise UserError(
            f"{rules.name}: equal_counts requires {least} to {most} samples on each rank, but "
            f"ranks would have {held.min():.0f} to {held.max():.0f}, because samples with equal "
            "`groups` or `atoms` must stay together; raise count_slack, or make all groups "
            "and atoms equally large"
        )
