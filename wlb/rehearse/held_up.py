"""Which transfers of a communicator could hold up others, and so cost time without need.

NCCL runs what a rank posts in a communicator one after the other. Let a rank post transfer A, with
one peer, and then B, with another. B then waits for A, and A waits until its peer has posted it as
well. That costs nothing if whoever needs B would have waited for the peer's post of A anyway: every
way to the wait for B leads through that post. Otherwise A could hold up B. How long it does depends
on times, which this proof does not look at.

Operations with the same peer, and collectives, cannot hold up each other: all that take part in the
second one take part in the first one as well and post both in the same order, so whoever is late
for the first one is late for the second one with or without the stream.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wlb.plan import IntArray
from wlb.rehearse.gpu import Communicator, RankMessage

Programs = Mapping[int, Sequence[RankMessage]]


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
            rehearsed are left out.
    """
    needed = _Clocks(programs).needed()
    out: list[HeldUp] = []
    for rank, program in programs.items():
        # For each communicator: the latest post of a transfer with each peer.
        posted: dict[Communicator, dict[int, int]] = defaultdict(dict)
        for i, message in enumerate(program):
            if (rank, i) not in needed.other_end:
                continue
            assert message.communicator is not None
            before = posted[message.communicator]
            for peer, j in before.items():
                if peer == message.op or _start_together(program[j], message):
                    continue
                _, index = needed.other_end[rank, j]
                when = needed.when[rank, i]
                if when is not None and when[needed.row[peer]] < index:
                    out.append(HeldUp(rank, message.communicator, program[j], message))
                    break
            before[message.op] = i
    return out


def _start_together(one: RankMessage, other: RankMessage) -> bool:
    return one.batch >= 0 and one.batch == other.batch


@dataclass(slots=True)
class _Needed:
    """What must have happened before a transfer is waited for."""

    # Index of each rehearsed rank in the arrays of `when`.
    row: dict[int, int]
    # Rank and message of a transfer -> those of its other end.
    other_end: dict[tuple[int, int], tuple[int, int]]
    # Rank and message of a transfer -> for each rank, how far its program had come at least when
    # the receiver waited for the transfer, shape [ranks]; None if it never waits.
    when: dict[tuple[int, int], IntArray | None] = field(
        default_factory=dict[tuple[int, int], IntArray | None]
    )


class _Clocks:
    """Runs all programs without streams, and notes for each message what it comes after.

    A rank does one message after the other. A collective ends when all members have come to it, a
    wait when both ends of the transfer are posted.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._needed = _Needed({rank: i for i, rank in enumerate(programs)}, _pairs(programs))
        self._at = dict.fromkeys(programs, 0)
        # How far each rank has come as far as this one can know, shape [ranks] each.
        self._clock = {rank: np.full(len(programs), -1, np.int64) for rank in programs}
        self._posts: dict[tuple[int, int], IntArray] = {}
        self._arrived: dict[Communicator, set[int]] = defaultdict(set)
        self._waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._ready = deque(programs)

    def needed(self) -> _Needed:
        while self._ready:
            self._go_on(self._ready.popleft())
        return self._needed

    def _go_on(self, rank: int) -> None:
        program = self.programs[rank]
        while self._at[rank] < len(program):
            i = self._at[rank]
            message = program[i]
            if message.kind == "collective":
                if not self._meet(rank, message.communicator):
                    return
                continue
            if message.kind == "wait" and not self._wait(rank, message.what):
                return
            self._clock[rank][self._needed.row[rank]] = i
            if (rank, i) in self._needed.other_end:
                self._posts[rank, i] = self._clock[rank].copy()
                self._ready += self._waiting.pop((rank, i), [])
            self._at[rank] += 1

    def _wait(self, rank: int, index: int) -> bool:
        """Whether the awaited transfer has both its ends, whose clocks the rank then knows."""
        other = self._needed.other_end.get((rank, index))
        if other is None:
            return True
        if other not in self._posts:
            self._waiting[other].append(rank)
            return False
        clock = self._clock[rank]
        np.maximum(clock, self._posts[other], out=clock)
        if self.programs[rank][index].kind == "recv" and (rank, index) not in self._needed.when:
            self._needed.when[rank, index] = self._needed.when[other] = clock.copy()
        return True

    def _meet(self, rank: int, where: Communicator | None) -> bool:
        """Whether all members have come to a collective, after which each goes on."""
        assert where is not None
        self._arrived[where].add(rank)
        members = [r for r in where.ranks if r in self.programs]
        if len(self._arrived[where]) < len(members):
            return False
        del self._arrived[where]
        for member in members:
            self._clock[member][self._needed.row[member]] = self._at[member]
        together = np.max([self._clock[member] for member in members], axis=0)
        for member in members:
            self._clock[member][:] = together
            self._at[member] += 1
            if member != rank:
                self._ready.append(member)
        return True


def _pairs(programs: Programs) -> dict[tuple[int, int], tuple[int, int]]:
    """The two ends of each transfer: messages between two ranks pair up in their order."""
    ends: dict[tuple[int, int, Communicator, str], list[int]] = defaultdict(list)
    for rank, program in programs.items():
        for i, message in enumerate(program):
            if message.kind in ("send", "recv") and message.op in programs:
                assert message.communicator is not None
                ends[rank, message.op, message.communicator, message.kind].append(i)
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for (rank, peer, where, kind), indices in ends.items():
        theirs = ends[peer, rank, where, "recv" if kind == "send" else "send"]
        out |= {(rank, i): (peer, j) for i, j in zip(indices, theirs, strict=True)}
    return out
