"""The paper's sharding over context-parallel ranks, in the order of its Section 5.

`per_sequence` (Section 3.1) and `per_document` (5.1) cut a micro-batch into chunks; `from_spans`
makes a plan of such spans; `cheapest` prices plans (5.3); `shard` chooses by a strategy's name, and
its "adaptive" is the paper's choice between the two. The strategies of other files (`hybrid`,
`balanced`) are made of the same parts. Cost: a few NumPy passes over pieces and chunks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from wlb.cost import WorkloadModel, kernels_ns, rows_of_layer, summaries_ns, waits_ns
from wlb.plan import (
    IntArray,
    IntLike,
    KeyExchange,
    ShardingPlan,
    UserError,
    check_at_least,
    int_array,
    offsets_of,
    ranges,
)
from wlb.plan.arrays import distinct, first_true
from wlb.spec import ExchangeChoice, Remainder, Strategy

if TYPE_CHECKING:
    from wlb.cost import Cost  # with kernel profiles, which planning by a workload does not load

GATHER = ExchangeChoice.GATHER
NAMES = tuple(map(str, Strategy))
WITH_REMAINDER = ("per_document", "adaptive")
"""Strategies that may deal left-over tokens one by one."""
STRATEGIES = tuple(name for name in NAMES if name != "adaptive")
"""Values of a plan's `strategy`; a plan by "adaptive" has the name of the chosen one."""


class RankedSpans(NamedTuple):
    """Span i = tokens [start[i], stop[i]) of piece[i], on rank[i]; all of shape [num_spans]."""

    piece: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray


def per_sequence(lengths: IntLike, *, cp: int) -> ShardingPlan:
    """Shard a micro-batch in 2 * CP symmetric chunks of the packed sequence (Section 3.1).

    Rank r takes chunks r and 2*CP-1-r, as Llama 3's sharding does. Balanced for one document;
    documents packed together can leave a rank with much more attention work. Chunks differ by at
    most one token (the paper pads to a multiple; here any total works): the first (S mod 2*CP)
    chunks are longer, so ranks' tokens differ by at most one.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Ranks.
    """
    pieces = checked_lengths(lengths, cp)
    base, extra = divmod(int(pieces.sum()), 2 * cp)
    edges = offsets_of(base + (np.arange(2 * cp) < extra))
    spans = cut_sequence(pieces, edges, head_tail_ranks(cp))
    return from_spans(pieces, spans, cp=cp, strategy="per_sequence")


def head_tail_ranks(cp: int) -> IntArray:
    """Rank of each of 2 * cp chunks: 0, 1, ..., cp-1, cp-1, ..., 1, 0."""
    up = np.arange(cp, dtype=np.int64)
    return np.concatenate([up, up[::-1]])


def cut_sequence(lengths: IntArray, edges: IntArray, rank: IntArray) -> RankedSpans:
    """The spans that chunks of a packed sequence come to.

    lengths: tokens of each piece in the sequence's order, shape [num_pieces]. Chunk i = tokens
    [edges[i], edges[i + 1]) of the sequence, on rank[i]; edges go from 0 to the total, not down.
    """
    offsets = offsets_of(lengths)
    cuts = distinct(np.concatenate([edges, offsets]))
    start, stop = cuts[:-1], cuts[1:]
    owner = rank[np.searchsorted(edges, start, side="right") - 1]
    piece = np.searchsorted(offsets, start, side="right") - 1
    return RankedSpans(piece, start - offsets[piece], stop - offsets[piece], owner)


def per_document(
    lengths: IntLike, *, cp: int, remainder: Remainder | str = Remainder.MERGED
) -> ShardingPlan:
    """Shard a micro-batch in 2 * CP symmetric chunks of each document (Section 5.1).

    Rank r takes chunks r and 2*CP-1-r of every document, so ranks get equal tokens and equal
    attention, without padding. Deviations: a chunk has d // (2 * CP) tokens (e_i in the text lacks
    the factor); the d mod (2 * CP) left-over tokens lengthen chunks by one, dealt to the ranks in
    turn across documents, so that ranks differ by at most one token. A short document leaves some
    chunks empty.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Ranks.
        remainder: "one_by_one" deals left-over tokens as the paper does, to compare with: each is a
            kernel segment that costs a full tile.
    """
    pieces = checked_lengths(lengths, cp)
    # A single rank gets all tokens, so that none have to be dealt.
    remainder = Remainder(remainder) if cp > 1 else Remainder.MERGED
    start, stop = document_chunks(pieces, cp, grows=remainder == Remainder.MERGED)
    # Spans are ordered by rank, then by piece, with the head chunk before the tail chunk.
    heads_tails = [np.stack([x[:, :cp], x[:, : cp - 1 : -1]], 2) for x in (start, stop)]
    begin, end = (x.transpose(1, 0, 2).ravel() for x in heads_tails)
    piece = np.tile(np.repeat(np.arange(pieces.size), 2), cp)
    rank = np.repeat(np.arange(cp), 2 * pieces.size)
    if remainder == Remainder.ONE_BY_ONE:
        over = pieces % (2 * cp)
        position = ranges(pieces - over, pieces)
        piece = np.concatenate([piece, np.repeat(np.arange(pieces.size), over)])
        begin, end = np.concatenate([begin, position]), np.concatenate([end, position + 1])
        rank = np.concatenate([rank, np.arange(position.size) % cp])
    spans = RankedSpans(piece, begin, end, rank)
    return from_spans(pieces, spans, cp=cp, strategy="per_document")


def document_chunks(lengths: IntArray, cp: int, *, grows: bool = True) -> tuple[IntArray, IntArray]:
    """Start and stop of the 2 * cp chunks of each document, shape [num_pieces, 2 * cp] each.

    grows: left-over tokens lengthen chunks, dealt to the ranks in turn across documents; otherwise
    they are left out (they lie at each document's end). Chunks r and 2 * cp - 1 - r are rank r's.
    """
    base, over = np.divmod(lengths, 2 * cp)
    if not grows:
        stop = base[:, None] * np.arange(1, 2 * cp + 1)
        return stop - base[:, None], stop
    # Left-over tokens are dealt to ranks in turn, from the rank after the one that got the previous
    # document's last. A rank's first such token goes to its head chunk, its second to its tail
    # chunk.
    first = (np.cumsum(over) - over) % cp
    turn = (np.arange(cp) - first[:, None]) % cp
    served = np.concatenate([turn, turn[:, ::-1] + cp], 1)
    sizes = base[:, None] + (served < over[:, None])
    stop = np.cumsum(sizes, 1)
    return stop - sizes, stop


def checked_lengths(values: IntLike, cp: int) -> IntArray:
    """Lengths of a micro-batch's pieces; UserError for one without tokens, and for cp below 1."""
    lengths = int_array("lengths", values)
    check_at_least("cp", cp, 1)
    if (bad := first_true(lengths < 1)) is not None:
        raise UserError(f"piece {bad} has {lengths[bad]} tokens; it must have at least 1")
    return lengths


def from_spans(lengths: IntArray, spans: RankedSpans, *, cp: int, strategy: str) -> ShardingPlan:
    """The plan of these spans of pieces of `lengths` tokens, rank-major and without empty spans.

    Spans of a rank keep their order; neighbours in it that join are merged, because each span is a
    kernel segment.
    """
    piece, start, stop, rank = spans
    if rank.size > 1 and (rank[1:] < rank[:-1]).any():
        # NumPy sorts int16 by counting, so ranks are cast to int16 if they fit.
        order = np.argsort(rank.astype(np.int16 if cp < 2**15 else np.int64), kind="stable")
        piece, start, stop, rank = piece[order], start[order], stop[order], rank[order]
    if (filled := stop > start).sum() < start.size:
        piece, start, stop, rank = piece[filled], start[filled], stop[filled], rank[filled]
    joins = np.zeros(start.size, bool)
    joins[1:] = (start[1:] == stop[:-1]) & (piece[1:] == piece[:-1]) & (rank[1:] == rank[:-1])
    first = np.flatnonzero(~joins)
    last = np.append(first[1:], start.size) - 1
    rank = rank[first]
    return ShardingPlan(
        strategy=strategy,
        lengths=lengths,
        piece=piece[first],
        start=start[first],
        stop=stop[last[: first.size]],
        rank_offsets=np.searchsorted(rank, np.arange(cp + 1)),
    )


def cheapest(
    plans: Sequence[ShardingPlan],
    cost: WorkloadModel,
    *,
    strategy: str = "",
    exchange: ExchangeChoice | str = GATHER,
) -> ShardingPlan:
    """The plan whose slowest rank is predicted to finish first, with its price; ties: the first.

    Segments (q = span tokens, kv = span end) of every rank are priced, forward and backward, in one
    call over the spans of all candidates (Section 5.3). Linear layers do not enter, because every
    strategy gives all ranks the same number of rows, nor does an all-gather, which moves them all.
    Summaries of linear layers do (`SummaryPrices`), because they depend on where documents are cut.

    With another exchange than gather, what ranks wait for it counts as well, and of plans that take
    equally long the one that moves fewest rows is taken.

    Args:
        plans: Candidates, all over the same ranks.
        cost: Prices of segments, and of an exchange by need.
        strategy: The name that the plan takes; "" leaves its own.
        exchange: How ranks will get each other's keys; "auto" tries both.

    Raises:
        UserError: The exchange is unknown.
    """
    if exchange not in set(ExchangeChoice):
        raise UserError(f"exchange = {exchange!r} is not one of {', '.join(ExchangeChoice)}")
    forward, backward = kernels_ns(plans, cost, cp=plans[0].cp)
    slowest = forward.max(1) + backward.max(1)
    slowest += 2 * np.array([summaries_ns(plan, cost) for plan in plans], np.int64)
    if exchange == GATHER or plans[0].cp == 1:
        best = int(slowest.argmin())
        plan = plans[best]
    else:
        is_auto = exchange == ExchangeChoice.AUTO
        names = list(KeyExchange) if is_auto else [KeyExchange(exchange)]
        found: list[tuple[tuple[float, float], int, ShardingPlan]] = []
        for i in map(int, np.argsort(slowest, kind="stable")):
            # Waits only add to the kernels, so no plan from here on can be the fastest.
            if found and slowest[i] > found[0][0][0]:
                break
            tried = [replace(plans[i], exchange=name) for name in names]
            kernels = forward[i], backward[i]
            found += [(_with_waits(plan, cost, kernels), i, plan) for plan in tried]
            found = [min(found, key=lambda one: one[:2])]
        _, best, plan = found[0]
    return replace(
        plan,
        strategy=strategy or plan.strategy,
        forward_ns=forward[best],
        backward_ns=backward[best],
    )


def _with_waits(
    plan: ShardingPlan, cost: WorkloadModel, kernels: Sequence[IntArray]
) -> tuple[float, float]:
    """The slowest rank's time of both passes, with what is waited for the exchange, and the rows
    that travel by need. kernels: forward and backward of each rank, [cp] each.
    """
    both = zip(kernels, waits_ns(plan, cost), strict=True)
    slowest = sum(float((times + waits).max()) for times, waits in both)
    slowest += 2 * summaries_ns(plan, cost)
    is_gather = plan.exchange == KeyExchange.GATHER
    return slowest, 0 if is_gather else float(rows_of_layer(plan, cost).sum())


def shard(
    lengths: IntLike,
    *,
    cp: int,
    strategy: str,
    cost: "Cost",
    remainder: Remainder | str = Remainder.MERGED,
    exchange: ExchangeChoice | str = GATHER,
) -> ShardingPlan:
    """Shard a micro-batch by a strategy's name, with each rank's predicted latency in the plan.

    "adaptive" takes the static strategy whose slowest rank is predicted to finish first (Section
    5.3; per_sequence in a tie), and its plan has the name of that one.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Ranks of the context-parallel group.
        strategy: One of `NAMES`.
        cost: Prices by which plans are compared: a `WorkloadModel`, or another form of
            `wlb.balance.balance_step`'s cost that prices segments, such as a config.json's path.
        remainder: What per_document does with left-over tokens, also as adaptive's candidate.
        exchange: How ranks get each other's keys; "auto" decides by `cost`. Strategies take account
            of it, and one rank needs none.

    Raises:
        UserError: The strategy or the cost is unknown, or it does not have this remainder.
        ValueError: The plan would lose or repeat a token.
    """
    # Both build on this file.
    from wlb.sharding.balanced import balanced
    from wlb.sharding.hybrid import hybrid

    if hasattr(cost, "workload_ns"):
        model = cast(WorkloadModel, cost)
    else:
        from wlb.cost import workload_model

        model = workload_model(cost)
    remainder = Remainder(remainder)
    if remainder != Remainder.MERGED and strategy not in WITH_REMAINDER:
        raise UserError(f"{strategy} merges left-over tokens; it has no remainder {remainder!r}")
    match strategy:
        case "per_sequence":
            plan = cheapest([per_sequence(lengths, cp=cp)], model, exchange=exchange)
        case "per_document":
            made = per_document(lengths, cp=cp, remainder=remainder)
            plan = cheapest([made], model, exchange=exchange)
        case "adaptive":
            plans = [per_sequence(lengths, cp=cp)]
            # With one rank or no piece, both strategies give the same spans.
            if cp > 1 and len(lengths):
                plans.append(per_document(lengths, cp=cp, remainder=remainder))
            plan = cheapest(plans, model, exchange=exchange)
        case "hybrid":
            plan = hybrid(lengths, cp=cp, cost=model, exchange=exchange)
        case "balanced":
            plan = balanced(lengths, cp=cp, cost=model, exchange=exchange)
        case _:
            raise UserError(f"unknown sharding strategy {strategy!r}; known: {', '.join(NAMES)}")
    return plan.validate()
