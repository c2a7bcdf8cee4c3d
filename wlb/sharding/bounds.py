"""What no sharding can do better than: rows that the busiest rank receives, and a micro-batch's
time.

Both look at the longest document alone. Whoever holds its last token reads all of it, and holds at
most a rank's share of the tokens. Beside that, time is at least attention's, shared evenly, and
what is waited for a rank's rows; own keys hide at most the attention of a document that is a rank's
share long. `ideal_kernels_ns` is a yardstick rather than a bound, and so is what is built on it.
"""

import numpy as np

from wlb.cost import HiddenExchange, WorkloadModel, ideal_kernels_ns
from wlb.cost.protocol import causal_pairs
from wlb.plan import FloatArray, IntArray, IntLike, UserError
from wlb.sharding.paper import checked_lengths

TRIED_SPLITS = 256
"""Numbers of tokens of the longest document that another node is taken to hold."""


def least_rows(lengths: IntLike, *, cp: int, slack: float | None = None) -> int:
    """Rows that the busiest rank receives at least, for pieces of `lengths` (shape [num_pieces]).

    slack: no rank has more than 1 + slack of the mean rank's query-key pairs; None: any work. The
    j-th furthest-reading rank of a document then reads to where j - 1 full ranks could not, and to
    receive R it holds all that it reads beyond R, while all of them hold one document.
    """
    pieces = checked_lengths(lengths, cp)
    if not pieces.size:
        return 0
    share = -(-int(pieces.sum()) // cp)
    least = max(0, int(pieces.max()) - share)
    if slack is None or cp == 1:
        return least
    most = (1 + slack) * float(causal_pairs(pieces, pieces).sum()) / cp
    for length in pieces[pieces > least].tolist():
        reach = np.sqrt(np.maximum(0.0, length * length - 2 * most * np.arange(cp)))
        least = max(least, _least_rows_of(reach, length))
    return least


def _least_rows_of(reach: FloatArray, length: int) -> int:
    """The least R for which ranks that read to `reach`, falling, hold no more than the document."""
    held = np.cumsum(reach)
    count = np.arange(1, reach.size + 1)
    return max(0, int(((held - length) / count).max()))


def least_time_ns(lengths: IntLike, *, cp: int, cost: WorkloadModel) -> tuple[float, float]:
    """Least time of a micro-batch's attention and waits, by an all-gather and by need.

    UserError for a workload that does not know what hides an exchange.
    """
    pieces = checked_lengths(lengths, cp)
    if not isinstance(cost, HiddenExchange):
        raise UserError(f"{type(cost).__name__} does not know what hides an exchange of keys")
    ideal = float(ideal_kernels_ns(pieces, cost, cp=cp))
    if cp == 1 or not pieces.size:
        return ideal, ideal
    waits = _LeastWaits(int(pieces.sum()), cp, cost)
    if cost.overlaps:
        waits.own = _most_hidden(pieces, cp, cost)
    if cost.overlaps and cost.stages > 1:
        forward, backward = cost.segment_times_ns(pieces, pieces)
        waits.all_attention = (float(forward.sum()) / cp, float(backward.sum()) / cp)
    gather = ideal + waits.of(None)
    share, near = -(-int(pieces.sum()) // cp), min(cp, cost.cp_ranks_per_node)
    longest = int(pieces.max())
    if near == cp:
        return gather, ideal + waits.of(_received(cp, 1, max(0, longest - share)))
    # Say the node of the document's last token holds all but `away` of its tokens. Each of its
    # ranks that reads that far receives those from other nodes, and the node's work is at least
    # that of as many first tokens as it holds.
    away = np.unique(np.linspace(max(0, longest - near * share), longest - 1, TRIED_SPLITS))
    held = longest - away.astype(np.int64)
    forward, backward = cost.segment_times_ns(held, held)
    times = [
        max(ideal, work / near) + waits.of(_received(cp, near, rows))
        for work, rows in zip((forward + backward).tolist(), (longest - held).tolist(), strict=True)
    ]
    return gather, min(times)


def _most_hidden(pieces: IntArray, cp: int, cost: WorkloadModel) -> tuple[float, float]:
    """Attention over own keys of a rank, forward and backward, at most: of documents that are as
    long as a rank can hold.
    """
    total = int(pieces.sum())
    longest = min(int(pieces.max()), -(-total // cp))
    num = -(-total // (cp * longest))
    forward, backward = cost.segment_times_ns([longest], [longest])
    return float(num * forward[0]), float(num * backward[0])


class _LeastWaits:
    """Least time that ranks wait for transfers, if own keys hide as much as they ever could."""

    def __init__(self, num_tokens: int, cp: int, cost: HiddenExchange) -> None:
        self.num_tokens, self.cp, self.cost = num_tokens, cp, cost
        self.hidden = cost.products_ns(num_tokens)
        self.own = (0.0, 0.0)
        self.all_attention: tuple[float, float] | None = None

    def of(self, moved: IntArray | None) -> float:
        there, again, back = self.cost.transfers_ns(moved, self.num_tokens, cp=self.cp)
        if self.all_attention is not None:
            # Stages hide behind attention over those before them, at most behind all of it.
            forward, backward = self.all_attention
            hidden = self.hidden.repeated + self.hidden.gradients + backward
            waits = there - self.hidden.forward - forward, again + back - hidden
            return sum(max(0.0, ns) for ns in waits)
        waits = (
            there - self.hidden.forward - self.own[0],
            again - self.hidden.repeated,
            back - self.hidden.gradients - self.own[1],
        )
        return sum(max(0.0, ns) for ns in waits)


def _received(cp: int, sender: int, rows: int) -> IntArray:
    """Rank 0 receives `rows` of one other rank."""
    moved = np.zeros((cp, cp), np.int64)
    moved[0, sender] = rows
    return moved
