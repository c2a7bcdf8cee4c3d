"""Balances with `dynamic_cp`: each micro-batch has the context-parallel degree that it needs.

A slot is the set of the ranks' i-th micro-batches, which run at the same time. In every slot, the
ranks are divided into blocks of 1, 2, 4, ... ranks. The ranks of a block share one micro-batch by
context parallelism. Their number is the degree of the block, and the time of the micro-batch is its
work divided by the degree:

    rank       0     1     2     3
    slot 0   | a long sample | b | c |      degrees 2, 1, 1

A unit is a sample, or samples that must share a micro-batch.

1. A unit needs the smallest degree at which its tokens fit and its time is at most the mean time of
   a slot. If the largest unit takes longer than that even at the highest degree that is permitted,
   its time is the limit for all units.
2. As many blocks of each degree are made as the units of this degree need.
3. Each unit goes to the block that has least time so far, the right degree and room for it.
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
"""Number of rounds in which blocks of equal degree exchange units."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamicPlaced:
    """The assignment of a mini-batch's units to blocks: ranks that share a micro-batch.

    A unit is a sample, or samples that must share a micro-batch.
    """

    block_of: IntArray  # block of each unit, shape [num_units]
    degree: FloatArray  # number of ranks of each block, shape [num_blocks]
    # grid[r, m] is the block to which rank r belongs in its m-th micro-batch. The ranks of a block
    # are adjacent. Shape [num_ranks, num_micro_batches].
    grid: IntArray
    bound: float  # lower bound on the time of any assignment, in the unit of work


def solve_dynamic(units: Units, rules: Rules, most: int) -> DynamicPlaced:
    """Assign all units of a mini-batch to blocks: ranks that share a micro-batch.

    Args:
        units: The mini-batch's samples, or sets of samples that share a micro-batch.
        rules: What the assignment must satisfy.
        most: Most ranks of a block, a power of two.

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
                f"{rules.name}: {units.work.size} samples (those with equal `atoms` count as one) "
                f"are too few for {num} micro-batches on each of {ranks} ranks, because each "
                "micro-batch needs at least one; give more samples, or raise max_tokens so that "
                "fewer micro-batches suffice"
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
                f"micro-batches of at most max_tokens = {rules.cap} tokens on each of {ranks} "
                "ranks; raise num_micro_batches or max_tokens"
            )
        num += rules.multiple


def _check(units: Units, rules: Rules, most: int) -> None:
    if most & (most - 1) or rules.num_ranks % most:
        raise UserError(
            f"dynamic_cp = {most} must be a power of two and a divisor of num_ranks = "
            f"{rules.num_ranks}; change dynamic_cp or num_ranks"
        )
    if rules.counts is not None or units.group is not None:
        other = "equal_counts" if rules.counts is not None else "groups_on = 'rank'"
        raise UserError(
            f"dynamic_cp = {most} may put a sample on several ranks, so it cannot be used with "
            f"{other}; set dynamic_cp = 1, or leave out {other}"
        )
    if units.rank is not None:
        raise UserError(
            f"dynamic_cp = {most} may put a sample on several ranks, but `ranks` gives each "
            "sample one rank; set dynamic_cp = 1, or leave out `ranks`"
        )
    if (i := first_true(units.tokens > rules.cap * most)) is not None:
        raise UserError(
            f"{rules.name}: a sample of {units.tokens[i]:.0f} tokens is too long for dynamic_cp = "
            f"{most} ranks, each with at most max_tokens = {rules.cap}; raise dynamic_cp or "
            "max_tokens"
        )


def _degrees(units: Units, cap: int, level: float, most: int) -> IntArray:
    """Return how many ranks each unit needs, a power of two, shape [num_units].

    It is the smallest number at which the tokens fit and the unit takes at most `level`.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        cap: Most tokens of one rank in a micro-batch.
        level: Time that a micro-batch should take at most, in the unit of work.
        most: Most ranks that may share a micro-batch. A unit may take longer than `level` with
            this number of ranks.
    """
    need = np.maximum(units.tokens / cap, np.minimum(units.work / level, most))
    # Round up to a power of two by the exponent of the number, which is exact. A logarithm may
    # differ between CPUs.
    fraction, exponent = np.frexp(np.maximum(need, 1.0))
    return 2 ** (exponent - (fraction == 0.5)).astype(np.int64)


def _place(
    units: Units, rules: Rules, num: int, level: float, most: int
) -> tuple[IntArray, FloatArray] | None:
    """Try to assign all units to blocks (ranks that share a micro-batch) in `num` slots.

    A slot is the set of the ranks' i-th micro-batches, and is divided into blocks.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        rules: What the assignment must satisfy.
        num: Micro-batches of each rank.
        level: Time that a slot should take, in the unit of work.
        most: Most ranks of a block.

    Returns:
        The block of each unit and the degree (number of ranks) of each block, or None if the units
        do not fit into `num` slots.
    """
    # Begin, for each degree, with as many blocks as the units of this degree need for their work
    # and their tokens.
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
            # `_fill` returned the degree of a unit that found no room, so add a block of this
            # degree. For degree 1 this is impossible, because all other ranks are blocks of one
            # rank already.
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
    """Assign each unit to a block with enough ranks and room, the one with least time so far.

    A block is a set of ranks that share one micro-batch.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        need: Number of ranks that each unit needs, shape [num_units].
        degree: Number of ranks of each block, shape [num_blocks].
        cap: Most tokens of one rank in a micro-batch.
        level: Time that a micro-batch should take, in the unit of work.

    Returns:
        The block of each unit. If a unit fits into no block, the number of ranks that it needs.
    """
    room, time = degree * cap, np.zeros(degree.size)
    out = np.zeros(units.work.size, np.int64)
    for unit in np.lexsort((-units.work, -need)).tolist():
        after = time + units.work[unit] / degree
        # A block with more ranks than the unit needs may take the unit only if the block's time
        # stays within `level`.
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
    """Return whether any block (ranks that share a micro-batch) has too many tokens, or no unit.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        block_of: Number of the block that processes each unit.
        degree: Number of ranks of each block.
        cap: Most tokens of one rank in a micro-batch.
    """
    tokens = np.bincount(block_of, units.tokens, degree.size)
    return bool(
        (tokens > degree * cap).any() or np.bincount(block_of, minlength=degree.size).min() < 1
    )


def _exchange(units: Units, block_of: IntArray, degree: FloatArray, cap: int) -> IntArray:
    """Let blocks with equal numbers of ranks exchange units, to make their times more equal.

    A block is a set of ranks that share one micro-batch.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        block_of: Block of each unit.
        degree: Number of ranks of each block.
        cap: Most tokens of one rank in a micro-batch.

    Returns:
        The new block of each unit.
    """
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
    """Decide which ranks form each block in which micro-batch, and renumber the blocks.

    A block is a set of ranks that share a micro-batch. Blocks are sorted by descending number of
    ranks, then by descending time, and are renumbered in this order. Numbers of ranks are powers of
    two. So, taken in this order, blocks fill all ranks of the first micro-batch exactly, then those
    of the second one, and so on.

    Args:
        work: Work of each unit (samples that share a micro-batch).
        block_of: Block of each unit.
        degree: Number of ranks of each block.
        ranks: Number of all ranks.

    Returns:
        The block of each rank in each of its micro-batches, shape [num_ranks, num_micro_batches];
        the number of ranks of each block; and the block of each unit. All three use the new
        numbers.
    """
    load = np.bincount(block_of, work, degree.size) / degree
    order = np.lexsort((-load, -degree))
    new = np.empty(order.size, np.int64)
    new[order] = np.arange(order.size)
    sorted_degree = degree[order]
    rows = np.repeat(np.arange(order.size), sorted_degree.astype(np.int64))
    return rows.reshape(-1, ranks).T.copy(), sorted_degree, new[block_of]
