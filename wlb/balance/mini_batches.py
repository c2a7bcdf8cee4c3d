"""mini_batches: a rollout batch to optimiser steps of equal work and of the same lengths.

Groups (or samples) are ranked by work and dealt block by block, as many in a block as there are
mini-batches: so each gets one of the longest, one of the next longest, and so on, and no
mini-batch has longer samples than another. In a block the heaviest goes to the one with least work.
"""

import numpy as np

from wlb.balance.solve import deal_blocks
from wlb.plan import IntArray, UserError
from wlb.plan.arrays import FloatArray


def choose(work: FloatArray, samples: FloatArray, num: int, *, equal_counts: bool) -> IntArray:
    """The mini-batch of each item. work, samples: of groups, shape [num_items].

    UserError for fewer items than mini-batches, and for unequal counts where equal ones are asked.
    """
    if work.size < num:
        raise UserError(
            f"{work.size} samples or groups cannot fill {num} mini-batches; lower mini_batches"
        )
    order = np.lexsort((-work, -samples))
    out = np.empty(work.size, np.int64)
    out[order] = deal_blocks(work[order], samples[order], num, counts=True)
    held = np.bincount(out, samples, num)
    if equal_counts and held.min() < held.max():
        raise UserError(
            f"mini-batches would hold {held.min():.0f} to {held.max():.0f} samples, and "
            f"equal_counts asks for {samples.sum() / num:g}; give groups of equal size, as many "
            f"as a multiple of mini_batches = {num}"
        )
    return out
