"""Which records are held out: those whose hash of (seed, name) is below the fraction.

The choice depends on nothing else, so a corpus that grows keeps its split. Where a fraction above 0
leaves one side empty, the record nearest to the limit changes sides.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from wlb.plan import BoolArray


def draw(seed: int, name: str) -> float:
    """A number in [0, 1) that (seed, name) decides: below the fraction is held out."""
    data = f"{seed}\0{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48


def heldout_rows(names: Iterable[str], *, fraction: float, seed: int) -> BoolArray:
    """Which of the listed documents are held out, bool [num_documents]; a single one is trained."""
    draws = np.array([draw(seed, name) for name in names])
    heldout = draws < fraction
    if heldout.size <= 1:
        heldout[:] = False
    elif fraction > 0 and not heldout.any():
        heldout[np.argmin(draws)] = True
    elif heldout.all():
        heldout[np.argmax(draws)] = False
    return heldout
