"""`data.blend`: which stores a run mixes, with what weights."""

import math
from collections.abc import Sequence


def parse_blend(entries: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """(prefix, weight) of entries "prefix:weight"; ValueError for one that is none.

    Weights are shares of tokens and need not add up to 1.
    """
    found: list[tuple[str, float]] = []
    for entry in entries:
        prefix, colon, number = entry.rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not (colon and prefix and 0 < weight < math.inf):
            raise ValueError(
                f"data.blend: {entry!r} is not PREFIX:WEIGHT with a weight above 0, such as "
                f'"stores/web:0.7"; leave out a store of weight 0'
            )
        if prefix in [name for name, _ in found]:
            raise ValueError(f"data.blend names {prefix} twice; add its weights up")
        found.append((prefix, weight))
    return tuple(found)
