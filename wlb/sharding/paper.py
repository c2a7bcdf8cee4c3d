"""The paper's sharding of a micro-batch over context-parallel ranks, in the order of its Section 5.

1. `per_sequence` (Section 3.1) cuts the packed sequence into 2 * CP chunks, and `per_document`
   (Section 5.1) cuts each document into as many. Rank r takes chunks r and 2 * CP - 1 - r:

       chunk     0  1  2  3  4  5  6  7      With CP = 4. Attention takes less time in the first
       rank      0  1  2  3  3  2  1  0      chunks, since they attend to few keys. Each rank has
                                             a fast chunk and a slow one.

2. `from_spans` makes a plan of the spans, which are the parts of chunks inside one document.
3. `cheapest` predicts the times of several plans and takes the fastest one (Section 5.3).
4. `shard` applies the strategy with a given name. The strategy "adaptive" is the paper's choice
   between the two static strategies.

The strategies of other files (`hybrid`, `balanced`) use the same functions.
Cost: a few NumPy passes over pieces and chunks.
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
    # Importing this loads kernel profiles, which planning with a workload model does not need.
    from wlb.cost import Cost

GATHER = ExchangeChoice.GATHER
NAMES = tuple(map(str, Strategy))
"""Names of all sharding strategies."""
WITH_REMAINDER = ("per_document", "adaptive")
"""Strategies that support `remainder = "one_by_one"`, which assigns the tokens left over by equal
chunks one by one."""
STRATEGIES = tuple(name for name in NAMES if name != "adaptive")
"""Values of `ShardingPlan.strategy`. "adaptive" is not among them, because its plans have the name
of the strategy that it chose."""


class RankedSpans(NamedTuple):
    """Spans with their ranks: rank[i] processes the tokens [start[i], stop[i]) of piece[i].

    All arrays have shape [num_spans].
    """

    piece: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray


def per_sequence(lengths: IntLike, *, cp: int) -> ShardingPlan:
    """Cut the packed sequence of a micro-batch into 2 * CP chunks, two for each rank (Section 3.1).

    Rank r takes chunks r and 2 * CP - 1 - r, as in Llama 3. This is balanced for a single document.
    With several documents in the sequence, one rank may get much more attention work than another.

    The paper pads the sequence to a multiple of 2 * CP. Here, for a sequence of S tokens, the first
    S mod (2 * CP) chunks are one token longer instead, so ranks differ by at most one token.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
    """
    pieces = checked_lengths(lengths, cp)
    base, extra = divmod(int(pieces.sum()), 2 * cp)
    edges = offsets_of(base + (np.arange(2 * cp) < extra))
    spans = cut_sequence(pieces, edges, head_tail_ranks(cp))
    return from_spans(pieces, spans, cp=cp, strategy="per_sequence")


def head_tail_ranks(cp: int) -> IntArray:
    """Return the ranks of 2 * cp consecutive chunks: 0, 1, ..., cp-1, cp-1, ..., 1, 0."""
    up = np.arange(cp, dtype=np.int64)
    return np.concatenate([up, up[::-1]])


def cut_sequence(lengths: IntArray, edges: IntArray, rank: IntArray) -> RankedSpans:
    """Cut chunks of a packed sequence where pieces end, so that each span lies in one piece.

    Args:
        lengths: Tokens of each piece, in the order of the sequence, shape [num_pieces].
        edges: Chunk i has tokens [edges[i], edges[i + 1]) of the sequence. Edges ascend from 0 to
            the number of tokens, shape [num_chunks + 1].
        rank: Rank of each chunk, shape [num_chunks].
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
    """Cut each document of a micro-batch into 2 * CP chunks, two for each rank (Section 5.1).

    Rank r takes chunks r and 2 * CP - 1 - r of every document, so ranks get equal tokens and equal
    attention without padding. A short document leaves some chunks empty.

    There are two deviations from the paper. The part of a document of d tokens that is divided
    evenly has 2 * CP * (d // (2 * CP)) tokens; the paper's formula for this part, e_i, lacks the
    factor 2 * CP. And each of the d mod (2 * CP) left-over tokens makes one chunk a token longer.
    These tokens go to the ranks in turn, and the next document continues with the next rank, so
    ranks differ by at most one token.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        remainder: How left-over tokens are assigned. "merged" makes chunks longer as described.
            "one_by_one" is the paper's way, for comparison: each of these tokens is a segment of
            the attention kernel by itself, which takes as long as a full tile.
    """
    pieces = checked_lengths(lengths, cp)
    # A single rank gets all tokens, so there is no remainder to distribute.
    remainder = Remainder(remainder) if cp > 1 else Remainder.MERGED
    start, stop = document_chunks(pieces, cp, grows=remainder == Remainder.MERGED)
    # Order spans by rank, then by piece. Of a rank's two chunks of a piece, the first comes first.
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
    """Return the first token and the end of each of a document's 2 * cp chunks.

    Args:
        lengths: Tokens of each document, shape [num_pieces].
        cp: Number of CP ranks. Rank r takes chunks r and 2 * cp - 1 - r.
        grows: Whether left-over tokens make chunks longer. False leaves out the last
            length mod (2 * cp) tokens of each document.

    Returns:
        Two arrays of shape [num_pieces, 2 * cp].
    """
    base, over = np.divmod(lengths, 2 * cp)
    if not grows:
        stop = base[:, None] * np.arange(1, 2 * cp + 1)
        return stop - base[:, None], stop
    # Left-over tokens go to the ranks in turn, beginning with the rank after the one that got the
    # last left-over token of the previous document. A rank may get two left-over tokens of one
    # document. The first makes the rank's first chunk longer, and the second its last chunk.
    first = (np.cumsum(over) - over) % cp
    turn = (np.arange(cp) - first[:, None]) % cp
    served = np.concatenate([turn, turn[:, ::-1] + cp], 1)
    sizes = base[:, None] + (served < over[:, None])
    stop = np.cumsum(sizes, 1)
    return stop - sizes, stop


def checked_lengths(values: IntLike, cp: int) -> IntArray:
    """Return the lengths of pieces as an array, after checking them and `cp`.

    Raises:
        UserError: If a piece has no token, or if `cp` is below 1.
    """
    lengths = int_array("lengths", values)
    check_at_least("cp", cp, 1)
    if (bad := first_true(lengths < 1)) is not None:
        raise UserError(
            f"piece {bad} has {lengths[bad]} tokens, but a piece must have at least 1; remove the "
            "piece"
        )
    return lengths


def from_spans(lengths: IntArray, spans: RankedSpans, *, cp: int, strategy: str) -> ShardingPlan:
    """Make a sharding plan from spans.

    Spans are sorted by rank, and empty ones are dropped. The spans of a rank keep their order. If a
    span continues the one before it, both become one span, because each span is a segment of the
    attention kernel and fewer segments are faster.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        spans: Spans that cover every token once.
        cp: Number of CP ranks.
        strategy: Name of the strategy.
    """
    piece, start, stop, rank = spans
    if rank.size > 1 and (rank[1:] < rank[:-1]).any():
        # NumPy sorts int16 by a fast radix sort, so cast ranks to int16 if they fit.
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
    """Return the plan that is predicted to take the least time, with the times of its ranks.

    Ranks wait for the slowest one in forward, and again in backward. So a plan takes as long as its
    slowest rank in forward, and its slowest rank in backward, together. A rank's time includes:

    - the attention of its segments, forward and backward (Section 5.3). A segment has a span's
      tokens as queries, and all tokens up to the span's end as keys.
    - the summaries of linear-attention layers (`SummaryPrices`), which depend on where documents
      are cut.
    - with an exchange of "needed" or "auto", the time that the rank waits for keys and gradients of
      other ranks.

    It excludes linear layers and all-gathers, because these take the same time on all ranks and in
    all plans. Of equally fast plans, the one that transfers fewest rows is taken. With "gather",
    where all plans transfer the same rows, the first one is taken.

    Args:
        plans: Candidates, all for the same number of ranks.
        cost: Predicts the times.
        strategy: Strategy name that the returned plan gets. "" keeps the candidate's name.
        exchange: How ranks get each other's keys: "gather", "needed", or "auto", which tries both
            for each plan.

    Raises:
        UserError: If the exchange is unknown.
    """
    if exchange not in set(ExchangeChoice):
        raise UserError(
            f"exchange = {exchange!r} is unknown; use one of {', '.join(ExchangeChoice)}"
        )
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
            # Plans are tried by ascending time without the wait for the exchange. If this plan
            # without its wait takes longer than the best plan with its wait, no later plan is
            # better.
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
    """Predict a plan's time including the time that ranks wait for the exchange of keys.

    Args:
        plan: The plan, which says what exchange it uses.
        cost: Predicts the times.
        kernels: Attention time of each rank in ns, forward and backward, shape [cp] each.

    Returns:
        Time of the slowest rank in ns, forward plus backward, and the number of rows that are
        transferred, which breaks ties. This number is 0 for an all-gather.
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
    """Divide the tokens of a micro-batch over context-parallel ranks by a named strategy.

    The strategy "adaptive" computes the plans of per_sequence and per_document, and takes the one
    whose slowest rank is predicted to finish first (Section 5.3), or per_sequence if both are
    equal. Its plan has the name of the strategy that it took.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Ranks of the context-parallel group.
        strategy: One of `NAMES`.
        cost: Predicts the times by which plans are compared. It is a `WorkloadModel`, or any other
            form of cost that `wlb.balance.balance_step` takes, such as the path of a config.json.
            Costs of whole samples are not accepted, because strategies need the times of parts.
        remainder: How `per_document` assigns the tokens that equal chunks leave over: "merged" or
            "one_by_one". The strategy "adaptive" passes it on to `per_document`.
        exchange: How ranks get each other's keys: "gather", "needed", or "auto" for the faster one.

    Returns:
        The plan, with each rank's predicted attention time.

    Raises:
        UserError: If the strategy or the cost is unknown, or if `remainder` is "one_by_one" with a
            strategy that has no such option.
        ValueError: If the plan would lose or repeat a token.
    """
    # Import these two files here, because they import this file.
    from wlb.sharding.balanced import balanced
    from wlb.sharding.hybrid import hybrid

    if hasattr(cost, "workload_ns"):
        model = cast(WorkloadModel, cost)
    else:
        from wlb.cost import workload_model

        model = workload_model(cost)
    remainder = Remainder(remainder)
    if remainder != Remainder.MERGED and strategy not in WITH_REMAINDER:
        raise UserError(
            f"sharding.remainder = {remainder} is not available with sharding.strategy = "
            f"{strategy}; set sharding.remainder = merged, or use one of the strategies "
            f"{', '.join(WITH_REMAINDER)}"
        )
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
            raise UserError(
                f"sharding.strategy = {strategy!r} is unknown; use one of {', '.join(NAMES)}"
            )
    return plan.validate()
