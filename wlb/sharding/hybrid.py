"""Strategy `hybrid`: long documents are cut over all ranks, short ones are not (Section 8).

Documents longer than a threshold are cut into 2 * CP chunks each, as `per_document` does. All
others, from long to short, form one sequence that is cut into 2 * CP chunks, as `per_sequence`
does. So most short documents stay whole on one rank, where attention kernels are more efficient.

For every micro-batch, the times of up to 16 thresholds are predicted and the fastest one is taken.
The plans of both static strategies are candidates too, so `hybrid` is never predicted to be slower
than either.
Cost: the chunks of all documents are priced once, then a few NumPy passes for each threshold.
"""

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import IntArray, IntLike, ShardingPlan, offsets_of
from wlb.sharding.paper import (
    GATHER,
    RankedSpans,
    cheapest,
    checked_lengths,
    cut_sequence,
    document_chunks,
    from_spans,
    head_tail_ranks,
    per_document,
    per_sequence,
)
from wlb.spec import ExchangeChoice

STRATEGY = "hybrid"
MOST_THRESHOLDS = 16
"""At most this many thresholds are tried for a micro-batch."""
PRICED_WITH_EXCHANGE = 4
"""Unless the exchange is an all-gather, its time is predicted for this many thresholds: those with
the fastest attention."""


def hybrid(
    lengths: IntLike, *, cp: int, cost: WorkloadModel, exchange: ExchangeChoice | str = GATHER
) -> ShardingPlan:
    """Shard a micro-batch by the best threshold between long and short documents.

    Each long document is cut over all ranks. The short ones are cut together, as one sequence.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Predicts the times by which thresholds are compared (`cheapest`).
        exchange: How ranks get each other's keys: "gather", "needed" or "auto".
    """
    pieces = checked_lengths(lengths, cp)
    plans = [per_sequence(pieces, cp=cp)]
    if cp > 1 and pieces.size:
        num = 1 if exchange == GATHER else PRICED_WITH_EXCHANGE
        plans += [per_document(pieces, cp=cp), *_best_thresholds(pieces, cp, cost, num)]
    return cheapest(plans, cost, strategy=STRATEGY, exchange=exchange)


def _best_thresholds(
    pieces: IntArray, cp: int, cost: WorkloadModel, num: int
) -> list[ShardingPlan]:
    """Try thresholds, and return the plans with the fastest attention, the fastest first.

    A threshold is a length. Each longer document is cut over all ranks by itself. All others are
    joined to one sequence, which is cut over all ranks.

    Args:
        pieces: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Predicts the times of attention.
        num: Largest number of plans to return.
    """
    # 1. Sort from long to short. Then the long documents of any threshold are the first ones.
    order = np.argsort(-pieces, kind="stable")
    ordered = pieces[order]
    start, stop = document_chunks(ordered, cp)
    counts = _thresholds(ordered)
    # 2. For each threshold, predict the time of the slowest rank.
    times, tokens = _long_parts(start, stop, cost, counts)
    shorts = [_short_part(ordered, k, held) for k, held in zip(counts, tokens, strict=True)]
    best = np.argsort(_slowest(times, shorts, cost), kind="stable")[:num]
    # 3. Make the spans of the best thresholds.
    plans: list[ShardingPlan] = []
    for i in map(int, best):
        k, short = counts[i], shorts[i]
        ranks = np.tile(head_tail_ranks(cp), k)
        long = (np.repeat(np.arange(k), 2 * cp), start[:k].ravel(), stop[:k].ravel(), ranks)
        spans = RankedSpans(*(np.concatenate(pair) for pair in zip(long, short, strict=True)))
        named = spans._replace(piece=order[spans.piece])
        plans.append(from_spans(pieces, named, cp=cp, strategy=STRATEGY))
    return plans


def _thresholds(ordered: IntArray) -> list[int]:
    """Choose thresholds to try: longer documents are cut one by one, shorter ones together.

    A threshold lies between two different lengths. At most MOST_THRESHOLDS are returned. If there
    are more, those are chosen that divide all tokens into nearly equal parts.

    Args:
        ordered: Tokens of each document, in descending order, shape [n].

    Returns:
        For each threshold, the number of long documents, which are the first ones.
    """
    ends = np.flatnonzero(np.append(ordered[1:] < ordered[:-1], True)) + 1
    counts = np.append(0, ends)
    if counts.size > MOST_THRESHOLDS:
        share = offsets_of(ordered)[counts] / ordered.sum()
        counts = counts[np.unique(np.searchsorted(share, np.linspace(0.0, 1.0, MOST_THRESHOLDS)))]
    return [int(k) for k in counts]


def shares_of(total: int, held: IntArray) -> IntArray:
    """Divide the tokens of a micro-batch over ranks, so that ranks differ by at most one token.

    If the division leaves a remainder, the ranks that already have most tokens get one more.

    Args:
        total: Tokens of the micro-batch.
        held: Tokens that each rank already has, shape [cp].

    Returns:
        Tokens that each rank is to have in the end, shape [cp].
    """
    shares = np.full(held.size, total // held.size, np.int64)
    shares[np.argsort(-held, kind="stable")[: total % held.size]] += 1
    return shares


def _short_part(ordered: IntArray, num_long: int, held: IntArray) -> RankedSpans:
    """Cut the sequence of all short documents into 2 * cp chunks, two for each rank.

    Chunks are sized so that, with the long documents, ranks differ by at most one token.

    Args:
        ordered: Tokens of each document, in descending order, shape [n].
        num_long: Number of long documents, which are the first ones. All others are short.
        held: Tokens of long documents that each rank has, shape [cp].

    Returns:
        The spans of the short documents. Documents are named by their position in `ordered`.
    """
    cp = held.size
    rest = shares_of(int(ordered.sum()), held) - held
    head = (rest + 1) // 2
    # The last rank's two chunks are adjacent, so they form one chunk.
    edges = np.delete(offsets_of(np.concatenate([head, (rest - head)[::-1]])), cp)
    ranks = np.delete(head_tail_ranks(cp), cp)
    spans = cut_sequence(ordered[num_long:], edges, ranks)
    return spans._replace(piece=spans.piece + num_long)


def _long_parts(
    start: IntArray, stop: IntArray, cost: WorkloadModel, counts: list[int]
) -> tuple[IntArray, list[IntArray]]:
    """Predict, for each threshold, the attention time of the long documents on each rank.

    Documents longer than the threshold are long. Documents are sorted from long to short, so the
    long ones are the first ones. Each of them is divided among all ranks, in two chunks for each
    rank.

    Args:
        start: First token of each chunk of each document, shape [num_documents, 2 * cp].
        stop: End of each chunk, shape [num_documents, 2 * cp].
        cost: Predicts the times of attention.
        counts: Number of long documents for each threshold.

    Returns:
        Forward and backward attention time of each rank in ns, shape [2, len(counts), cp], and for
        each threshold the tokens of each rank, shape [cp].
    """
    cp = start.shape[1] // 2
    # The last rank's two chunks are adjacent, so they form one segment.
    begin = start.copy()
    begin[:, cp] = start[:, cp - 1]
    q = stop - begin
    q[:, cp - 1] = 0
    times = cost.segment_times_ns(q.ravel(), stop.ravel())
    of_chunks = np.stack([*(t.reshape(q.shape) for t in times), q])
    of_ranks = of_chunks[:, :, :cp] + of_chunks[:, :, : cp - 1 : -1]
    running = np.concatenate([np.zeros((3, 1, cp), np.int64), np.cumsum(of_ranks, 1)], 1)
    at = running[:, counts]
    return at[:2], list(at[2])


def _slowest(times: IntArray, parts: list[RankedSpans], cost: WorkloadModel) -> IntArray:
    """Return the attention time of the slowest rank, for each of several thresholds.

    It is the forward time of the rank that is slowest in the forward pass, plus the backward time
    of the one that is slowest in the backward pass, in ns.

    Args:
        times: Forward and backward time of each rank for the long documents in ns, shape
            [2, num_thresholds, cp].
        parts: Spans of the short documents, for each threshold.
        cost: Predicts the times of attention.
    """
    cp = times.shape[2]
    start = np.concatenate([p.start for p in parts])
    stop = np.concatenate([p.stop for p in parts])
    rank = np.concatenate([p.rank + i * cp for i, p in enumerate(parts)])
    total = times.copy()
    for i, priced in enumerate(cost.segment_times_ns(stop - start, stop)):
        # float64 is exact below 2^53 ns (104 days). Beyond that, rounding can only change which
        # plan is chosen.
        sums = np.bincount(rank, weights=priced, minlength=len(parts) * cp)
        total[i] += sums.astype(np.int64).reshape(-1, cp)
    return total.max(2).sum(0)
