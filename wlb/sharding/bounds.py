"""Lower bounds for any sharding: on the rows that some rank must receive, and on the time.

A row has the key and value of one token. Both bounds look at the longest document alone. The rank
with its last token needs the keys of all its tokens, but has at most a rank's share of the
micro-batch's tokens. So it must receive the other rows from other ranks.

A micro-batch takes at least the time of its attention, divided evenly over the ranks, plus the time
that a rank waits for its rows. Attention over the keys of a rank's own tokens can hide a part of
the transfer. This attention takes longest if the rank has whole documents that are as long as
possible.

The time is an estimate and not a proven bound, because it uses `ideal_kernels_ns`, an estimate.
"""

import numpy as np

from wlb.cost import HiddenExchange, WorkloadModel, ideal_kernels_ns
from wlb.cost.protocol import causal_pairs
from wlb.plan import FloatArray, IntArray, IntLike, UserError
from wlb.sharding.paper import checked_lengths

TRIED_SPLITS = 256
"""Number of divisions of the longest document between nodes that `least_time_ns` tries."""


def least_rows(lengths: IntLike, *, cp: int, slack: float | None = None) -> int:
    """Return a number of rows that at least one rank must receive, whatever the sharding is.

    A row has the key and value of one token.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        slack: Consider only shardings in which no rank has more than 1 + slack times the mean
            number of query-key pairs. In such shardings ranks must receive more rows. None
            considers all shardings.
    """
    pieces = checked_lengths(lengths, cp)
    if not pieces.size:
        return 0
    share = -(-int(pieces.sum()) // cp)
    least = max(0, int(pieces.max()) - share)
    if slack is None or cp == 1:
        return least
    # If work is limited, one rank cannot process all of a document's last tokens. j ranks can
    # process at most the last (length - reach[j]) tokens of a document. So another rank has the
    # token before these, and it needs at least reach[j] rows.
    most = (1 + slack) * float(causal_pairs(pieces, pieces).sum()) / cp
    for length in pieces[pieces > least].tolist():
        reach = np.sqrt(np.maximum(0.0, length * length - 2 * most * np.arange(cp)))
        least = max(least, _least_rows_of(reach, length))
    return least


def _least_rows_of(reach: FloatArray, length: int) -> int:
    """Return the least number of a document's rows that some rank must receive from others.

    Suppose that no rank receives more than R rows from others. Then rank j, which needs `reach[j]`
    rows, must have at least reach[j] - R rows itself. Together, the ranks cannot have more rows
    than the document. So R has a lower bound.

    Args:
        reach: Rows of the document that each rank needs, in descending order, shape [cp].
        length: Tokens of the document.
    """
    held = np.cumsum(reach)
    count = np.arange(1, reach.size + 1)
    return max(0, int(((held - length) / count).max()))


def least_time_ns(lengths: IntLike, *, cp: int, cost: WorkloadModel) -> tuple[float, float]:
    """Return the least time of a micro-batch's attention and exchange of keys, in ns.

    The time is for forward and backward together. It includes only that part of the exchange for
    which ranks wait.

    Args:
        lengths: Tokens of each piece, shape [num_pieces].
        cp: Number of CP ranks.
        cost: Predicts the times of attention and of transfers.

    Returns:
        The time with an all-gather, and the time if only needed rows are transferred.

    Raises:
        UserError: If the workload does not implement `HiddenExchange`.
    """
    pieces = checked_lengths(lengths, cp)
    if not isinstance(cost, HiddenExchange):
        raise UserError(
            f"{type(cost).__name__} cannot predict which part of a key exchange is hidden by "
            "attention; give a cost that implements HiddenExchange, such as a ProfiledWorkload"
        )
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
    # Assume that the node with the document's last token has all but `away` of the document's
    # tokens. Then the rank with the last token must receive `away` rows from other nodes, and the
    # node's attention takes at least as long as for a document that is shorter by `away` tokens.
    # Try several values of `away`, and take the least time.
    away = np.unique(np.linspace(max(0, longest - per_node * share), longest - 1, TRIED_SPLITS))
    held = longest - away.astype(np.int64)
    forward, backward = cost.segment_times_ns(held, held)
    times = [
        max(ideal, work / per_node) + waits.of(_received(cp, per_node, rows))
        for work, rows in zip((forward + backward).tolist(), (longest - held).tolist(), strict=True)
    ]
    return gather, min(times)


def _most_hidden(pieces: IntArray, cp: int, cost: WorkloadModel) -> tuple[float, float]:
    """Return the longest time that a rank's attention over its own keys can take.

    The exchange of keys may be hidden behind this attention, which takes longest on a rank that has
    only whole documents, each as long as possible.

    Returns:
        Forward time and backward time in ns.
    """
    total = int(pieces.sum())
    longest = min(int(pieces.max()), -(-total // cp))
    num = -(-total // (cp * longest))
    forward, backward = cost.segment_times_ns([longest], [longest])
    return float(num * forward[0]), float(num * backward[0])


class _LeastWaits:
    """Predicts how long ranks wait for keys if computation hides as much as possible."""

    def __init__(self, num_tokens: int, cp: int, cost: HiddenExchange) -> None:
        self.num_tokens, self.cp, self.cost = num_tokens, cp, cost
        self.hidden = cost.products_ns(num_tokens)
        # Longest forward and backward time of a rank's attention over keys of its own tokens,
        # during which keys of other ranks travel.
        self.local_attention = (0.0, 0.0)
        # Mean forward and backward time of a rank's whole attention, which may hide transfers if an
        # exchange has several stages. None = one stage.
        self.all_attention: tuple[float, float] | None = None

    def of(self, moved: IntArray | None) -> float:
        """Return how long ranks wait for an exchange of keys, forward plus backward, in ns.

        Args:
            moved: moved[i, j] is the number of rows that rank i receives from rank j, shape
                [cp, cp]. None = an all-gather.
        """
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
    """Return how many rows each rank receives from each other rank, shape [cp, cp].

    Only rank 0 receives any: `rows` of them, from rank `sender`.
    """
    moved = np.zeros((cp, cp), np.int64)
    moved[0, sender] = rows
    return moved
