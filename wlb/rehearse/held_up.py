"""Find transfers that could be held up by another transfer of the same communicator.

NCCL runs the transfers that a rank posts in a communicator one after the other. Suppose that a rank
posts transfer A with one peer, and then transfer B with another peer:

    rank 0:  post A (with rank 1)   post B (with rank 2)
    rank 1:  ... post A late
    rank 2:  post B   wait for B        B cannot start before A, and A waits for rank 1

This costs nothing if no rank can reach its wait for B before rank 1 has posted A. Vector clocks
show whether the order of the ranks' messages guarantees this, however long passes and transfers
take. If the order does not guarantee it, A could hold up B. For how long depends on times, which
this module does not compute.

Two transfers with the same peer cannot hold up each other. Both ranks post them in the same order
and from one stream, so B is never ready at both ends before A.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wlb.plan import IntArray
from wlb.rehearse.gpu import Communicator, RankMessage

Programs = Mapping[int, Sequence[RankMessage]]
"""Rank -> its program: its messages, in the order in which its host issued them."""
End = tuple[int, int]
"""One end of a transfer: a rank, and the index of the send or receive in its program."""


class HeldUp(NamedTuple):
    """A transfer that an earlier transfer of the same rank and communicator could hold up."""

    rank: int  # the rank that posts both transfers
    communicator: Communicator
    first: RankMessage  # the earlier transfer
    second: RankMessage  # the later transfer, which `first` may delay


def held_up(programs: Programs) -> list[HeldUp]:
    """Return all transfers that could be held up, sorted by rank and then by time of posting.

    A transfer could be held up if it may have to wait for an earlier transfer of the same rank.
    Two kinds of transfers are left out: those with ranks that were not rehearsed, and those of
    Gloo, which block the host, so that no stream waits for them.

    Args:
        programs: Messages of each rehearsed rank. They must match and must not deadlock, which
            `wlb.rehearse.prove` has checked before.
    """
    other_end = _other_ends(programs)
    waits = _Clocks(programs, other_end).waits()
    out: list[HeldUp] = []
    for rank, program in programs.items():
        # Communicator -> peer -> indices of the messages that the rank has posted so far.
        posted: dict[Communicator, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, message in enumerate(program):
            if (rank, i) not in other_end:
                continue
            assert message.communicator is not None
            before = posted[message.communicator]
            for peer, indices in before.items():
                # Transfer i runs after all earlier transfers with this peer, except those that NCCL
                # starts together with it. It is enough to check the latest of them.
                first = next((j for j in reversed(indices) if _stands_before(program, j, i)), None)
                if peer == message.op or first is None:
                    continue
                _, posts = other_end[rank, first]
                # `first` ends only when the peer has posted its end. Report transfer i if, before
                # that, a rank may wait for transfer i.
                if any(known.get(peer, posts) < posts for known in waits.get((rank, i), ())):
                    out.append(HeldUp(rank, message.communicator, program[first], message))
                    break
            before[message.op].append(i)
    return out


def _stands_before(program: Sequence[RankMessage], j: int, i: int) -> bool:
    """Return whether transfer i of a rank has to wait for its earlier transfer j.

    Transfer i need not wait if NCCL starts both in the same batch.

    Args:
        program: Messages of the rank. i and j are indices into this list.
        j: Index of the earlier transfer.
        i: Index of the later transfer.
    """
    return program[j].batch < 0 or program[j].batch != program[i].batch


def _other_ends(programs: Programs) -> dict[End, End]:
    """Return a map from each end of a transfer to its other end.

    In a communicator, the i-th send from one rank to another belongs to the i-th receive that the
    other rank posts for this pair.
    """
    ends: dict[tuple[int, int, Communicator, str], list[int]] = defaultdict(list)
    for rank, program in programs.items():
        for i, message in enumerate(program):
            if message.kind in ("send", "recv") and message.op in programs:
                assert message.communicator is not None
                ends[rank, message.op, message.communicator, message.kind].append(i)
    out: dict[End, End] = {}
    for (rank, peer, where, kind), indices in ends.items():
        theirs = ends.get((peer, rank, where, "recv" if kind == "send" else "send"), [])
        out |= {(rank, i): (peer, j) for i, j in zip(indices, theirs, strict=True)}
    return out


class _Clocks:
    """Computes vector clocks, which say what other ranks have surely issued when a wait ends.

    A rank issues its messages in order. It stops only at a wait, until both ends of the awaited
    transfer are posted. Collectives do not stop a rank here, because they may be asynchronous and
    waits for collectives are not recorded. So other ranks may really have issued more messages than
    a clock says, but never fewer.
    """

    def __init__(self, programs: Programs, other_end: Mapping[End, End]) -> None:
        self.programs, self.other_end = programs, other_end
        self._row = {rank: i for i, rank in enumerate(programs)}
        self._at = dict.fromkeys(programs, 0)
        # Rank -> its vector clock, shape [num_ranks]. The clock has, for every rank, the index of
        # the last message that this rank has surely issued.
        self._clock = {rank: np.full(len(programs), -1, np.int64) for rank in programs}
        # End of a transfer -> vector clock that the posting rank had then. The wait of the other
        # rank reads and removes the entry.
        self._posts: dict[End, IntArray] = {}
        # End of a transfer that is not posted yet -> ranks that wait for it.
        self._waiting: dict[End, list[int]] = defaultdict(list)
        # Result of `waits`: end of a transfer -> for each wait for this transfer, a dict: rank ->
        # index of the last message that the rank has surely issued when the wait ends.
        self._waits: dict[End, list[dict[int, int]]] = defaultdict(list)

    def waits(self) -> Mapping[End, list[dict[int, int]]]:
        """Run all ranks to the end; return which messages were surely issued when each wait ended.

        Returns:
            For each end of a transfer, a list with one dict for each wait for this transfer. The
            dict maps each member of the communicator to the index of the last message that it has
            surely issued when the wait ends.
        """
        ready = deque(self.programs)
        while ready:
            ready += self._advance(ready.popleft())
        return self._waits

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it meets a wait that cannot end yet.

        Returns:
            Other ranks whose waits can now end.
        """
        program, woken = self.programs[rank], list[int]()
        while self._at[rank] < len(program):
            i = self._at[rank]
            message = program[i]
            if message.kind == "wait" and not self._wait(rank, message.what):
                break
            self._clock[rank][self._row[rank]] = i
            if (rank, i) in self.other_end:
                self._posts[rank, i] = self._clock[rank].copy()
                woken += self._waiting.pop((rank, i), [])
            self._at[rank] += 1
        return woken

    def _wait(self, rank: int, index: int) -> bool:
        """Return whether a wait can end, because both ends of the transfer are posted.

        If so, raise the clock of the waiting rank to at least the clock that the other rank had
        when it posted its end.

        Args:
            rank: Rank that waits.
            index: Index of the awaited send or receive among the messages of `rank`.
        """
        other = self.other_end.get((rank, index))
        if other is None:
            return True
        if other not in self._posts:
            self._waiting[other].append(rank)
            return False
        clock = self._clock[rank]
        np.maximum(clock, self._posts.pop(other), out=clock)
        where = self.programs[rank][index].communicator
        assert where is not None
        known = {r: int(clock[self._row[r]]) for r in where.ranks if r in self._row}
        for end in ((rank, index), other):
            self._waits[end].append(known)
        return True
