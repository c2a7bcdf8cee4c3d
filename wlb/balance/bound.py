"""A lower bound on the time of a mini-batch, for any assignment to ranks and micro-batches.

A unit is a sample, or samples that must share a micro-batch. A slot is the set of the ranks' i-th
micro-batches, which run at the same time. `least_time` returns the largest of three bounds:

1. The mean work of a rank.
2. For each k: among the k * num_ranks + 1 units with most work, some rank has at least k + 1. So
   the time is at least the work of the k + 1 lightest of these units.
3. This bound holds only if ranks wait for each other after every micro-batch. For each k, it is
   the sum of two times. The first is that of the k slowest slots: units with more tokens than half
   the cap cannot share a micro-batch, so if they are sorted by descending work, the s-th slowest
   slot (from 0) takes at least as long as unit s * num_ranks. The second is that of the other
   slots: the k slowest have room for k * num_ranks * cap tokens, and even if these are the tokens
   with most work, the other slots must do the rest.
"""

import numpy as np

from wlb.plan.arrays import FloatArray


def least_time(
    work: FloatArray, tokens: FloatArray, *, num_ranks: int, cap: int, slots_wait: bool
) -> float:
    """Return a lower bound on the time of a mini-batch, for any assignment of its units.

    Args:
        work: Work of each unit (a sample, or samples that share a micro-batch), in descending
            order, shape [num_units].
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
    """Return the lower bound that the token cap implies if ranks wait after every micro-batch.

    A slot is the set of the ranks' i-th micro-batches. For each k there is a bound, the sum of two
    times: the least time of the k slowest slots, and the least time of all other slots. The other
    slots must do the work that does not fit into the k slots. At best this work is divided equally
    over the ranks. The largest of the bounds is returned. The top of this file derives it.

    Args:
        work: Work of each unit, in descending order.
        tokens: Tokens of each unit.
        num_ranks: Number of data-parallel ranks.
        cap: Most tokens of a micro-batch.
    """
    large = np.flatnonzero(tokens * 2 > cap)[::num_ranks]
    if not large.size:
        return 0.0
    dearest = np.argsort(-work / tokens, kind="stable")
    room = np.arange(1.0, large.size + 1) * num_ranks * cap
    at = np.concatenate([[0.0], np.cumsum(tokens[dearest])])
    most = np.interp(room, at, np.concatenate([[0.0], np.cumsum(work[dearest])]))
    rest = (float(work.sum()) - most) / num_ranks
    return float((np.cumsum(work[large]) + rest).max())
