"""Balances with `dynamic_cp`: each micro-batch has the context-parallel degree that it needs.

In every slot (micro-batches that run at the same time), the ranks are divided into blocks of 1, 2,
4, ... ranks. The ranks of a block share one micro-batch, which takes its work over the degree:

    rank       0     1     2     3
    slot 0   | a long sample | b | c |      degrees 2, 1, 1

1. A unit gets the smallest degree at which its tokens fit and its time is at most a slot's.
2. There are as many blocks of each degree as its units need.
3. Each unit goes to the block with least time that has its degree and room.
4. Blocks of equal degree exchange units (`wlb.balance.exchange`).
"""

from dataclasses import dataclass

import numpy as np

from wlb.balance.exchange import SharedBins, redistribute
from wlb.balance.fill import fill_empty
from wlb.balance.improve import Rules, Units
from wlb.plan import FloatArray, IntArray, UserError
from wlb.plan.arrays import first_true

ROUNDS = 24
"""Rounds of exchanges among the blocks of a degree."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamicPlaced:
    """The assignment of a mini-batch's units to blocks of ranks."""

    block_of: IntArray  # block of each unit, shape [num_units]
    degree: FloatArray  # number of ranks of each block, shape [num_blocks]
    grid: IntArray  # block of each rank and slot; ranks of a block are adjacent, [num_ranks, num]
    bound: float  # lower bound on the time, in the unit of work


def solve_dynamic(units: Units, rules: Rules, most: int) -> DynamicPlaced:
    """Assign all units to blocks of ranks.

    Args:
        units: The units of a mini-batch.
        rules: The rules.
        most: Largest degree, a power of two.

    Raises:
        UserError: If the rules cannot be satisfied.
    """
    _check(units, rules, most)
    ranks = rules.num_ranks
    total = float(units.work.sum())
    fewest = -(-int(units.tokens.sum()) // (rules.cap * ranks))
    least = max(1, rules.at_least, fewest)
    num = rules.num or -(-least // rules.multiple) * rules.multiple
    while True:
        if num > units.work.size:
            raise UserError(
                f"{rules.name}: {units.work.size} samples cannot fill {num} micro-batches of "
                f"{ranks} ranks; give it more samples or a larger max_tokens"
            )
        level = max(total / (ranks * num), float(units.work[0]) / most)
        placed = _place(units, rules, num, level, most)
        if placed is not None:
            block_of, degree = placed
            bound = max(total / ranks, float(units.work[0]) / most)
            grid, degree, block_of = _grid(units.work, block_of, degree, ranks)
            return DynamicPlaced(block_of=block_of, degree=degree, grid=grid, bound=bound)
        if rules.num is not None:
            raise UserError(
                f"{rules.name}: {units.tokens.sum():.0f} tokens do not fit into {num} "
                f"micro-batches of {ranks} ranks with {rules.cap} tokens each; raise "
                f"num_micro_batches or max_tokens"
            )
        num += rules.multiple


def _check(units: Units, rules: Rules, most: int) -> None:
    if most & (most - 1) or rules.num_ranks % most:
        raise UserError(
            f"dynamic_cp = {most} must be a power of two that divides num_ranks = {rules.num_ranks}"
        )
    if rules.counts is not None or units.group is not None:
        raise UserError(
            "with dynamic_cp a sample may be on several ranks, so it cannot be combined with "
            "equal_counts or groups_on='rank'"
        )
    if units.rank is not None:
        raise UserError(
            "with dynamic_cp a sample may be on several ranks, so it cannot be combined with "
            "ranks; leave out one of them"
        )
    if (i := first_true(units.tokens > rules.cap * most)) is not None:
        raise UserError(
            f"{rules.name}: a sample of {units.tokens[i]:.0f} tokens needs more than dynamic_cp = "
            f"{most} ranks of max_tokens = {rules.cap}; raise one of them"
        )


def _degrees(units: Units, cap: int, level: float, most: int) -> IntArray:
    """Return the smallest power of two at which each unit's tokens and work fit, [num_units].

    Args:
        units: The units.
        cap: Most tokens of one rank in a micro-batch.
        level: Time that a slot should take.
        most: Largest degree.
    """
    need = np.maximum(units.tokens / cap, np.minimum(units.work / level, most))
    # Round up by the exponent, which is exact; a logarithm may differ between CPUs.
    fraction, exponent = np.frexp(np.maximum(need, 1.0))
    return 2 ** (exponent - (fraction == 0.5)).astype(np.int64)


def _place(
    units: Units, rules: Rules, num: int, level: float, most: int
) -> tuple[IntArray, FloatArray] | None:
    """Assign units to blocks in `num` slots.

    Returns:
        The block of each unit and the degree of each block, or None if `num` slots are too few.
    """
    # Begin with as many blocks of each degree as its units need by work and by tokens.
    need = _degrees(units, rules.cap, level, most)
    rows = rules.num_ranks * num
    blocks: dict[int, int] = {}
    for d in sorted(set(need.tolist()) - {1}, reverse=True):
        mine = need == d
        shares = max(
            float(units.work[mine].sum()) / (d * level), units.tokens[mine].sum() / (d * rules.cap)
        )
        blocks[d] = int(np.ceil(shares - 1e-9))
    while True:
        left = rows - sum(d * n for d, n in blocks.items())
        if left < 0:
            return None
        degree = np.repeat([*blocks, 1], [*blocks.values(), left]).astype(np.float64)
        block_of = _fill(units, need, degree, rules.cap, level)
        if isinstance(block_of, int):
            # Units of this degree found no room: add a block. Blocks of one rank already have all
            # the rest.
            if block_of == 1:
                return None
            blocks[block_of] += 1
            continue
        fill_empty(block_of, units.work, np.zeros(degree.size, np.int64))
        if _is_over(units, block_of, degree, rules.cap):
            return None
        return _exchange(units, block_of, degree, rules.cap), degree


def _fill(
    units: Units, need: IntArray, degree: FloatArray, cap: int, level: float
) -> IntArray | int:
    """Assign each unit to the block with least time that has its degree and room.

    Args:
        units: The units.
        need: Degree that each unit needs.
        degree: Degree of each block.
        cap: Most tokens of one rank in a micro-batch.
        level: Time that a slot should take.

    Returns:
        The block of each unit, or, if a unit found no block, the degree that it needs.
    """
    room, time = degree * cap, np.zeros(degree.size)
    out = np.zeros(units.work.size, np.int64)
    for unit in np.lexsort((-units.work, -need)).tolist():
        after = time + units.work[unit] / degree
        # A block of a larger degree than necessary takes a unit only up to the level.
        wide = (degree > need[unit]) & (after > level)
        bad = (degree < need[unit]) | (room < units.tokens[unit]) | wide
        after[bad] = np.inf
        block = int(np.argmin(np.where(bad, np.inf, time)))
        if bad[block]:
            return int(need[unit])
        out[unit] = block
        room[block] -= units.tokens[unit]
        time[block] += units.work[unit] / degree[block]
    return out


def _is_over(units: Units, block_of: IntArray, degree: FloatArray, cap: int) -> bool:
    """Return whether a block has too many tokens, or no unit."""
    tokens = np.bincount(block_of, units.tokens, degree.size)
    return bool(
        (tokens > degree * cap).any() or np.bincount(block_of, minlength=degree.size).min() < 1
    )


def _exchange(units: Units, block_of: IntArray, degree: FloatArray, cap: int) -> IntArray:
    """Let the blocks of each degree exchange units, and return the new block of each unit."""
    out = block_of.copy()
    for d in np.unique(degree).tolist():
        chosen = np.flatnonzero(degree == d)
        mine = np.flatnonzero(degree[out] == d)
        if chosen.size < 2:
            continue
        number = np.zeros(degree.size, np.int64)
        number[chosen] = np.arange(chosen.size)
        bins = SharedBins.of(
            units.select(mine).padded(), number[out[mine]], np.zeros(chosen.size, np.int64)
        )
        for turn in range(ROUNDS):
            loads = bins.work[bins.members].sum(1)
            order = np.argsort(loads, kind="stable")
            half = chosen.size // 2
            low = np.roll(order[:half], turn % half)
            redistribute(
                bins, order[::-1][:half], low, excess=loads, cap=int(d) * cap, spare=None, turn=turn
            )
        out[mine] = chosen[bins.bin_of()]
    return out


def _grid(
    work: FloatArray, block_of: IntArray, degree: FloatArray, ranks: int
) -> tuple[IntArray, FloatArray, IntArray]:
    """Arrange blocks in slots, and number them in this order.

    Sorted by descending degree, powers of two fill the ranks of each slot without a gap.

    Returns:
        The block of each rank and slot, the degree of each block, and the block of each unit.
    """
    load = np.bincount(block_of, work, degree.size) / degree
    order = np.lexsort((-load, -degree))
    new = np.empty(order.size, np.int64)
    new[order] = np.arange(order.size)
    sorted_degree = degree[order]
    rows = np.repeat(np.arange(order.size), sorted_degree.astype(np.int64))
    return rows.reshape(-1, ranks).T.copy(), sorted_degree, new[block_of]
