"""Divides a rollout batch into mini-batches with equal work and similar lengths.

Groups (or samples) are sorted by work and cut into blocks of as many as there are mini-batches.
Each mini-batch gets one item of every block: one of the longest, one of the next longest, and so
on. So no mini-batch has longer samples than another. In a block, the heaviest item goes to the
mini-batch with least work so far.
"""

import numpy as np

from wlb.balance.solve import assign_blocks
from wlb.plan import IntArray, UserError
from wlb.plan.arrays import FloatArray


def choose(work: FloatArray, samples: FloatArray, num: int, *, equal_counts: bool) -> IntArray:
    """Choose the mini-batch of each item (a group or a sample).

    Args:
        work: Work of each item, shape [num_items].
        samples: Number of samples of each item, shape [num_items].
        num: Number of mini-batches.
        equal_counts: Whether mini-batches must have equally many samples.

    Returns:
        The mini-batch of each item, shape [num_items].

    Raises:
        UserError: If there are fewer items than mini-batches, or equal counts are not possible.
    """
    if work.size < num:
        raise UserError(
            f"{work.size} samples or groups cannot fill {num} mini-batches; lower mini_batches"
        )
    order = np.lexsort((-work, -samples))
    out = np.empty(work.size, np.int64)
    out[order] = assign_blocks(work[order], samples[order], num, counts=True)
    held = np.bincount(out, samples, num)
    if equal_counts and held.min() < held.max():
        raise UserError(
            f"mini-batches would have {held.min():.0f} to {held.max():.0f} samples, but "
            f"equal_counts requires {samples.sum() / num:g}; give groups of equal size, whose "
            f"number is a multiple of mini_batches = {num}"
        )
    return out
