"""bound: no assignment of these units to ranks and micro-batches can take less time than this.

The larger of: the work of a rank's fair share; the heaviest units, of which k + 1 meet on a rank if
there are more than k times the ranks; and, where slots synchronise, the first k slots: as units
above half the cap are alone among their kind in a bin, slot s takes at least the (s * ranks)th
heaviest of them, and k slots hold no more than the dearest tokens that fit in them.
"""

import numpy as np

from wlb.plan.arrays import FloatArray


def least_time(
    work: FloatArray, tokens: FloatArray, *, num_ranks: int, cap: int, slots_wait: bool
) -> float:
    """Time of a step at least, in units of `work`; work: heaviest first, shape [num_units]."""
    below = np.concatenate([[0.0], np.cumsum(work)])
    others = np.arange((work.size - 1) // num_ranks + 1)
    last = others * num_ranks
    best = max(float(work.sum()) / num_ranks, float((below[last + 1] - below[last - others]).max()))
    return max(best, _slots(work, tokens, num_ranks, cap)) if slots_wait else best


def _slots(work: FloatArray, tokens: FloatArray, num_ranks: int, cap: int) -> float:
    large = np.flatnonzero(tokens * 2 > cap)[::num_ranks]
    if not large.size:
        return 0.0
    dearest = np.argsort(-work / tokens, kind="stable")
    room = np.arange(1.0, large.size + 1) * num_ranks * cap
    at = np.concatenate([[0.0], np.cumsum(tokens[dearest])])
    most = np.interp(room, at, np.concatenate([[0.0], np.cumsum(work[dearest])]))
    rest = (float(work.sum()) - most) / num_ranks
    return float((np.cumsum(work[large]) + rest).max())
