"""Parse `data.blend`, which lists the token stores that a run mixes, with their weights."""

import math
from collections.abc import Sequence

from wlb.plan import UserError
from wlb.plan.numerals import real_of


def parse_blend(entries: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return (prefix, weight) of each entry "PREFIX:WEIGHT".

    The weights say how the tokens of a run are divided over the stores. They need not add up to 1.

    Raises:
        UserError: If an entry has another form, or a store is named twice.
    """
    found: list[tuple[str, float]] = []
    for entry in entries:
        # Split at the last colon, because a path may contain colons.
        prefix, colon, number = entry.rpartition(":")
        try:
            weight = real_of(number)
        except ValueError:
            weight = math.nan
        if not (colon and prefix and 0 < weight < math.inf):
            raise UserError(
                f"data.blend: {entry!r} is not PREFIX:WEIGHT with a weight above 0, such as "
                f'"stores/web:0.7"; correct the entry, or remove a store whose weight is 0'
            )
        if prefix in [name for name, _ in found]:
            raise UserError(
                f"data.blend names {prefix} twice; give one entry with the sum of the weights"
            )
        found.append((prefix, weight))
    return tuple(found)
