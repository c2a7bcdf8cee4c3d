"""Gives every rank equally many samples, starting from bins that were made without that rule.

A bin is one rank's micro-batch, and a slot is the set of bins that run at the same time. A unit is
a sample, or samples that must share a micro-batch.

1. In each slot, the bins with most samples go to the ranks with fewest samples so far.
2. While a rank has more or fewer samples than permitted, a unit moves from the rank with most
   samples to the rank with fewest. It is the unit with least work that is not alone in its bin. Of
   the bins of the other rank that have room, it goes to the one that is furthest below the mean
   work of its slot.
"""

import numpy as np

from wlb.balance.exchange import sums_by
from wlb.balance.improve import Rules, Units
from wlb.plan import IntArray


def even_counts(units: Units, bin_of: IntArray, num: int, rules: Rules) -> IntArray | None:
    """Assign bins to ranks, and move units, so that each rank has a permitted number of samples.

    A bin is one rank's micro-batch. The bins of `bin_of` do not belong to ranks yet.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        bin_of: Bin of each unit. There are num_ranks * num bins, none of them empty or above the
            token cap.
        num: Micro-batches of a rank.
        rules: What the assignment must satisfy.

    Returns:
        The number of each unit's new bin (rank * num + m is micro-batch m of a rank), or None if
        the rules could not be satisfied.
    """
    ranks = rules.num_ranks
    loads, held = sums_by(bin_of, units.work), sums_by(bin_of, units.samples)
    slots = np.argsort(-loads, kind="stable").reshape(-1, ranks)
    total, new = np.zeros(ranks), np.empty(loads.size, np.int64)
    for slot, members in enumerate(slots):
        order = np.argsort(total, kind="stable")
        most_first = members[np.argsort(-held[members], kind="stable")]
        new[most_first] = order * num + slot
        total[order] += held[most_first]
    out = new[bin_of]
    level = np.tile(loads[slots].mean(1), ranks)
    return out if _move(units, out, level, num, rules) else None


def _move(units: Units, bin_of: IntArray, level: IntArray, num: int, rules: Rules) -> bool:
    """Move units between ranks until each rank has a permitted number of samples.

    Args:
        units: Samples, or sets of samples that share a micro-batch.
        bin_of: Number of each unit's bin, changed in place: rank * num + m is micro-batch m of a
            rank.
        level: Work that each bin should have, shape [num_ranks * num].
        num: Micro-batches of a rank.
        rules: What the assignment must satisfy.

    Returns:
        Whether this was possible.
    """
    least, most = rules.counts or (0, 0)
    bins = level.size
    size = sums_by(bin_of, units.tokens, bins)
    spare = level - sums_by(bin_of, units.work, bins)
    inside = np.bincount(bin_of, minlength=bins)
    total = sums_by(bin_of // num, units.samples, rules.num_ranks)
    for _ in range(units.work.size):
        giver, taker = int(total.argmax()), int(total.argmin())
        if total[giver] <= most and total[taker] >= least:
            return True
        # Take the unit with least work of the rank with most samples. It is the one with the
        # largest index, because units are sorted by descending work. A unit that is alone in its
        # bin may not leave it.
        movable = np.flatnonzero((bin_of // num == giver) & (inside[bin_of] > 1))
        targets = np.arange(taker * num, (taker + 1) * num)
        if not movable.size:
            return False
        unit = int(movable[-1])
        fits = targets[size[targets] + units.tokens[unit] <= rules.cap]
        if not fits.size:
            return False
        target = int(fits[spare[fits].argmax()])
        source = int(bin_of[unit])
        for place, sign in ((source, -1), (target, 1)):
            size[place] += sign * units.tokens[unit]
            spare[place] -= sign * units.work[unit]
            inside[place] += sign
            total[place // num] += sign * units.samples[unit]
        bin_of[unit] = target
    return False
