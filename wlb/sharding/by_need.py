"""Candidate plans of the strategy `balanced` that cut few documents.

Fewer cuts save communication in two cases: a `needed` exchange moves only the rows that ranks read,
and linear-attention layers need a summary of the tokens before each span, if other ranks have them.

- A document is cut among as few ranks as its work requires (`fill`).
- A document is cut among nodes only if one node cannot take all of it (`nodes`). If attention hides
  the exchange, groups of several nodes are tried in the same way.
- While documents are divided, the time of a part is only estimated. So each candidate is made
  several times, and each time the ranks that are slow in the last plan get less work.

Candidates differ in how much work of a long document one rank may have (more work means less to
send, but longer attention), and in which documents may be cut among nodes.
Cost: a few milliseconds of Python for each candidate.
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
"""How often a candidate is made, each time with shares of the work that are corrected by the
predicted times of the plan before."""
SHARES = (3 / 2, 2, 4)
"""Values of `FillOptions.share` (most work of a long document on one rank) that are tried, besides
the default of 1."""
WHOLE = (1.0, 0.3)
"""Values of `FillOptions.whole` (work from which a document is cut among ranks) that are tried."""
NODE_SHARES = (1, 3 / 2, 4)
"""Limits that are tried for the work of one document in one node, in multiples of a node's mean
work."""
GROUPS = (3 / 8, 1 / 2, 3 / 4)
"""Sizes of groups of ranks that are tried, as shares of all ranks. Documents are cut among groups
only where necessary. The last group has the ranks that remain."""
GROUP_ROUNDS = 3
"""The same as ROUNDS, for the candidates with groups of ranks."""
CUT_TILES = (16, 128)
"""Values of `FillOptions.tile` (symmetric cuts are at multiples of it, in tokens) that `few_cuts`
tries."""
LONGEST_RUNS = (1024, 4096, 16384)
"""Values of `FillOptions.longest_run` (longest document that is cut into consecutive tokens) that
`few_cuts` tries."""
EXACT = 0.001
"""Value of `FillOptions.negligible` (work that a rank may miss to avoid a cut) in `few_cuts`."""
CUT_ROUNDS = 6
"""The same as ROUNDS, for the candidates of `few_cuts`."""
STRATEGY = "balanced"


def by_need(pieces: IntArray, *, cp: int, cost: WorkloadModel) -> list[ShardingPlan]:
    """Return candidate plans in which ranks need few keys of other ranks, for exchange "needed".

    The caller chooses the fastest candidate.

    Args:
        pieces: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Predicts the times of attention, and says how many ranks a node has.
    """
    per_node = cost.cp_ranks_per_node if isinstance(cost, HiddenExchange) else cp
    maker = _PlanMaker(pieces, cp, cost)
    level = [FillOptions(whole=whole) for whole in WHOLE]
    plans: list[ShardingPlan] = []
    # 1. Fill all ranks with equal work.
    for options in level:
        plans += maker.rounds(options)
    # 2. Allow more work on the ranks of a long document, so that fewer ranks share it.
    for share in SHARES:
        plans += maker.rounds(FillOptions(share=share), rounds=1)
    # 3. Keep documents on one node where possible.
    if 1 < per_node < cp:
        for node_share in NODE_SHARES:
            for options in level:
                plans += maker.rounds(options, group_size=per_node, node_share=node_share)
    # 4. Keep documents in one group of ranks where possible.
    if per_node < cp and isinstance(cost, HiddenExchange) and cost.overlaps:
        sizes = {round(cp * share) for share in GROUPS}
        for size in sorted(size for size in sizes if per_node < size < cp):
            plans += maker.rounds(level[0], group_size=size, rounds=GROUP_ROUNDS)
    return plans


def few_cuts(pieces: IntArray, *, cp: int, cost: WorkloadModel) -> list[ShardingPlan]:
    """Return plans in which each rank has few cut documents, for models with linear attention.

    For each rank, about two documents are cut: one so that the rank gets its share of the work, and
    one so that it gets its number of tokens. A document is cut in one of two ways. A symmetric cut
    gives a rank tokens from both ends of the document, and counts as two cuts. A plain cut gives it
    consecutive tokens, but makes work less equal.

    The plans differ in the longest document that gets a plain cut (`LONGEST_RUNS`), in the work
    from which a document is cut (`WHOLE`), and in the multiple of tokens at which symmetric cuts
    are made (`CUT_TILES`). The caller takes the plan with the least predicted time. For
    micro-batches that are nearly filled by one document, `_runs_behind` gives more plans.

    Args:
        pieces: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Predicts the times of attention.
    """
    maker = _PlanMaker(pieces, cp, cost)
    plans = [_runs_behind(pieces, cp, num) for num in range(min(3, pieces.size + 1))]
    for tile in CUT_TILES:
        for longest_run in LONGEST_RUNS:
            for whole in WHOLE:
                options = FillOptions(
                    whole=whole, tile=tile, longest_run=longest_run, negligible=EXACT
                )
                plans += maker.rounds(options, rounds=CUT_ROUNDS)
    return plans


def _runs_behind(pieces: IntArray, cp: int, num_long: int) -> ShardingPlan:
    """Cut the longest documents over all ranks, and fill the ranks with the other documents.

    The other documents form one sequence, and each rank takes consecutive tokens (a run) of it. So
    at most two of them are cut for a rank, one at each end of its run.

    Args:
        pieces: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        num_long: Number of documents that are cut symmetrically over all ranks.
    """
    order = np.argsort(-pieces, kind="stable")
    start, stop = document_chunks(pieces[order[:num_long]], cp)
    ranks = head_tail_ranks(cp)
    held = np.zeros(cp, np.int64)
    np.add.at(held, np.tile(ranks, num_long), (stop - start).ravel())
    rest = shares_of(int(pieces.sum()), held) - held
    # Order the other documents so that lengths first fall and then rise. Then the first and the
    # last ranks get long documents, and the ranks in the middle get short ones.
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


class _PlanMaker:
    """Makes plans of one micro-batch, and predicts the work of its documents only once.

    Args:
        pieces: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Predicts the times of attention.
    """

    def __init__(self, pieces: IntArray, cp: int, cost: WorkloadModel) -> None:
        self.pieces, self.cp, self.cost = pieces, cp, cost
        forward, backward = cost.segment_times_ns(pieces, pieces)
        self.parts = parts_of(pieces, forward + backward)
        self.heads = HeadWork(int(pieces.max()), cost)
        base, over = divmod(int(pieces.sum()), cp)
        self.rooms = [base + (rank < over) for rank in range(cp)]

    def rounds(
        self,
        options: FillOptions,
        *,
        group_size: int = 0,
        node_share: float = 1,
        rounds: int = ROUNDS,
    ) -> list[ShardingPlan]:
        """Make a plan several times, and return all plans.

        Each time, ranks that are predicted to be slow in the last plan get a smaller share of the
        work.

        Args:
            options: Where documents are cut.
            group_size: Number of consecutive ranks that form a group, such as a node. Documents are
                cut among groups only where necessary. 0 = all ranks are one group.
            node_share: A document is cut among groups if its work is more than this many times the
                most work that any group is to get.
            rounds: Number of plans.
        """
        scale = np.ones(self.cp)
        plans: list[ShardingPlan] = []
        for left in reversed(range(rounds)):
            filled = self._filled(options, scale, group_size or self.cp, node_share)
            plans.append(
                from_spans(
                    self.pieces,
                    spans_of(self.pieces, filled, group_size or self.cp),
                    cp=self.cp,
                    strategy=STRATEGY,
                )
            )
            if left:
                scale = self._corrected(scale, plans[-1])
        return plans

    def _filled(
        self, options: FillOptions, scale: FloatArray, group_size: int, node_share: float
    ) -> list[list[FillPart]]:
        """Divide the documents over the ranks, and return the parts that each rank gets.

        Args:
            options: Where documents are cut.
            scale: Work per token that each rank is to get, relative to the other ranks, shape [cp].
            group_size: As in `rounds`, but not 0.
            node_share: As in `rounds`.
        """
        nodes = [
            slice(first, min(self.cp, first + group_size))
            for first in range(0, self.cp, group_size)
        ]
        if len(nodes) == 1:
            return fill(self.parts, self.rooms, scale.tolist(), self.heads, options)
        of_nodes = [float(scale[node].mean()) for node in nodes]
        node_rooms = [sum(self.rooms[node]) for node in nodes]
        parts = split(self.parts, node_rooms, of_nodes, self.heads, share=node_share)
        out: list[list[FillPart]] = []
        for node, node_parts in zip(nodes, parts, strict=True):
            out += fill(node_parts, self.rooms[node], scale[node].tolist(), self.heads, options)
        return out

    def _corrected(self, scale: FloatArray, plan: ShardingPlan) -> FloatArray:
        """Return a new `scale`: lower for the slow ranks of `plan`, higher for the fast ones.

        Args:
            scale: Work per token that each rank was to get in `plan`, relative to the other ranks,
                shape [cp].
            plan: The plan that was made with `scale`.
        """
        forward, backward = self.cost.segment_times_ns(plan.stop - plan.start, plan.stop)
        load = np.bincount(rank_of_span(plan), weights=forward + backward, minlength=self.cp)
        # The power 3/4 damps the correction. It is computed by square roots, because NumPy's powers
        # differ between CPUs, and all hosts must make the same plan.
        root = np.sqrt(load.mean() / np.maximum(load, 1.0))
        return np.clip(scale * root * np.sqrt(root), 0.5, 2.0)


def spans_of(
    pieces: IntArray, filled: Sequence[Sequence[FillPart]], group_size: int
) -> RankedSpans:
    """Choose which tokens each rank gets, given how many it gets of each document.

    1. If a document lies on one rank, or is cut into parts of consecutive tokens, the parts already
       say which tokens they have.
    2. A document that is cut symmetrically is cut from its two ends inwards, so that each rank gets
       tokens near both ends. Ranks of the same group get adjacent tokens. Within a group, ranks
       with more tokens get those nearer to the ends.

    Args:
        pieces: Tokens of each piece, shape [num_pieces].
        filled: Parts of documents that each rank gets.
        group_size: Number of consecutive ranks that form a node or group.
    """
    parts: dict[int, list[tuple[int, FillPart]]] = {}
    for rank, rank_parts in enumerate(filled):
        for part in rank_parts:
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
        order = sorted(sizes, key=lambda rank: (rank // group_size, -sizes[rank]))
        spans += _from_the_ends(piece, int(pieces[piece]), [(rank, sizes[rank]) for rank in order])
    return RankedSpans(*np.array(spans, np.int64).reshape(-1, 4).T)


def _from_the_ends(
    piece: int, length: int, sizes: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """Cut a document from both ends inwards. The last rank gets the middle.

    Args:
        piece: Index of the document.
        length: Tokens of the document.
        sizes: (rank, number of tokens) of each rank, from the outermost to the innermost. A rank
            gets about half of its tokens from either end.

    Returns:
        Spans (piece, start, stop, rank).
    """
    first, last = 0, length
    spans: list[tuple[int, int, int, int]] = []
    for rank, size in sizes[:-1]:
        is_tiled = size % TILE == 0 or size > 4 * TILE
        head = (size // TILE + 1) // 2 * TILE if is_tiled else (size + 1) // 2
        spans += [(piece, first, first + head, rank), (piece, last - (size - head), last, rank)]
        first, last = first + head, last - (size - head)
    return [*spans, (piece, first, last, sizes[-1][0])]
