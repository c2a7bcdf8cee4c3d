"""Divides documents over nodes by work, before each node divides them over its ranks.

Keys of tokens on another node take many times as long to transfer as keys of tokens on the same
node. So documents stay whole on one node if possible.

1. Documents are taken by descending density (work per token). Each goes to the node that is
   furthest below its share of the work.
2. A document is cut among nodes if it has more tokens than a node may have, or more work than
   `share` times the most work that any node is to get. All others stay whole.
3. Swaps of short documents bring every node close to the number of tokens that it is to get. The
   first tokens of single documents then move to other nodes to reach it exactly.

Cost: a Python loop over documents, and over pairs of short ones.
"""

from collections.abc import Sequence
from dataclasses import replace

from wlb.sharding.fill import LIGHTEST, LONGEST_RUN, TILE, FillCut, FillPart, HeadWork, lightest

SWAPPED = 24
"""Swaps are tried with this many documents of a node: the shortest ones."""


def split(
    parts: Sequence[FillPart],
    rooms: Sequence[int],
    scale: Sequence[float],
    heads: HeadWork,
    *,
    share: float,
) -> list[list[FillPart]]:
    """Divide documents over nodes by work, and cut as few of them as possible.

    Args:
        parts: Whole documents by descending density (work per token).
        rooms: Tokens that each node is to get. Their sum is the number of tokens of `parts`.
        scale: A factor for each node. The work that a node is to get is proportional to its tokens
            times this factor.
        heads: Predicts the work of the first tokens of a document.
        share: Most work that a node may have of one document, in multiples of the most work that
            any node is to get. At least 1.

    Returns:
        The documents of each node and parts of them, by descending density.
    """
    nodes = _Nodes(parts, rooms, scale, share)
    for part in parts:
        nodes.place(replace(part))
    nodes.level(heads)
    return [sorted(node_parts, key=lambda part: -part.density) for node_parts in nodes.parts]


class _Nodes:
    """The nodes of CP ranks, with the documents and parts of documents that each has so far."""

    def __init__(
        self, parts: Sequence[FillPart], rooms: Sequence[int], scale: Sequence[float], share: float
    ) -> None:
        work, tokens = sum(part.work for part in parts), sum(rooms)
        # Work per token of the light documents that are expected to fill up the nodes.
        self.light = lightest(parts, round(tokens * LIGHTEST))
        # Tokens of each node, and tokens that it can still take (below 0 if it has too many).
        self.rooms, self.room = list(rooms), list(rooms)
        shares = [work * room / tokens * s for room, s in zip(rooms, scale, strict=True)]
        # No node may get more than `most` work from a single document. This is the largest of the
        # nodes' shares plus a tolerance, `over`.
        self.most = share * max(shares)
        self.over = self.most - self.most / share
        # Work that each node would still lack if light documents filled the rest of it.
        self.lacks = [w - self.light * room for w, room in zip(shares, rooms, strict=True)]
        self.parts: list[list[FillPart]] = [[] for _ in rooms]

    def place(self, part: FillPart) -> None:
        """Assign a document to the node with room for it that is furthest below its share of work.

        A document that is too long or has too much work for one node is cut over several nodes.
        """
        if part.work > self.most or part.size > max(self.rooms):
            self._cut(part)
            return
        nodes = range(len(self.room))
        with_room = [n for n in nodes if self.room[n] >= part.size]
        if with_room:
            self._give(max(with_room, key=lambda n: self.lacks[n]), part)
        else:
            # No node has room for the document. Put it where most room is; `level` later moves the
            # surplus tokens to other nodes.
            self._give(max(nodes, key=lambda n: self.room[n]), part)

    def _give(self, node: int, part: FillPart) -> None:
        self.parts[node].append(part)
        self.room[node] -= part.size
        self.lacks[node] -= part.size * (part.density - self.light)

    def _cut(self, part: FillPart) -> None:
        """Cut a document; give the parts to the nodes that are furthest below their share of work.

        The document is cut symmetrically: all parts have the same work per token.
        """
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
        """Move documents between nodes until each has exactly the number of tokens it is to get.

        Args:
            heads: Predicts the work of the head of a document, which is its first tokens.
        """
        while True:
            giver = min(range(len(self.room)), key=lambda n: self.room[n])
            taker = max(range(len(self.room)), key=lambda n: self.room[n])
            wanted = min(-self.room[giver], self.room[taker])
            if not wanted:
                return
            if not self._swap(giver, taker, wanted):
                self._move(giver, taker, wanted, heads)

    def _swap(self, giver: int, taker: int, wanted: int) -> bool:
        """Swap two short documents, or move one, if this moves about the wanted number of tokens.

        Args:
            giver: The node with too many tokens.
            taker: The node with too few tokens.
            wanted: Number of tokens that should move from `giver` to `taker`. Between half and
                one and a half times as many may move.

        Returns:
            Whether documents were moved.
        """
        givers, takers = (self._short(node) for node in (giver, taker))
        pairs = [(abs(a.size - wanted), i, -1) for i, a in enumerate(givers)]
        pairs += [
            (abs(a.size - b.size - wanted), i, j)
            for i, a in enumerate(givers)
            for j, b in enumerate(takers)
        ]
        left, i, j = min(pairs, default=(wanted, 0, 0))
        if left * 2 > wanted:
            return False
        self._hand(giver, taker, givers[i])
        if j >= 0:
            self._hand(taker, giver, takers[j])
        return True

    def _short(self, node: int) -> list[FillPart]:
        """Return the shortest documents that a node has whole, at most `SWAPPED` of them."""
        whole = [part for part in self.parts[node] if part.cut == FillCut.WHOLE]
        return sorted(whole, key=lambda part: part.size)[:SWAPPED]

    def _hand(self, giver: int, taker: int, part: FillPart) -> None:
        self.parts[giver] = [other for other in self.parts[giver] if other is not part]
        self.room[giver] += part.size
        self.lacks[giver] += part.size * (part.density - self.light)
        self._give(taker, part)

    def _move(self, giver: int, taker: int, size: int, heads: HeadWork) -> None:
        """Move `size` tokens of one document from one node to another.

        The document is a short one of those with more than `size` tokens. If no document has more,
        the longest one moves whole.

        Args:
            giver: Index of the node with too many tokens.
            taker: Index of the node with too few tokens.
            size: Number of tokens to move.
            heads: Predicts the work of the first tokens of a document.
        """
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
