"""Fills ranks one after the other, so that each has its tokens and its share of the work.

Every rank takes the documents with most work a token until the rest of its room, filled with those
that have least, brings it to its share. What remains then has the mean work a token again, so the
next rank finds the same problem: two cuts a rank, whatever the number of ranks. Only a document
that one rank cannot have is cut among ranks, over as few of them as it fills. `split` does the same
for nodes, without a cut of documents that a node can have. Cost: a Python loop over documents for
each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import IntArray

TILE = 128
"""Query rows of a tile, which attention kernels compute whole."""
LONGEST_RUN = 1024
"""Tokens up to which a document is cut in runs, if nothing else is said."""
LIGHTEST = 0.15
"""Share of a group's tokens, of the documents with least work a token, that level its nodes."""


class FillCut(IntEnum):
    WHOLE = 0
    SYMMETRIC = 1
    """Tokens from both ends of what is left of a document: equal work a token in every part."""
    RUN = 2
    """Tokens from `start` on."""


@dataclass(slots=True, kw_only=True)
class FillPart:
    """`size` tokens of a document, of which each is `density` ns of work. start: of a run."""

    piece: int
    size: int
    density: float
    cut: FillCut = FillCut.WHOLE
    start: int = 0

    @property
    def work(self) -> float:
        return self.size * self.density

    def taken(self, size: int, cut: FillCut) -> "FillPart":
        """Takes `size` tokens off and returns them; the rest of a symmetric cut is as dense."""
        self.size -= size
        self.cut = cut
        return replace(self, size=size)


class HeadWork:
    """Predicted work of the first n tokens of a document, forward and backward, from a table."""

    def __init__(self, longest: int, cost: WorkloadModel) -> None:
        heads = np.minimum(np.arange(0, longest + TILE, TILE), longest)
        forward, backward = cost.segment_times_ns(heads, heads)
        self._ns: list[float] = (forward + backward).astype(np.float64).tolist()

    def of(self, size: int) -> float:
        return self._ns[-(-size // TILE)]

    def take_run(self, part: FillPart, size: int) -> FillPart:
        """Takes the first `size` tokens off `part` and returns them; later tokens see more keys."""
        stop = part.start + size
        run = replace(part, size=size, cut=FillCut.RUN)
        run.density = (self.of(stop) - self.of(part.start)) / size
        rest = max(0.0, part.work - run.work)
        part.size -= size
        part.start, part.cut, part.density = stop, FillCut.RUN, rest / part.size
        return run


def parts_of(pieces: IntArray, work: IntArray) -> list[FillPart]:
    """Whole documents, those with most work a token first. pieces, work: shape [num_pieces]."""
    density = work / pieces
    order = np.argsort(-density, kind="stable").tolist()
    return [FillPart(piece=i, size=int(pieces[i]), density=float(density[i])) for i in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """What decides where documents are cut."""

    share: float = 1.0
    """Of a mean rank's work that a part of a long document may be, at least 1. More means fewer
    ranks and less to send."""
    whole: float = 1.0
    """A document is cut among ranks if its work exceeds this share of a rank's, and not merely to
    fill a rank up."""
    tile: int = TILE
    """Symmetric cuts are at multiples of this many rows."""
    longest_run: int = LONGEST_RUN
    """Documents up to this length are cut to fill a rank up in runs of tokens. Longer ones, whose
    runs differ more in work, are cut symmetrically, which makes two cuts of one."""
    negligible: float = 0.005
    """Share of a rank's work beyond the lightest documents' that may be missing without a cut."""


def fill(
    parts: Sequence[FillPart],
    rooms: Sequence[int],
    scale: Sequence[float],
    heads: HeadWork,
    options: FillOptions,
) -> list[list[FillPart]]:
    """Parts of each rank. parts: by falling density, and with as many tokens as there is room.

    rooms: tokens of each rank. scale: the work of each relative to its tokens' share.
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
    return [*out, pool]


def _dense(
    pool: list[FillPart], room: int, work: float, options: FillOptions, *, most: float
) -> list[FillPart]:
    """Takes documents with much work a token, until filling up with light ones gives `work`.

    most: work that a rank may have of a document that needs several.
    """
    mine: list[FillPart] = []
    light = lightest(pool, room)
    lacking = share = max(0.0, work - light * room)
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
    """Takes about `size` tokens of the pool's i-th document, whole tiles."""
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
    """Fills `room` with the documents that have least work a token; the last one is cut."""
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
    """Puts a part where its density belongs."""
    k = len(pool)
    while k and pool[k - 1].density < part.density:
        k -= 1
    pool.insert(k, part)


def lightest(pool: Sequence[FillPart], num_tokens: int) -> float:
    """Work a token of the `num_tokens` that have least."""
    tokens, work = 0, 0.0
    for part in reversed(pool):
        size = min(part.size, num_tokens - tokens)
        tokens += size
        work += size * part.density
        if tokens >= num_tokens:
            break
    return work / tokens if tokens else 0.0
