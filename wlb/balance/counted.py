"""counted: bins to ranks so that ranks hold as many samples, with few units moved.

Slot after slot, bins with most samples go to ranks with fewest. What is then still uneven is moved:
the lightest unit of a rank with too many goes to a rank with too few, into its bin with most work
to spare that has room.
"""

import numpy as np

from wlb.balance.exchange import sums_by
from wlb.balance.improve import Rules, Units
from wlb.plan import IntArray


def even_counts(units: Units, bin_of: IntArray, num: int, rules: Rules) -> IntArray | None:
    """Rank * num + slot of each unit, with counts as the rules have them, or None without success.

    bin_of: any bins that keep the cap, num_ranks * num of them, none empty.
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
    """Move units in place until counts are as the rules have them; whether that was possible."""
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
        # Units are heaviest first: the last that may leave is the lightest.
        may = np.flatnonzero((bin_of // num == giver) & (inside[bin_of] > 1))
        own = np.arange(taker * num, (taker + 1) * num)
        if not may.size:
            return False
        unit = int(may[-1])
        fits = own[size[own] + units.tokens[unit] <= rules.cap]
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
