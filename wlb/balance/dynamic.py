"""dynamic: micro-batches that each have a context-parallel degree of their own, among all ranks.

A slot's ranks are divided into blocks of 1, 2, 4, ... ranks; the ranks of a block share one
micro-batch and take its work over its degree. A unit needs the degree at which its tokens fit and
its share is no longer than a slot's. Blocks of a degree exchange units as elsewhere.
"""

from dataclasses import dataclass

import numpy as np

from wlb.balance.exchange import SharedBins, share
from wlb.balance.fill import fill_empty
from wlb.balance.improve import Rules, Units
from wlb.plan import FloatArray, IntArray, UserError
from wlb.plan.arrays import first_true

ROUNDS = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamicPlaced:
    """block_of: of each unit. degree: ranks of each block. grid: the block of each rank and slot,
    shape [num_ranks, num]; ranks of a block follow one another. bound: of the time, in work.
    """

    block_of: IntArray
    degree: FloatArray
    grid: IntArray
    bound: float


def solve_dynamic(units: Units, rules: Rules, most: int) -> DynamicPlaced:
    """Place all units; most: the largest degree. UserError where the rules cannot be met."""
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
                f"{rules.name}: {units.tokens.sum():.0f} tokens found no place in {num} "
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
            "with dynamic_cp a sample may be on several ranks: it goes with neither equal_counts "
            "nor groups_on='rank'"
        )
    if units.rank is not None:
        raise UserError(
            "with dynamic_cp a sample may be on several ranks, so ranks cannot say where samples "
            "are; leave ranks out, or dynamic_cp"
        )
    if (i := first_true(units.tokens > rules.cap * most)) is not None:
        raise UserError(
            f"{rules.name}: a sample of {units.tokens[i]:.0f} tokens needs more than dynamic_cp = "
            f"{most} ranks of max_tokens = {rules.cap}; raise one of them"
        )


def _degrees(units: Units, cap: int, level: float, most: int) -> IntArray:
    """The smallest power of two at which a unit fits in the cap and in the level."""
    need = np.maximum(units.tokens / cap, np.minimum(units.work / level, most))
    # Exponents are exact, where a logarithm may differ between CPUs.
    fraction, exponent = np.frexp(np.maximum(need, 1.0))
    return 2 ** (exponent - (fraction == 0.5)).astype(np.int64)


def _place(
    units: Units, rules: Rules, num: int, level: float, most: int
) -> tuple[IntArray, FloatArray] | None:
    """Block of each unit and degree of each block, or None if `num` slots are too few."""
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
    """Each unit to the block with the lowest time that has its degree and room; where there is
    none, the degree that needs one more block.
    """
    room, time = degree * cap, np.zeros(degree.size)
    out = np.zeros(units.work.size, np.int64)
    for unit in np.lexsort((-units.work, -need)).tolist():
        after = time + units.work[unit] / degree
        # A block of more ranks than needed takes a unit only while it stays within the level.
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
    tokens = np.bincount(block_of, units.tokens, degree.size)
    return bool(
        (tokens > degree * cap).any() or np.bincount(block_of, minlength=degree.size).min() < 1
    )


def _exchange(units: Units, block_of: IntArray, degree: FloatArray, cap: int) -> IntArray:
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
            share(
                bins, order[::-1][:half], low, excess=loads, cap=int(d) * cap, spare=None, turn=turn
            )
        out[mine] = chosen[bins.bin_of()]
    return out


def _grid(
    work: FloatArray, block_of: IntArray, degree: FloatArray, ranks: int
) -> tuple[IntArray, FloatArray, IntArray]:
    """Blocks numbered slot by slot: widest first, which powers of two fill without a gap."""
    load = np.bincount(block_of, work, degree.size) / degree
    order = np.lexsort((-load, -degree))
    new = np.empty(order.size, np.int64)
    new[order] = np.arange(order.size)
    sorted_degree = degree[order]
    rows = np.repeat(np.arange(order.size), sorted_degree.astype(np.int64))
    return rows.reshape(-1, ranks).T.copy(), sorted_degree, new[block_of]
