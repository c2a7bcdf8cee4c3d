"""Fills one rank after the other with documents, up to its share of the tokens and the work.

The work per token of a document is called its density. A long document is denser than a short one.
So each rank gets both kinds:

1. Take the densest documents, until filling the rest of the rank with the least dense (lightest)
   documents would bring it exactly to its share of the work.
2. Fill the rest with the lightest documents, and cut the last one.

What remains for the other ranks then has the same mean work per token as before, so the next rank
can be filled in the same way. About two cuts are made for each rank, whatever the number of ranks
is. A document that is too large for one rank is cut among as few ranks as possible.

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
"""Number of queries in a tile. Attention kernels compute whole tiles."""
LONGEST_RUN = 1024
"""By default, documents of at most this many tokens are cut into parts of consecutive tokens."""
LIGHTEST = 0.15
"""When documents are divided over nodes, this share of all tokens is expected to be used to fill up
the nodes: those in documents with the least work per token."""


class FillCut(IntEnum):
    """How a document is cut."""

    WHOLE = 0
    """The document is not cut."""
    SYMMETRIC = 1
    """Each part takes tokens from both ends of what is left of the document. So all parts have
    about the same work per token."""
    RUN = 2
    """Each part has consecutive tokens. A later part has more work per token, because its tokens
    attend to more keys."""


@dataclass(slots=True, kw_only=True)
class FillPart:
    """Tokens of one document that a rank or a node gets: the whole document, or a part of it."""

    piece: int  # index of the document
    size: int  # number of tokens of the part
    density: float  # work per token in ns
    cut: FillCut = FillCut.WHOLE  # how the document is cut
    start: int = 0  # first token of the part, if it has consecutive tokens

    @property
    def work(self) -> float:
        """Predicted time of the part in ns."""
        return self.size * self.density

    def taken(self, size: int, cut: FillCut) -> "FillPart":
        """Remove tokens from this part of a document, and return them as a part of their own.

        Both parts keep the work per token of the whole part. `cut` decides later which tokens these
        are. The work is about right if they come from both ends of the part.

        Args:
            size: Number of tokens to remove.
            cut: How the document is cut, which becomes the field `cut` of both parts.
        """
        self.size -= size
        self.cut = cut
        return replace(self, size=size)


class HeadWork:
    """A table of the predicted work of a document's first n tokens, forward and backward.

    Args:
        longest: Tokens of the longest document.
        cost: Predicts the times of attention.
    """

    def __init__(self, longest: int, cost: WorkloadModel) -> None:
        heads = np.minimum(np.arange(0, longest + TILE, TILE), longest)
        forward, backward = cost.segment_times_ns(heads, heads)
        self._ns: list[float] = (forward + backward).astype(np.float64).tolist()

    def of(self, size: int) -> float:
        """Return the predicted time in ns of a document's first `size` tokens.

        `size` is rounded up to whole tiles.
        """
        return self._ns[-(-size // TILE)]

    def take_run(self, part: FillPart, size: int) -> FillPart:
        """Remove the first `size` tokens from `part`, and return them as a part of its own.

        The removed tokens have less work per token than the rest, because later tokens attend to
        more keys.
        """
        stop = part.start + size
        run = replace(part, size=size, cut=FillCut.RUN)
        run.density = (self.of(stop) - self.of(part.start)) / size
        rest = max(0.0, part.work - run.work)
        part.size -= size
        part.start, part.cut, part.density = stop, FillCut.RUN, rest / part.size
        return run


def parts_of(pieces: IntArray, work: IntArray) -> list[FillPart]:
    """Return an uncut part for each document, sorted by descending work per token.

    Args:
        pieces: Tokens of each document, shape [num_pieces].
        work: Predicted time of each document in ns, shape [num_pieces].
    """
    density = work / pieces
    order = np.argsort(-density, kind="stable").tolist()
    return [FillPart(piece=i, size=int(pieces[i]), density=float(density[i])) for i in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """Options that say when and where `fill` cuts documents."""

    share: float = 1.0
    """Most work of one long document that a rank may have, in multiples of a rank's mean work. At
    least 1. With a larger value the document is on fewer ranks, so there is less to send, but
    attention takes longer."""
    whole: float = 1.0
    """A document is cut among ranks if its work is more than this share of a rank's work. Documents
    with less work are cut only to fill up a rank with tokens."""
    tile: int = TILE
    """Symmetric cuts are at multiples of this many tokens."""
    longest_run: int = LONGEST_RUN
    """When a rank is filled up, a document of at most this many tokens is cut into parts of
    consecutive tokens. In a longer document such parts would differ more in work. It is cut
    symmetrically, which makes two cuts instead of one."""
    negligible: float = 0.005
    """To avoid a cut, a rank may get up to this share less work from dense documents (those with
    more work per token) than it is to get."""


def fill(
    parts: Sequence[FillPart],
    rooms: Sequence[int],
    scale: Sequence[float],
    heads: HeadWork,
    options: FillOptions,
) -> list[list[FillPart]]:
    """Divide documents over ranks, filling one rank after the other.

    Args:
        parts: Documents or parts of them by descending density (work per token).
        rooms: Tokens that each rank is to get. Their sum is the number of tokens of `parts`.
        scale: A factor for each rank. The work that a rank is to get is proportional to its tokens
            times this factor.
        heads: Predicts the work of the first tokens of a document.
        options: Where documents are cut.

    Returns:
        The parts of documents that each rank gets.
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
    """Take the documents with most work per token for a rank, and remove them from `pool`.

    The rest of the rank will later be filled with the documents that have least work per token. The
    function stops as soon as these would bring the rank exactly to its share of the work.

    Args:
        pool: The remaining parts by descending work per token. Those that are taken are removed.
        room: Tokens that the rank is to get.
        work: Work that the rank is to get, in ns.
        options: Where documents are cut.
        most: Most work, in ns, that the rank may have of a document that is divided evenly among
            several ranks. 0 = no document is: the rank takes as much of it as `work` permits.

    Returns:
        The parts that the rank gets.
    """
    mine: list[FillPart] = []
    light = lightest(pool, room)
    # Work that the rank would lack if it were filled with the documents of least work per token
    # (`light`). Each token of another document reduces the lack by the document's work per token
    # minus `light`.
    lacking = share = max(0.0, work - light * room)
    # If the document with most work per token needs several ranks, divide it evenly among as few
    # ranks as have enough room, and as `most`, the limit on its work on one rank, permits.
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
    """Cut about `size` tokens off the pool's i-th document, half of them from either end.

    Args:
        pool: The remaining parts. The document is removed if nothing is left of it.
        i: Index of the document in the pool.
        size: Number of tokens to cut off, which is rounded to whole tiles.
        room: Most tokens that may be cut off.
        tile: Tokens of a tile.

    Returns:
        A list with the part that was cut off, or an empty list if it would have no token.
    """
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
    """Take the documents with least work per token until they fill a rank, and cut the last one.

    Args:
        pool: The remaining parts by descending work per token. Those that are taken are removed.
        room: Tokens that the rank can still take.
        heads: Predicts the work of the first tokens of a document.
        longest_run: A document of at most this many tokens is cut so that each part has consecutive
            tokens. A longer one is cut so that each part has tokens from both ends (`FillCut`).

    Returns:
        The parts that the rank gets.
    """
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
    """Insert a part into `pool`, a list of parts sorted by descending work per token."""
    k = len(pool)
    while k and pool[k - 1].density < part.density:
        k -= 1
    pool.insert(k, part)


def lightest(pool: Sequence[FillPart], num_tokens: int) -> float:
    """Return the mean work per token, in ns, of the documents with least work per token.

    Args:
        pool: Documents or parts of them, by descending work per token.
        num_tokens: Number of tokens over which the mean is taken, counted from the end of `pool`.
    """
    tokens, work = 0, 0.0
    for part in reversed(pool):
        size = min(part.size, num_tokens - tokens)
        tokens += size
        work += size * part.density
        if tokens >= num_tokens:
            break
    return work / tokens if tokens else 0.0
