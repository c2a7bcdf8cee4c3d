"""hybrid: long documents per document, the rest per sequence (the paper's Section 8).

Documents of at least a threshold are cut into 2 * CP chunks each; shorter ones, from long to short,
make a sequence of their own in 2 * CP symmetric chunks that bring ranks to equally many tokens. Up
to 16 thresholds are priced for every micro-batch, and the static strategies compete, so hybrid is
never predicted slower than either.
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
PRICED_WITH_EXCHANGE = 4
"""Thresholds of which the exchange by need is priced as well."""


def hybrid(
    lengths: IntLike, *, cp: int, cost: WorkloadModel, exchange: ExchangeChoice | str = GATHER
) -> ShardingPlan:
    """Shard a micro-batch of pieces of `lengths` (shape [num_pieces], tokens) over `cp` ranks.
    exchange: how keys will be exchanged, of which the price takes account (`cheapest`).
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
    """Plans of the `num` thresholds whose slowest rank attends fastest, the fastest first."""
    # 1. Sort from long to short, so that the long documents of any threshold are a prefix.
    order = np.argsort(-pieces, kind="stable")
    ordered = pieces[order]
    start, stop = document_chunks(ordered, cp)
    counts = _thresholds(ordered)
    # 2. Price the slowest rank for the long and the short part of each threshold.
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
    """How many documents are long, for each threshold tried; `ordered` falls, shape [n].

    Between two distinct lengths each; where there are many, evenly spread over the tokens.
    """
    ends = np.flatnonzero(np.append(ordered[1:] < ordered[:-1], True)) + 1
    counts = np.append(0, ends)
    if counts.size > MOST_THRESHOLDS:
        share = offsets_of(ordered)[counts] / ordered.sum()
        counts = counts[np.unique(np.searchsorted(share, np.linspace(0.0, 1.0, MOST_THRESHOLDS)))]
    return [int(k) for k in counts]


def shares_of(total: int, held: IntArray) -> IntArray:
    """Tokens of each rank, at most one apart; ranks that hold more already get the odd tokens."""
    shares = np.full(held.size, total // held.size, np.int64)
    shares[np.argsort(-held, kind="stable")[: total % held.size]] += 1
    return shares


def _short_part(ordered: IntArray, num_long: int, held: IntArray) -> RankedSpans:
    """Documents [num_long, n) as one sequence in 2 * cp chunks.

    held: tokens each rank has already, at most one apart, shape [cp]. Chunks are sized so that with
    them ranks still differ by at most one.
    """
    cp = held.size
    rest = shares_of(int(ordered.sum()), held) - held
    head = (rest + 1) // 2
    # The last rank's two chunks are adjacent and form one chunk.
    edges = np.delete(offsets_of(np.concatenate([head, (rest - head)[::-1]])), cp)
    ranks = np.delete(head_tail_ranks(cp), cp)
    spans = cut_sequence(ordered[num_long:], edges, ranks)
    return spans._replace(piece=spans.piece + num_long)


def _long_parts(
    start: IntArray, stop: IntArray, cost: WorkloadModel, counts: list[int]
) -> tuple[IntArray, list[IntArray]]:
    """Times and tokens of each rank for the first k documents, for each k in counts.

    (forward and backward time, shape [2, num_counts, cp]; tokens, each of shape [cp]).
    """
    cp = start.shape[1] // 2
    # The last rank's two chunks are adjacent and form one segment.
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
    """Slowest rank's forward plus slowest rank's backward, of each part and the times before it.

    times: shape [2, num_parts, cp].
    """
    cp = times.shape[2]
    start = np.concatenate([p.start for p in parts])
    stop = np.concatenate([p.stop for p in parts])
    rank = np.concatenate([p.rank + i * cp for i, p in enumerate(parts)])
    total = times.copy()
    for i, priced in enumerate(cost.segment_times_ns(stop - start, stop)):
        # float64 is exact below 2^53 ns (104 days); beyond that, rounding may only change the
        # choice.
        sums = np.bincount(rank, weights=priced, minlength=len(parts) * cp)
        total[i] += sums.astype(np.int64).reshape(-1, cp)
    return total.max(2).sum(0)
