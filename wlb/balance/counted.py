"""Gives every rank equally many samples, starting from bins that were made without that rule.

1. Slot by slot, bins with most samples go to the ranks with fewest samples so far.
2. Where ranks still differ, the lightest unit of the rank with most samples moves to the rank with
   fewest, into the bin with most missing work among those that have room.

A bin is one rank's micro-batch, and a slot is the set of bins that run at the same time.
"""

import numpy as np

from wlb.balance.exchange import sums_by
from wlb.balance.improve import Rules, Units
from wlb.plan import IntArray


def even_counts(units: Units, bin_of: IntArray, num: int, rules: Rules) -> IntArray | None:
    """Assign bins to ranks so that the ranks' numbers of samples satisfy the rules.

    Args:
        units: The units.
        bin_of: Bin of each unit. There are num_ranks * num bins, none of them empty or above the
            token cap.
        num: Micro-batches of a rank.
        rules: The rules.

    Returns:
        rank * num + slot of each unit, or None if that was not possible.
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
    """Move units in place until counts satisfy the rules, and return whether that was possible.

    Args:
        units: The units.
        bin_of: rank * num + slot of each unit.
        level: Work that each bin should have, shape [num_ranks * num].
        num: Micro-batches of a rank.
        rules: The rules.
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
        # Units are sorted by descending work, so the last one that may leave is the lightest. The
        # last unit of a bin may not leave it.
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
