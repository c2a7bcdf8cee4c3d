"""Which transfers of a communicator could hold up others, and so cost time without need.

NCCL runs what a rank posts in a communicator one after the other. Let a rank post transfer A, with
one peer, and then B, with another one. B then waits for A, and A waits until its peer has posted it
as well. That costs nothing if whoever waits for B cannot get to that wait before the peer has
posted A, whatever passes and transfers take. The order of the ranks' programs and of the messages
between them says so, or does not (vector clocks). If it does not, A could hold up B. How long it
does depends on times, which are not looked at here.

Two transfers with the same peer cannot hold up each other: both ranks post both of them in one
order and from one stream, so that B is never ready at both ends before A is.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wlb.plan import IntArray
from wlb.rehearse.gpu import Communicator, RankMessage

Programs = Mapping[int, Sequence[RankMessage]]
End = tuple[int, int]
"""One end of a transfer: a rank, and the index of the message in its program."""


class HeldUp(NamedTuple):
    """A transfer that an earlier one of the same rank and communicator could hold up."""

    rank: int
    communicator: Communicator
    first: RankMessage  # the earlier one
    second: RankMessage  # the one behind it


def held_up(programs: Programs) -> list[HeldUp]:
    """Find transfers that could be held up, in the order of ranks and of their posts.

    Args:
        programs: Messages of each rehearsed rank, in the order in which its host issued them. They
            match and cannot deadlock (`wlb.rehearse.prove`). Transfers with ranks that were not
            rehearsed are left out, as are those that nobody waits for: Gloo's, which block the
            host, and wait for no stream.
    """
    other_end = _other_ends(programs)
    waits = _Clocks(programs, other_end).waits()
    out: list[HeldUp] = []
    for rank, program in programs.items():
        # For each communicator: what the rank has posted in it, by peer.
        posted: dict[Communicator, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, message in enumerate(program):
            if (rank, i) not in other_end:
                continue
            assert message.communicator is not None
            before = posted[message.communicator]
            for peer, indices in before.items():
                first = next((j for j in reversed(indices) if _stands_before(program, j, i)), None)
                if peer == message.op or first is None:
                    continue
                _, posts = other_end[rank, first]
                if any(known.get(peer, posts) < posts for known in waits.get((rank, i), ())):
                    out.append(HeldUp(rank, message.communicator, program[first], message))
                    break
            before[message.op].append(i)
    return out


def _stands_before(program: Sequence[RankMessage], j: int, i: int) -> bool:
    """Whether message i waits for message j of its stream: those of one batch start together."""
    return program[j].batch < 0 or program[j].batch != program[i].batch


def _other_ends(programs: Programs) -> dict[End, End]:
    """Both ends of each transfer: between two ranks they pair up by order in a communicator."""
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
    """Runs all programs without streams, and notes what a rank must know when it waits.

    A rank does one message after the other and stops only at a wait, until both ends of the
    transfer are posted. Collectives stop nobody: they may be asynchronous, and what waits for them
    is not recorded. So a rank may know more than is noted, never less.
    """

    def __init__(self, programs: Programs, other_end: Mapping[End, End]) -> None:
        self.programs, self.other_end = programs, other_end
        self._row = {rank: i for i, rank in enumerate(programs)}
        self._at = dict.fromkeys(programs, 0)
        # For each rank: the last message of every rank that it knows of, shape [ranks].
        self._clock = {rank: np.full(len(programs), -1, np.int64) for rank in programs}
        # The clock at each post, until the other end waits for it.
        self._posts: dict[End, IntArray] = {}
        self._waiting: dict[End, list[int]] = defaultdict(list)
        # For each end of a transfer, at each wait for it: members of the communicator, and the last
        # message of each that the waiting rank knows of.
        self._waits: dict[End, list[dict[int, int]]] = defaultdict(list)

    def waits(self) -> Mapping[End, list[dict[int, int]]]:
        ready = deque(self.programs)
        while ready:
            ready += self._go_on(ready.popleft())
        return self._waits

    def _go_on(self, rank: int) -> list[int]:
        """Run a rank's program up to a wait that cannot end yet; ranks whose waits can end now."""
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
        """Whether the awaited transfer has both its ends, whose clocks the rank then knows."""
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
