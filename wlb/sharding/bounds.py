"""Lower bounds for any sharding: on the rows that the busiest rank receives, and on time.

Both bounds look at the longest document alone. The rank with its last token reads all of its keys,
but has at most a rank's share of the tokens, so it must receive the rest.

A micro-batch takes at least the time of its attention, shared evenly, plus the time that a rank
waits for its rows. Attention over a rank's local keys can hide a part of the transfer: at most the
attention of a document that is as long as a rank's share of the tokens.

The time is an estimate rather than a proven bound, because `ideal_kernels_ns` is one.
"""

import numpy as np

from wlb.cost import HiddenExchange, WorkloadModel, ideal_kernels_ns
from wlb.cost.protocol import causal_pairs
from wlb.plan import FloatArray, IntArray, IntLike, UserError
from wlb.sharding.paper import checked_lengths

TRIED_SPLITS = 256
"""How many divisions of the longest document between two nodes are tried."""


def least_rows(lengths: IntLike, *, cp: int, slack: float | None = None) -> int:
    """Return how many rows the busiest rank receives at least.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        slack: No rank may have more than 1 + slack times the mean rank's query-key pairs. This
            gives a higher bound. None permits any work.
    """
    pieces = checked_lengths(lengths, cp)
    if not pieces.size:
        return 0
    share = -(-int(pieces.sum()) // cp)
    least = max(0, int(pieces.max()) - share)
    if slack is None or cp == 1:
        return least
    # With limited work, the last tokens of a document are spread over several ranks: j ranks can
    # process at most its last length - reach[j] tokens, so a further rank reads at least reach[j].
    most = (1 + slack) * float(causal_pairs(pieces, pieces).sum()) / cp
    for length in pieces[pieces > least].tolist():
        reach = np.sqrt(np.maximum(0.0, length * length - 2 * most * np.arange(cp)))
        least = max(least, _least_rows_of(reach, length))
    return least


def _least_rows_of(reach: FloatArray, length: int) -> int:
    """Return the least number of rows that one of the ranks reading a document must receive.

    A rank that reads `reach[j]` rows and receives R has the other reach[j] - R rows itself. The
    ranks together cannot have more rows than the document.

    Args:
        reach: Rows that each rank reads, in descending order, shape [cp].
        length: Tokens of the document.
    """
    held = np.cumsum(reach)
    count = np.arange(1, reach.size + 1)
    return max(0, int(((held - length) / count).max()))


def least_time_ns(lengths: IntLike, *, cp: int, cost: WorkloadModel) -> tuple[float, float]:
    """Return the least time of a micro-batch's attention and exchange, in ns.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Prices.

    Returns:
        The time with an all-gather, and the time with a `needed` exchange.

    Raises:
        UserError: If the workload does not implement `HiddenExchange`.
    """
    pieces = checked_lengths(lengths, cp)
    if not isinstance(cost, HiddenExchange):
        raise UserError(f"{type(cost).__name__} does not know what hides an exchange of keys")
    ideal = float(ideal_kernels_ns(pieces, cost, cp=cp))
    if cp == 1 or not pieces.size:
        return ideal, ideal
    waits = _LeastWaits(int(pieces.sum()), cp, cost)
    if cost.overlaps:
        waits.local_attention = _most_hidden(pieces, cp, cost)
    if cost.overlaps and cost.stages > 1:
        forward, backward = cost.segment_times_ns(pieces, pieces)
        waits.all_attention = (float(forward.sum()) / cp, float(backward.sum()) / cp)
    gather = ideal + waits.of(None)
    share, per_node = -(-int(pieces.sum()) // cp), min(cp, cost.cp_ranks_per_node)
    longest = int(pieces.max())
    if per_node == cp:
        return gather, ideal + waits.of(_received(cp, 1, max(0, longest - share)))
    # Assume that the node with the document's last token has all but `away` of its tokens. The rank
    # with that token receives these from other nodes. The node's work is at least that of the
    # document's first tokens, of the same number as it has. Take the best `away`.
    away = np.unique(np.linspace(max(0, longest - per_node * share), longest - 1, TRIED_SPLITS))
    held = longest - away.astype(np.int64)
    forward, backward = cost.segment_times_ns(held, held)
    times = [
        max(ideal, work / per_node) + waits.of(_received(cp, per_node, rows))
        for work, rows in zip((forward + backward).tolist(), (longest - held).tolist(), strict=True)
    ]
    return gather, min(times)


def _most_hidden(pieces: IntArray, cp: int, cost: WorkloadModel) -> tuple[float, float]:
    """Return the most attention over local keys that a rank can have, in forward and backward.

    It is that of a rank that is filled with whole documents, each as long as possible.
    """
    total = int(pieces.sum())
    longest = min(int(pieces.max()), -(-total // cp))
    num = -(-total // (cp * longest))
    forward, backward = cost.segment_times_ns([longest], [longest])
    return float(num * forward[0]), float(num * backward[0])


class _LeastWaits:
    """The least time that ranks wait for transfers, if computation hides as much as it can."""

    def __init__(self, num_tokens: int, cp: int, cost: HiddenExchange) -> None:
        self.num_tokens, self.cp, self.cost = num_tokens, cp, cost
        self.hidden = cost.products_ns(num_tokens)
        # Most attention over local keys of a rank, in forward and backward, if that hides
        # transfers.
        self.local_attention = (0.0, 0.0)
        # Attention of a mean rank, in forward and backward, if an exchange has several stages.
        self.all_attention: tuple[float, float] | None = None

    def of(self, moved: IntArray | None) -> float:
        """Return the waiting time in ns for rows `moved` between ranks; None is an all-gather."""
        keys, repeated, gradients = self.cost.transfers_ns(moved, self.num_tokens, cp=self.cp)
        if self.all_attention is not None:
            # Attention over one stage's keys hides the transfer of the next stage, so all of
            # attention may hide transfers.
            forward, backward = self.all_attention
            hidden = self.hidden.repeated + self.hidden.gradients + backward
            waits = keys - self.hidden.forward - forward, repeated + gradients - hidden
            return sum(max(0.0, ns) for ns in waits)
        waits = (
            keys - self.hidden.forward - self.local_attention[0],
            repeated - self.hidden.repeated,
            gradients - self.hidden.gradients - self.local_attention[1],
        )
        return sum(max(0.0, ns) for ns in waits)


def _received(cp: int, sender: int, rows: int) -> IntArray:
    """Return the rows that move between ranks if rank 0 receives `rows` from rank `sender` only."""
    moved = np.zeros((cp, cp), np.int64)
    moved[0, sender] = rows
    return moved
