"""Divides a rollout batch into mini-batches with equal work and similar lengths.

An item is a group or a single sample. Items are sorted by their number of samples, then by work,
and cut into blocks. A block has as many items as there are mini-batches, and each mini-batch gets
one of them. So every mini-batch gets one of the longest items, one of the next longest, and so on,
and all mini-batches have samples of similar length. In a block, the item with most work goes to the
mini-batch with fewest samples so far. If several mini-batches have equally few samples, the item
goes to the mini-batch with least work among them.
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
            f"{work.size} samples (those with equal `groups` or `atoms` count as one) are too few "
            f"for mini_batches = {num}, because each mini-batch needs at least one; lower "
            "mini_batches"
        )
    order = np.lexsort((-work, -samples))
    out = np.empty(work.size, np.int64)
    out[order] = assign_blocks(work[order], samples[order], num, counts=True)
    held = np.bincount(out, samples, num)
    if equal_counts and held.min() < held.max():
        raise UserError(
            f"equal_counts requires {samples.sum() / num:g} samples in each mini-batch, but "
            f"mini-batches would have {held.min():.0f} to {held.max():.0f}, because samples with "
            f"equal `groups` or `atoms` must stay together; make all groups equally large and "
            f"their number a multiple of mini_batches = {num}, or leave out equal_counts"
        )
    return out
