"""A lower bound on the time of a mini-batch, for any assignment to ranks and micro-batches.

It is the largest of three bounds:

1. The mean work of a rank.
2. For each k, some rank has k + 1 of the k * num_ranks + 1 heaviest units.
3. If ranks wait for each other after every micro-batch: two units above half the token cap cannot
   share a micro-batch. So the s-th slowest slot takes at least as long as the (s * num_ranks)-th
   heaviest of these units. The work that does not fit into the first k slots, filled with the
   tokens that have most work, must be done after them.

A slot is the set of the ranks' i-th micro-batches, which run at the same time.
"""

import numpy as np

from wlb.plan.arrays import FloatArray


def least_time(
    work: FloatArray, tokens: FloatArray, *, num_ranks: int, cap: int, slots_wait: bool
) -> float:
    """Return the least time of a mini-batch.

    Args:
        work: Work of each unit, heaviest first, shape [num_units].
        tokens: Tokens of each unit, shape [num_units].
        num_ranks: Number of data-parallel ranks.
        cap: Most tokens of a micro-batch.
        slots_wait: Whether ranks wait for each other after every micro-batch.

    Returns:
        The bound, in the unit of `work`.
    """
    below = np.concatenate([[0.0], np.cumsum(work)])
    others = np.arange((work.size - 1) // num_ranks + 1)
    last = others * num_ranks
    best = max(float(work.sum()) / num_ranks, float((below[last + 1] - below[last - others]).max()))
    return max(best, _slots(work, tokens, num_ranks, cap)) if slots_wait else best


def _slots(work: FloatArray, tokens: FloatArray, num_ranks: int, cap: int) -> float:
    """Return the third bound, the best one over all k."""
    large = np.flatnonzero(tokens * 2 > cap)[::num_ranks]
    if not large.size:
        return 0.0
    dearest = np.argsort(-work / tokens, kind="stable")
    room = np.arange(1.0, large.size + 1) * num_ranks * cap
    at = np.concatenate([[0.0], np.cumsum(tokens[dearest])])
    most = np.interp(room, at, np.concatenate([[0.0], np.cumsum(work[dearest])]))
    rest = (float(work.sum()) - most) / num_ranks
    return float((np.cumsum(work[large]) + rest).max())
