"""Splits documents over nodes by work, whole where a node can have them, before ranks are filled.

From most work a token to least, each document goes to the node that lacks most of its share, filled
up with light documents. Nodes' tokens are then made equal by swaps of short documents and, for the
few tokens that remain, by moving the beginning of one: rows between nodes are many times as dear
as rows inside. Only a document of more than `share` of a node's work, or more tokens than a node
has, is cut among nodes. Cost: a Python loop over documents, and pairs of short ones.
"""

from collections.abc import Sequence
from dataclasses import replace

from wlb.sharding.fill import LIGHTEST, LONGEST_RUN, TILE, FillCut, FillPart, HeadWork, lightest

SWAPPED = 24
"""Short documents of a node that swaps are tried with."""


def split(
    parts: Sequence[FillPart],
    rooms: Sequence[int],
    scale: Sequence[float],
    heads: HeadWork,
    *,
    share: float,
) -> list[list[FillPart]]:
    """Parts of each node, by falling density; arguments as of `fill`."""
    nodes = _Nodes(parts, rooms, scale, share)
    for part in parts:
        nodes.place(replace(part))
    nodes.level(heads)
    return [sorted(mine, key=lambda part: -part.density) for mine in nodes.parts]


class _Nodes:
    """room: tokens that each node can still take, below 0 for one that has too many. lacks: of its
    share of the work, if light documents filled it up.
    """

    def __init__(
        self, parts: Sequence[FillPart], rooms: Sequence[int], scale: Sequence[float], share: float
    ) -> None:
        work, tokens = sum(part.work for part in parts), sum(rooms)
        self.light = lightest(parts, round(tokens * LIGHTEST))
        self.rooms, self.room = list(rooms), list(rooms)
        shares = [work * room / tokens * s for room, s in zip(rooms, scale, strict=True)]
        self.most = share * max(shares)
        self.over = self.most - self.most / share
        self.lacks = [w - self.light * room for w, room in zip(shares, rooms, strict=True)]
        self.parts: list[list[FillPart]] = [[] for _ in rooms]

    def place(self, part: FillPart) -> None:
        """Gives a document to the node that lacks most work, or to several if no node can have
        it.
        """
        if part.work > self.most or part.size > max(self.rooms):
            self._cut(part)
            return
        nodes = range(len(self.room))
        with_room = [n for n in nodes if self.room[n] >= part.size]
        if with_room:
            self._give(max(with_room, key=lambda n: self.lacks[n]), part)
        else:
            self._give(max(nodes, key=lambda n: self.room[n]), part)

    def _give(self, node: int, part: FillPart) -> None:
        self.parts[node].append(part)
        self.room[node] -= part.size
        self.lacks[node] -= part.size * (part.density - self.light)

    def _cut(self, part: FillPart) -> None:
        """Shares a document symmetrically among the nodes that lack most work."""
        more = part.density - self.light
        for node in sorted(range(len(self.room)), key=lambda n: -self.lacks[n]):
            lacking = max(0.0, self.lacks[node] + self.over)
            most = min(part.size, max(0, self.room[node]))
            size = most if more <= 0 else min(most, int(lacking / more))
            if size < part.size:
                size = size // (2 * TILE) * 2 * TILE
            if size:
                self._give(node, part.taken(size, FillCut.SYMMETRIC))
            if not part.size:
                return
        self._give(max(range(len(self.room)), key=lambda n: self.room[n]), part)

    def level(self, heads: HeadWork) -> None:
        """Makes every node's tokens what it has room for."""
        while True:
            giver = min(range(len(self.room)), key=lambda n: self.room[n])
            taker = max(range(len(self.room)), key=lambda n: self.room[n])
            wanted = min(-self.room[giver], self.room[taker])
            if not wanted:
                return
            if not self._swap(giver, taker, wanted):
                self._move(giver, taker, wanted, heads)

    def _swap(self, giver: int, taker: int, wanted: int) -> bool:
        """Swaps documents, or gives one, where that halves what one node has too many at least."""
        mine, theirs = (self._short(node) for node in (giver, taker))
        pairs = [(abs(a.size - wanted), i, -1) for i, a in enumerate(mine)]
        pairs += [
            (abs(a.size - b.size - wanted), i, j)
            for i, a in enumerate(mine)
            for j, b in enumerate(theirs)
        ]
        left, i, j = min(pairs, default=(wanted, 0, 0))
        if left * 2 > wanted:
            return False
        self._hand(giver, taker, mine[i])
        if j >= 0:
            self._hand(taker, giver, theirs[j])
        return True

    def _short(self, node: int) -> list[FillPart]:
        """The shortest whole documents of a node, at most `SWAPPED`."""
        whole = [part for part in self.parts[node] if part.cut == FillCut.WHOLE]
        return sorted(whole, key=lambda part: part.size)[:SWAPPED]

    def _hand(self, giver: int, taker: int, part: FillPart) -> None:
        self.parts[giver] = [other for other in self.parts[giver] if other is not part]
        self.room[giver] += part.size
        self.lacks[giver] += part.size * (part.density - self.light)
        self._give(taker, part)

    def _move(self, giver: int, taker: int, size: int, heads: HeadWork) -> None:
        """Moves `size` tokens, by preference the first ones of a short document."""
        longer = sorted((p for p in self.parts[giver] if p.size > size), key=lambda p: p.size)
        if not longer:
            self._hand(giver, taker, max(self.parts[giver], key=lambda p: p.size))
            return
        in_runs = [p for p in longer if p.cut == FillCut.RUN or p.size <= LONGEST_RUN]
        in_runs = [p for p in in_runs if p.cut != FillCut.SYMMETRIC]
        symmetric = [p for p in longer if p.cut != FillCut.RUN]
        if in_runs or not symmetric:
            moved = heads.take_run((in_runs or longer)[0], size)
        else:
            moved = symmetric[0].taken(size, FillCut.SYMMETRIC)
        self.room[giver] += size
        self._give(taker, moved)
