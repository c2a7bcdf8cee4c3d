"""The steps that are scheduled, and our schedules of them: fixed degrees, pooled, and mixed.

A step is what `bounded` packs of the stream for a fixed degree. All schedulers get its pieces, so
they train the same; only the in-order one puts them together as they come.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experiments.cp_degree.groups import Call, Schedule, SubGroup
from experiments.cp_degree.prices import Prices
from experiments.harness.streams import WINDOW, batches_of
from wlb import balance_step
from wlb.packing import BoundedPacker, PackerOptions
from wlb.plan import FloatArray, IntArray, offsets_of

S_MAX = 1.5
"""Most tokens of a micro-batch over the window, as in the other sharding experiments."""
STEP_SHARE = 1.1
"""Most tokens of a step over those of its windows."""
SKIPPED = 2
"""The first steps begin without documents that wait, so they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`num_ranks` ranks, each of `tp` GPUs, in replicas of `cp`; each replica runs `per_replica`
    micro-batches a step."""

    tp: int
    num_ranks: int
    cp: int
    per_replica: int = 4

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.cp

    @property
    def num_micro_batches(self) -> int:
        return self.num_replicas * self.per_replica

    @property
    def rows(self) -> int:
        """Most tokens of a rank, for every scheduler alike."""
        return round(S_MAX * WINDOW / self.cp)


@dataclass(frozen=True, slots=True)
class Step:
    """Pieces of a step in micro-batch order. lengths: shape [num_pieces]; offsets: of the
    micro-batches, shape [num_micro_batches + 1]."""

    lengths: IntArray
    offsets: IntArray

    def members(self, i: int) -> tuple[int, ...]:
        return tuple(range(int(self.offsets[i]), int(self.offsets[i + 1])))


def steps_of(layout: Layout, prices: Prices, source: str, *, count: int, seed: int) -> list[Step]:
    """Returns `count` steps of the stream, packed by `bounded` with the prices they are judged
    by."""
    num = layout.num_micro_batches
    options = PackerOptions(
        num_micro_batches=num, context_window=WINDOW, cost=prices.cost(layout.cp), seed=seed
    )
    packer = BoundedPacker(
        options=options, s_max=round(S_MAX * WINDOW), step_tokens=round(num * WINDOW * STEP_SHARE)
    )
    batches = batches_of(source, num_micro_batches=num, num_batches=count + SKIPPED + 2, seed=seed)
    carry, out = packer.start(), []
    for batch in batches:
        plans, carry = packer.push(batch, carry)
        for plan in plans:
            parts = [mb.lengths for mb in plan.micro_batches if len(mb.lengths)]
            sizes = np.array([part.size for part in parts])
            out.append(Step(np.concatenate(parts), offsets_of(sizes)))
    if len(out) < count + SKIPPED:
        raise ValueError(f"{source} made {len(out)} steps of {count + SKIPPED}")
    return out[SKIPPED : SKIPPED + count]


def fixed(step: Step, layout: Layout, *, degree: int) -> Schedule:
    """Returns micro-batches of `degree` ranks each: those of the layout's degree, or as many of
    them together as the degree is larger."""
    merged = degree // layout.cp
    num = step.offsets.size - 1
    calls = [
        sum((step.members(i) for i in range(first, min(first + merged, num))), ())
        for first in range(0, num, merged)
    ]
    replicas = layout.num_ranks // degree
    ranks = [tuple(range(r * degree, (r + 1) * degree)) for r in range(replicas)]
    return [
        [SubGroup(ranks[r], (call,)) for r, call in enumerate(calls[first : first + replicas])]
        for first in range(0, len(calls), replicas)
    ]


def mixed(
    step: Step, layout: Layout, work: FloatArray, price: Callable[[Call, int], float]
) -> Schedule:
    """Returns micro-batches with a degree each, a power of two, as many on every rank, by
    `balance_step`.

    work: of each sample on one rank, in ns. price: of a call on a number of ranks, for samples that
    need several.
    """
    needed = 2 ** np.ceil(np.log2(np.maximum(step.lengths / layout.rows, 1.0))).astype(np.int64)
    costs = work.copy()
    for i in np.flatnonzero(needed > 1).tolist():
        costs[i] = price((i,), int(needed[i])) * needed[i]
    made = balance_step(
        step.lengths,
        num_ranks=layout.num_ranks,
        max_tokens=layout.rows,
        cost=costs,
        dynamic_cp=layout.num_ranks,
    )
    grid = made.blocks[0]
    out: list[list[SubGroup]] = []
    for m in range(grid.shape[1]):
        column = grid[:, m]
        group: list[SubGroup] = []
        for block in dict.fromkeys(column.tolist()):
            ranks = np.flatnonzero(column == block).tolist()
            call = tuple(made.samples(0, ranks[0], m).tolist())
            group.append(SubGroup(tuple(ranks), (call,)))
        out.append(group)
    return out
