"""From pieces to the ILP's problem and back: long pieces have binaries, short ones are a fluid.

Pieces of at least `divisible_below` tokens get binaries; shorter ones are a fluid in classes by
length. `placed` then puts their documents, longest first, where the slowest micro-batch of the step
leaves most time for each token of room: 0.03 to 0.14% above the bound on the fitted stream. Only
fixed-length windows cut documents, at most one fewer than they have micro-batches. Where greedy
cuts a piece that is placed whole here, its parts are what the ILP places.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from wlb.packing.fixed import Part, Window, cut_into, parts_that_fill
from wlb.packing.ilp.model import Assignment, FluidClass, Problem
from wlb.plan import IntArray, Pieces, cut_at

NUM_CLASSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Micro-batches of at most `capacity` tokens; `per_step` of them share a step."""

    num_micro_batches: int
    per_step: int
    capacity: int
    may_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Pieces that the ILP places: rows of `pieces`, each costing `cost_ns`, shape [num_pieces].

    whole: rows with binaries. fluid: rows of each class. Both in descending length. start: the
    greedy packing as an answer to `problem`.
    """

    pieces: Pieces
    cost_ns: IntArray
    whole: list[int]
    fluid: list[list[int]]
    shape: Shape
    problem: Problem
    start: Assignment

    def saved_by_cuts_ns(self, window: Window) -> int:
        """How far a packing that cuts as `window` does can be below a lower bound for whole pieces.

        Such a packing cuts at most num_micro_batches - 1 pieces, none more expensive than the most
        expensive one that `window` cuts, and cutting a piece saves at most its cost.
        """
        row, num_parts = np.unique(rows_of(self.pieces, window.pieces), return_counts=True)
        cut = row[num_parts > 1]
        assert cut.size < self.shape.num_micro_batches, "every cut fills a micro-batch"
        dearest = int(self.cost_ns[cut].max()) if cut.size else 0
        return (self.shape.num_micro_batches - 1) * dearest


def rows_of(pieces: Pieces, parts: Pieces) -> IntArray:
    """Row of `pieces` that holds each of `parts`, which are the same tokens cut further."""
    begins = np.cumsum(parts.length) - parts.length
    return np.searchsorted(np.cumsum(pieces.length), begins, side="right").astype(np.int64)


def items_of(
    pieces: Pieces,
    greedy: Window,
    *,
    shape: Shape,
    divisible_below: int,
    cost: Callable[[Pieces], IntArray],
) -> Items:
    """Make the ILP's problem for `pieces`, of which `greedy` is a packing."""
    begins = np.cumsum(greedy.pieces.length) - greedy.pieces.length
    is_long = pieces.length[rows_of(pieces, greedy.pieces)] >= divisible_below
    pieces = cut_at(pieces, begins[is_long])
    cost_ns = cost(pieces)
    lengths: list[int] = pieces.length.tolist()
    order: list[int] = np.argsort(-pieces.length, kind="stable").tolist()
    whole = [row for row in order if lengths[row] >= divisible_below]
    fluid: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
    for row in order[len(whole) :]:
        halvings = (divisible_below - 1) // lengths[row]
        fluid[min(halvings.bit_length() - 1, NUM_CLASSES - 1)].append(row)
    fluid = [rows for rows in fluid if rows]
    num_tokens = shape.num_micro_batches * shape.capacity
    return Items(
        pieces=pieces,
        cost_ns=cost_ns,
        whole=whole,
        fluid=fluid,
        shape=shape,
        problem=Problem(
            lengths=[lengths[row] for row in whole],
            costs_ns=[int(cost_ns[row]) for row in whole],
            fluid=tuple(_class_of(pieces.length[rows], cost_ns[rows]) for rows in fluid),
            num_micro_batches=shape.num_micro_batches,
            per_step=shape.per_step,
            capacity=shape.capacity,
            full=shape.may_cut and pieces.num_tokens == num_tokens,
        ),
        start=_start(pieces, cost_ns, greedy, whole, fluid),
    )


def _class_of(lengths: IntArray, cost_ns: IntArray) -> FluidClass:
    rates = cost_ns / lengths
    return FluidClass(
        tokens=int(lengths.sum()),
        cost_ns=int(cost_ns.sum()),
        least_rate=float(rates.min()),
        most_rate=float(rates.max()),
    )


def _start(
    pieces: Pieces, cost_ns: IntArray, greedy: Window, whole: list[int], fluid: list[list[int]]
) -> Assignment:
    """The greedy packing; a part costs its share of the piece."""
    row_of, num = rows_of(pieces, greedy.pieces), len(greedy.rows)
    tokens = np.zeros((len(pieces), num))
    for j, parts in enumerate(greedy.rows):
        np.add.at(tokens[:, j], row_of[parts], greedy.pieces.length[parts])
    costs = tokens * (cost_ns / pieces.length)[:, None]
    return Assignment(
        bin_of=np.argmax(tokens[whole], axis=1).tolist(),
        tokens=[tokens[rows].sum(axis=0).tolist() for rows in fluid],
        cost_ns=[costs[rows].sum(axis=0).tolist() for rows in fluid],
    )


def placed(items: Items, plan: Assignment) -> Window | None:
    """Place the documents as `plan` says; None if they do not fit and may not be cut."""
    shape, lengths = items.shape, items.pieces.length.tolist()
    filling = _MostHeadroomFirst(shape, items.problem.step_maxima_ns(plan))
    parts: list[Part] = []
    for row, j in zip(items.whole, plan.bin_of, strict=True):
        filling.put(j, lengths[row], int(items.cost_ns[row]))
        parts.append((row, 0, j))
    if min(filling.room) < 0:
        return None
    for row in (row for rows in items.fluid for row in rows):
        added = list(filling.add(lengths[row], int(items.cost_ns[row])))
        if not added:
            return None
        parts += [(row, begin, j) for begin, j in added]
    return cut_into(items.pieces, parts, num_micro_batches=shape.num_micro_batches)


class _MostHeadroomFirst:
    """Finds the micro-batch that is furthest below the slowest one of its step.

    room: of each micro-batch, in tokens. headroom: how far each is below the slowest, in ns.
    """

    def __init__(self, shape: Shape, limits_ns: list[float]) -> None:
        self.may_cut = shape.may_cut
        self.room = [shape.capacity] * shape.num_micro_batches
        self.headroom = limits_ns

    def add(self, length: int, cost: int) -> Iterator[tuple[int, int]]:
        """(first token, micro-batch) of each part of a piece; none if it does not fit."""
        order = sorted(range(len(self.room)), key=lambda j: (-self._rate(j), j))
        target = next((j for j in order if self.room[j] >= length), None)
        if target is not None:
            self.put(target, length, cost)
            yield 0, target
        elif self.may_cut:
            for begin, j, tokens in parts_that_fill(length, self.room, order):
                self.put(j, tokens, cost * tokens / length)
                yield begin, j

    def put(self, j: int, length: int, cost: float) -> None:
        self.room[j] -= length
        self.headroom[j] -= cost

    def _rate(self, j: int) -> float:
        """Headroom in ns; if every micro-batch must be filled, headroom per token of room."""
        return self.headroom[j] / max(1, self.room[j]) if self.may_cut else self.headroom[j]
