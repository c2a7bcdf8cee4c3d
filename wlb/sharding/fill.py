"""Fills ranks one after the other, so that each has its number of tokens and its share of the work.

A long document has more work per token than a short one (it is denser). A rank therefore mixes both
kinds:

1. Take the densest documents, until filling the rest of the rank with the lightest documents would
   bring it exactly to its share of the work.
2. Fill the rest with the lightest documents, and cut the last one.

What remains for the other ranks then has the same mean work per token as before, so the next rank
faces the same problem. Each rank makes about two cuts, whatever the number of ranks is. A document
that is too large for one rank is cut among as few ranks as it fills.

`wlb.sharding.nodes.split` does the same for nodes, but cuts only documents that no node can take.
Cost: a Python loop over documents for each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import IntArray

TILE = 128
"""Query rows of a tile. Attention kernels compute whole tiles."""
LONGEST_RUN = 1024
"""Documents of at most this many tokens are cut in runs by default."""
LIGHTEST = 0.15
"""This share of all tokens, those with least work per token, is expected to fill up the nodes."""


class FillCut(IntEnum):
    """How a document is cut."""

    WHOLE = 0
    """Not at all."""
    SYMMETRIC = 1
    """Each part has tokens from both ends of the rest, so that parts have equal work per token."""
    RUN = 2
    """Each part has consecutive tokens, of which later ones have more work."""


@dataclass(slots=True, kw_only=True)
class FillPart:
    """Tokens of one document that a rank or a node gets: the whole document, or a part of it."""

    piece: int  # the document
    size: int  # tokens of the part
    density: float  # work per token in ns
    cut: FillCut = FillCut.WHOLE  # how the document is cut
    start: int = 0  # first token of a run

    @property
    def work(self) -> float:
        """Predicted time of the part in ns."""
        return self.size * self.density

    def taken(self, size: int, cut: FillCut) -> "FillPart":
        """Remove `size` tokens from this part, and return them as a part of the same density."""
        self.size -= size
        self.cut = cut
        return replace(self, size=size)


class HeadWork:
    """A table of the predicted work of a document's first n tokens, forward and backward."""

    def __init__(self, longest: int, cost: WorkloadModel) -> None:
        heads = np.minimum(np.arange(0, longest + TILE, TILE), longest)
        forward, backward = cost.segment_times_ns(heads, heads)
        self._ns: list[float] = (forward + backward).astype(np.float64).tolist()

    def of(self, size: int) -> float:
        """Return the work in ns of the first `size` tokens, rounded up to a tile."""
        return self._ns[-(-size // TILE)]

    def take_run(self, part: FillPart, size: int) -> FillPart:
        """Remove the first `size` tokens from `part`, and return them as a run.

        The run is lighter than the rest, because later tokens see more keys.
        """
        stop = part.start + size
        run = replace(part, size=size, cut=FillCut.RUN)
        run.density = (self.of(stop) - self.of(part.start)) / size
        rest = max(0.0, part.work - run.work)
        part.size -= size
        part.start, part.cut, part.density = stop, FillCut.RUN, rest / part.size
        return run


def parts_of(pieces: IntArray, work: IntArray) -> list[FillPart]:
    """Return the documents as whole parts, the densest first.

    Args:
        pieces: Tokens of each document, shape [num_pieces].
        work: Predicted time of each document in ns, shape [num_pieces].
    """
    density = work / pieces
    order = np.argsort(-density, kind="stable").tolist()
    return [FillPart(piece=i, size=int(pieces[i]), density=float(density[i])) for i in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """Where documents are cut."""

    share: float = 1.0
    """Most work of a long document that one rank may have, over a rank's mean work. At least 1. A
    larger value uses fewer ranks, so there is less to send, but attention takes longer."""
    whole: float = 1.0
    """A document is cut among ranks if its work exceeds this share of a rank's work. Smaller ones
    stay whole in step 1."""
    tile: int = TILE
    """Symmetric cuts are at multiples of this many rows."""
    longest_run: int = LONGEST_RUN
    """In step 2, documents of at most this many tokens are cut in runs. Longer ones, whose runs
    would differ more in work, are cut symmetrically, which makes two cuts instead of one."""
    negligible: float = 0.005
    """A rank may miss this share of the work that it is to get in step 1, to avoid a cut."""


def fill(
    parts: Sequence[FillPart],
    rooms: Sequence[int],
    scale: Sequence[float],
    heads: HeadWork,
    options: FillOptions,
) -> list[list[FillPart]]:
    """Fill ranks one after the other.

    Args:
        parts: Parts by descending density, with as many tokens as all ranks together.
        rooms: Tokens of each rank.
        scale: Work that each rank is to get, relative to its share of the tokens.
        heads: Work of the first tokens of a document.
        options: Where documents are cut.

    Returns:
        The parts of each rank.
    """
    pool = [replace(part) for part in parts]
    work = sum(part.work for part in pool)
    weight = sum(room * s for room, s in zip(rooms, scale, strict=True))
    most = options.share * work / weight if options.share > 1 and weight else 0.0
    out: list[list[FillPart]] = []
    for room, s in zip(rooms[:-1], scale[:-1], strict=True):
        share = work * room * s / weight if weight else 0.0
        mine = _dense(pool, room, share, options, most=most * room * s)
        mine += _light(pool, room - sum(part.size for part in mine), heads, options.longest_run)
        work -= sum(part.work for part in mine)
        weight -= room * s
        out.append(mine)
    # The last rank gets what remains.
    return [*out, pool]


def _dense(
    pool: list[FillPart], room: int, work: float, options: FillOptions, *, most: float
) -> list[FillPart]:
    """Take dense documents from the pool, until filling up with light ones would give `work`.

    Args:
        pool: The remaining parts by descending density. Those that are taken are removed.
        room: Tokens of the rank.
        work: Work that the rank is to get.
        options: Where documents are cut.
        most: Most work that a rank may have of a document that needs several ranks. 0 = `work`.
    """
    mine: list[FillPart] = []
    light = lightest(pool, room)
    # Work that is missing if the rank is filled with light documents alone. Taking a dense document
    # instead of light ones adds the difference of their densities for each token.
    lacking = share = max(0.0, work - light * room)
    # If the densest document needs several ranks, divide it evenly among as few as `most` permits.
    if pool and 0 < share < pool[0].size * (pool[0].density - light) and most:
        num_ranks = max(-(-pool[0].work // most), -(-pool[0].size // room))
        lacking = max(share, pool[0].size * (pool[0].density - light) / num_ranks)
    i = 0
    while i < len(pool) and room > 0:
        part = pool[i]
        more = part.density - light
        if more <= 0 or lacking <= options.negligible * share:
            break
        if part.size <= room and part.size * more <= lacking + 4 * options.negligible * share:
            mine.append(pool.pop(i))
            room -= part.size
            lacking -= part.size * more
            continue
        is_cut = (
            part.cut == FillCut.SYMMETRIC or part.work > options.whole * work or part.size >= room
        )
        if part.cut != FillCut.RUN and is_cut:
            mine += _symmetric(pool, i, lacking / more, room, options.tile)
            break
        i += 1
    return mine


def _symmetric(pool: list[FillPart], i: int, size: float, room: int, tile: int) -> list[FillPart]:
    """Cut about `size` tokens, in whole tiles, off the pool's i-th document symmetrically."""
    part = pool[i]
    taken = min(round(min(size, room) / tile), room // tile) * tile
    if part.size - taken < tile:
        taken = min(part.size, room)
    if not taken:
        return []
    mine = part.taken(taken, FillCut.SYMMETRIC)
    if not part.size:
        pool.pop(i)
    return [mine]


def _light(pool: list[FillPart], room: int, heads: HeadWork, longest_run: int) -> list[FillPart]:
    """Take the lightest documents from the pool until they fill `room`, and cut the last one."""
    mine: list[FillPart] = []
    while room > 0:
        part = pool[-1]
        if part.size <= room:
            mine.append(pool.pop())
            room -= part.size
            continue
        if part.cut == FillCut.SYMMETRIC or (part.cut == FillCut.WHOLE and part.size > longest_run):
            mine.append(part.taken(room, FillCut.SYMMETRIC))
        else:
            mine.append(heads.take_run(pool.pop(), room))
            _insert(pool, part)
        room = 0
    return mine


def _insert(pool: list[FillPart], part: FillPart) -> None:
    """Insert a part into the pool, which is sorted by descending density."""
    k = len(pool)
    while k and pool[k - 1].density < part.density:
        k -= 1
    pool.insert(k, part)


def lightest(pool: Sequence[FillPart], num_tokens: int) -> float:
    """Return the mean work per token of the lightest `num_tokens` tokens of the pool."""
    tokens, work = 0, 0.0
    for part in reversed(pool):
        size = min(part.size, num_tokens - tokens)
        tokens += size
        work += size * part.density
        if tokens >= num_tokens:
            break
    return work / tokens if tokens else 0.0
