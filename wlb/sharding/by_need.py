"""Candidates of `balanced` that cut few documents: for an exchange by need, which moves only the
rows that ranks read, and for linear layers, which need a summary of each span that is cut.

Documents are cut among as few ranks as their work requires (`fill`), and among nodes, or groups of
nodes where attention hides the exchange, only where one cannot have them (`nodes`). Each candidate
is made a few times, every rank's share of the work being corrected by what it came to. Candidates
differ in how much work of a long document one rank may have (less to send, for longer attention)
and in what may leave a node. Cost: a few milliseconds of Python for each.
"""

from collections.abc import Sequence

import numpy as np

from wlb.cost import HiddenExchange, WorkloadModel
from wlb.plan import FloatArray, IntArray, ShardingPlan, offsets_of
from wlb.plan.exchange import rank_of_span
from wlb.sharding.fill import TILE, FillCut, FillOptions, FillPart, HeadWork, fill, parts_of
from wlb.sharding.hybrid import shares_of
from wlb.sharding.nodes import split
from wlb.sharding.paper import (
    RankedSpans,
    cut_sequence,
    document_chunks,
    from_spans,
    head_tail_ranks,
)

ROUNDS = 4
SHARES = (3 / 2, 2, 4)
WHOLE = (1.0, 0.3)
NODE_SHARES = (1, 3 / 2, 4)
GROUPS = (3 / 8, 1 / 2, 3 / 4)
"""Ranks of a group that documents leave only where they must, over all; the last group is what
remains."""
GROUP_ROUNDS = 3
CUT_TILES = (16, 128)
LONGEST_RUNS = (1024, 4096, 16384)
EXACT = 0.001
"""Share of a rank's work that candidates of few cuts leave missing."""
CUT_ROUNDS = 6
STRATEGY = "balanced"


def by_need(pieces: IntArray, *, cp: int, cost: WorkloadModel) -> list[ShardingPlan]:
    """Plans of a micro-batch of pieces of these lengths, shape [num_pieces], over `cp` ranks."""
    near = cost.cp_ranks_per_node if isinstance(cost, HiddenExchange) else cp
    made = _Made(pieces, cp, cost)
    level = [FillOptions(whole=whole) for whole in WHOLE]
    plans: list[ShardingPlan] = []
    for options in level:
        plans += made.rounds(options)
    for share in SHARES:
        plans += made.rounds(FillOptions(share=share), rounds=1)
    if 1 < near < cp:
        for node_share in NODE_SHARES:
            for options in level:
                plans += made.rounds(options, near=near, node_share=node_share)
    if near < cp and isinstance(cost, HiddenExchange) and cost.overlaps:
        sizes = {round(cp * share) for share in GROUPS}
        for size in sorted(size for size in sizes if near < size < cp):
            plans += made.rounds(level[0], near=size, rounds=GROUP_ROUNDS)
    return plans


def few_cuts(pieces: IntArray, *, cp: int, cost: WorkloadModel) -> list[ShardingPlan]:
    """Plans in which each rank cuts few documents, for models with linear layers.

    A rank cuts about four: one symmetrically, to have its share of the work, and one in a run of
    tokens or symmetrically, to have its tokens. Longer runs make fewer cuts of less equal work, and
    finer cuts the reverse; the price decides. Where one document is nearly the whole micro-batch,
    it is cut over all ranks and the others follow each other in runs (`_runs_behind`).
    """
    made = _Made(pieces, cp, cost)
    plans = [_runs_behind(pieces, cp, num) for num in range(min(3, pieces.size + 1))]
    for tile in CUT_TILES:
        for longest_run in LONGEST_RUNS:
            for whole in WHOLE:
                options = FillOptions(
                    whole=whole, tile=tile, longest_run=longest_run, negligible=EXACT
                )
                plans += made.rounds(options, rounds=CUT_ROUNDS)
    return plans


def _runs_behind(pieces: IntArray, cp: int, num_long: int) -> ShardingPlan:
    """The longest `num_long` documents over all ranks, symmetrically, and the others one after the
    other: each rank has a run of them that fills it up, cut once.
    """
    order = np.argsort(-pieces, kind="stable")
    start, stop = document_chunks(pieces[order[:num_long]], cp)
    ranks = head_tail_ranks(cp)
    held = np.zeros(cp, np.int64)
    np.add.at(held, np.tile(ranks, num_long), (stop - start).ravel())
    rest = shares_of(int(pieces.sum()), held) - held
    # Short documents from long to short and back, so that runs are alike in work a token.
    behind = order[num_long:]
    behind = np.concatenate([behind[::2], behind[1::2][::-1]])
    runs = cut_sequence(pieces[behind], offsets_of(rest), np.arange(cp))
    long = (np.repeat(order[:num_long], 2 * cp), start.ravel(), stop.ravel())
    spans = RankedSpans(
        piece=np.concatenate([long[0], behind[runs.piece]]),
        start=np.concatenate([long[1], runs.start]),
        stop=np.concatenate([long[2], runs.stop]),
        rank=np.concatenate([np.tile(ranks, num_long), runs.rank]),
    )
    return from_spans(pieces, spans, cp=cp, strategy=STRATEGY)


class _Made:
    """Makes plans of one micro-batch, whose prices are looked up once."""

    def __init__(self, pieces: IntArray, cp: int, cost: WorkloadModel) -> None:
        self.pieces, self.cp, self.cost = pieces, cp, cost
        forward, backward = cost.segment_times_ns(pieces, pieces)
        self.parts = parts_of(pieces, forward + backward)
        self.heads = HeadWork(int(pieces.max()), cost)
        base, over = divmod(int(pieces.sum()), cp)
        self.rooms = [base + (rank < over) for rank in range(cp)]

    def rounds(
        self, options: FillOptions, *, near: int = 0, node_share: float = 1, rounds: int = ROUNDS
    ) -> list[ShardingPlan]:
        """Plans of each round. near: neighbouring ranks of a node; 0: all."""
        scale = np.ones(self.cp)
        plans: list[ShardingPlan] = []
        for left in reversed(range(rounds)):
            filled = self._filled(options, scale, near or self.cp, node_share)
            plans.append(
                from_spans(
                    self.pieces,
                    spans_of(self.pieces, filled, near or self.cp),
                    cp=self.cp,
                    strategy=STRATEGY,
                )
            )
            if left:
                scale = self._corrected(scale, plans[-1])
        return plans

    def _filled(
        self, options: FillOptions, scale: FloatArray, near: int, node_share: float
    ) -> list[list[FillPart]]:
        nodes = [slice(first, min(self.cp, first + near)) for first in range(0, self.cp, near)]
        if len(nodes) == 1:
            return fill(self.parts, self.rooms, scale.tolist(), self.heads, options)
        of_nodes = [float(scale[node].mean()) for node in nodes]
        rooms = [sum(self.rooms[node]) for node in nodes]
        parts = split(self.parts, rooms, of_nodes, self.heads, share=node_share)
        out: list[list[FillPart]] = []
        for node, mine in zip(nodes, parts, strict=True):
            out += fill(mine, self.rooms[node], scale[node].tolist(), self.heads, options)
        return out

    def _corrected(self, scale: FloatArray, plan: ShardingPlan) -> FloatArray:
        forward, backward = self.cost.segment_times_ns(plan.stop - plan.start, plan.stop)
        load = np.bincount(rank_of_span(plan), weights=forward + backward, minlength=self.cp)
        # The power 3/4 damps the correction. Square roots make it, because NumPy's powers differ
        # between CPUs and all hosts must make the same plan.
        root = np.sqrt(load.mean() / np.maximum(load, 1.0))
        return np.clip(scale * root * np.sqrt(root), 0.5, 2.0)


def spans_of(pieces: IntArray, filled: Sequence[Sequence[FillPart]], near: int) -> RankedSpans:
    """Spans of the parts that each rank has: runs where they are, symmetric parts from a document's
    ends inwards, a node's ranks next to each other and the largest part of them outermost.
    """
    parts: dict[int, list[tuple[int, FillPart]]] = {}
    for rank, mine in enumerate(filled):
        for part in mine:
            parts.setdefault(part.piece, []).append((rank, part))
    spans: list[tuple[int, int, int, int]] = []
    for piece, found in parts.items():
        if all(part.cut != FillCut.SYMMETRIC for _, part in found):
            runs = ((part.start, part.start + part.size, rank) for rank, part in found)
            spans += [(piece, *run) for run in sorted(runs)]
            continue
        sizes: dict[int, int] = {}
        for rank, part in found:
            sizes[rank] = sizes.get(rank, 0) + part.size
        order = sorted(sizes, key=lambda rank: (rank // near, -sizes[rank]))
        spans += _from_the_ends(piece, int(pieces[piece]), [(rank, sizes[rank]) for rank in order])
    return RankedSpans(*np.array(spans, np.int64).reshape(-1, 4).T)


def _from_the_ends(
    piece: int, length: int, sizes: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """Each rank's tokens, half of them from the beginning of what is left, half from its end."""
    first, last = 0, length
    spans: list[tuple[int, int, int, int]] = []
    for rank, size in sizes[:-1]:
        is_tiled = size % TILE == 0 or size > 4 * TILE
        head = (size // TILE + 1) // 2 * TILE if is_tiled else (size + 1) // 2
        spans += [(piece, first, first + head, rank), (piece, last - (size - head), last, rank)]
        first, last = first + head, last - (size - head)
    return [*spans, (piece, first, last, sizes[-1][0])]
