"""Prove from the messages of rehearsed ranks that they match and cannot deadlock.

Three properties are checked. Each is checked only if the previous one holds:

1. Matching. The i-th collective of a communicator is the same on every member. In an all-to-all,
   each pair of members agrees on the number of rows. The i-th transfer from one rank to another
   has the same shape and dtype at both ends.
2. Progress. All ranks reach the end of their messages, even if NCCL and torch block as much as they
   may. That is, a collective blocks a rank until all members have reached the collective. Transfers
   run in the order in which a rank posts them in a communicator, except that the transfers of a
   batch run together. A wait blocks the rank until the awaited transfer is done.
3. No needless waits. A transfer never has to wait for another one just because both are in the same
   communicator (see `held_up.py`).
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wlb.rehearse.gpu import Communicator, RankMessage
from wlb.rehearse.held_up import HeldUp, held_up

Programs = Mapping[int, Sequence[RankMessage]]
"""Rank -> its messages, in the order in which its host issued them."""
_MOST_PROBLEMS = 8
"""Most problems of one kind that are reported."""


@dataclass(slots=True)
class Proof:
    """What was compared between ranks, and the problems that were found."""

    num_ranks: int  # number of rehearsed ranks
    num_seen: int = 0  # number of communicators in which a rehearsed rank issued a collective
    num_communicators: int = 0  # number of communicators whose members were all rehearsed
    num_collectives: int = 0  # number of collectives that were compared
    num_transfers: int = 0  # number of transfers whose two ends were compared
    is_complete: bool = True  # whether all ranks of the run were rehearsed
    problems: list[str] = field(default_factory=list)  # sentences; empty if none was found


def prove(programs: Programs, *, world_size: int) -> Proof:
    """Check that the ranks' messages match, make progress and have no needless waits.

    Ranks that were not rehearsed are assumed to do what the others expect.

    Args:
        programs: Messages of each rehearsed rank.
        world_size: Number of ranks of the run.
    """
    proof = Proof(num_ranks=len(programs), is_complete=len(programs) == world_size)
    _match_collectives(programs, proof)
    _match_transfers(programs, proof)
    if not proof.problems:
        _check_progress(programs, proof)
    if not proof.problems:
        _check_held_up(programs, proof)
    return proof


def _check_held_up(programs: Programs, proof: Proof) -> None:
    """Add a problem to `proof` for each communicator in which a transfer could delay another."""
    found: dict[Communicator, list[HeldUp]] = defaultdict(list)
    for one in held_up(programs):
        found[one.communicator].append(one)
    for where, cases in list(found.items())[:_MOST_PROBLEMS]:
        first = cases[0]
        proof.problems.append(
            f"transfers in {_named(where)} may have to wait for an earlier transfer of the same "
            f"rank, because a communicator runs transfers in order (number of such transfers: "
            f"{len(cases)}); rank {first.rank} first posts its {_transfer_text(first.first)}, "
            f"which its peer may not have posted yet, and then its {_transfer_text(first.second)}; "
            f"give each pair of ranks a separate communicator"
        )


def _transfer_text(message: RankMessage) -> str:
    return f"{message.kind} with rank {message.op} (step {message.step}, {message.where})"


def _match_collectives(programs: Programs, proof: Proof) -> None:
    """Compare each communicator's collectives on all members; add differences to `proof.problems`.

    Args:
        programs: Messages of each rehearsed rank.
        proof: The result, whose counts of communicators and collectives are set, too.
    """
    sequences: dict[Communicator, dict[int, list[RankMessage]]] = defaultdict(dict)
    for rank, program in programs.items():
        of_rank: dict[Communicator, list[RankMessage]] = defaultdict(list)
        for message in program:
            if message.kind == "collective":
                assert message.communicator is not None
                of_rank[message.communicator].append(message)
        for where, messages in of_rank.items():
            sequences[where][rank] = messages
    proof.num_seen = len(sequences)
    for where, by_rank in sequences.items():
        # Compare every member with the first, and then the rows of all-to-alls pair by pair.
        members = [rank for rank in where.ranks if rank in programs]
        proof.num_communicators += len(members) == len(where.ranks)
        first = members[0]
        proof.num_collectives += len(by_rank.get(first, ()))
        for rank in members[1:]:
            problem = _differing(where, first, by_rank.get(first, []), rank, by_rank.get(rank, []))
            if problem and len(proof.problems) < _MOST_PROBLEMS:
                proof.problems.append(problem)
        problem = _unpaired(where, {rank: by_rank.get(rank, []) for rank in members})
        if problem and len(proof.problems) < _MOST_PROBLEMS:
            proof.problems.append(problem)


def _unpaired(where: Communicator, by_rank: Mapping[int, Sequence[RankMessage]]) -> str:
    """Describe an all-to-all whose sent and received rows differ; "" if there is none.

    Args:
        where: Communicator of the all-to-alls.
        by_rank: Collectives of each rehearsed member, in order.
    """
    for messages in zip(*by_rank.values(), strict=False):
        splits = {r: m.splits for r, m in zip(by_rank, messages, strict=True) if m.splits}
        for sender, ours in splits.items():
            for receiver, theirs in splits.items():
                sent = ours.sent[where.ranks.index(receiver)]
                received = theirs.received[where.ranks.index(sender)]
                if sent != received:
                    return (
                        f"the ranks disagree on an all-to-all of {_named(where)}: rank {sender} "
                        f"sends {sent} rows to rank {receiver}, which expects {received} rows, in "
                        f"step {messages[0].step} at {messages[0].where}"
                    )
    return ""


def _differing(
    where: Communicator, first: int, a: list[RankMessage], rank: int, b: list[RankMessage]
) -> str:
    """Describe the first collective that differs between two ranks; "" if none differs.

    Args:
        where: Communicator of the collectives.
        first: One of the two ranks.
        a: Collectives of rank `first`, in order.
        rank: The other rank.
        b: Collectives of rank `rank`, in order.
    """
    for i in range(max(len(a), len(b))):
        one = a[i] if i < len(a) else None
        other = b[i] if i < len(b) else None
        if one is None or other is None or (one.op, one.what) != (other.op, other.what):
            return (
                f"the ranks disagree on collective {i} of {_named(where)}: rank {first} issues "
                f"{_text(one)}, but rank {rank} issues {_text(other)}"
            )
    return ""


def _match_transfers(programs: Programs, proof: Proof) -> None:
    """Compare both ends of each transfer between rehearsed ranks; note differences in `proof`."""
    # Keys are (sender, receiver, communicator).
    sent: dict[tuple[int, int, Communicator], list[RankMessage]] = defaultdict(list)
    received: dict[tuple[int, int, Communicator], list[RankMessage]] = defaultdict(list)
    for rank, program in programs.items():
        for message in program:
            where = message.communicator
            if message.kind == "send" and message.op in programs and where is not None:
                sent[rank, message.op, where].append(message)
            if message.kind == "recv" and message.op in programs and where is not None:
                received[message.op, rank, where].append(message)
    for pair in sorted(set(sent) | set(received)):
        sends, receives = sent[pair], received[pair]
        proof.num_transfers += len(sends)
        for i in range(max(len(sends), len(receives))):
            one = sends[i] if i < len(sends) else None
            other = receives[i] if i < len(receives) else None
            if one is None or other is None or one.what != other.what:
                if len(proof.problems) < _MOST_PROBLEMS:
                    proof.problems.append(
                        f"transfer {i} from rank {pair[0]} to rank {pair[1]} in {_named(pair[2])} "
                        f"does not match: the sender posts {_text(one)}, but the receiver posts "
                        f"{_text(other)}"
                    )
                break


def _check_progress(programs: Programs, proof: Proof) -> None:
    """Simulate all ranks until they have ended or none can continue.

    If some ranks wait for each other forever, note the deadlock in `proof`.
    """
    hosts = _Hosts(programs)
    while hosts.ready:
        hosts.advance(hosts.ready.popleft())
    stuck = [rank for rank in programs if hosts.at[rank] < len(programs[rank])]
    if stuck:
        shown = "; ".join(
            f"rank {rank} at {_text(programs[rank][hosts.at[rank]], programs[rank])}"
            for rank in stuck[:_MOST_PROBLEMS]
        )
        proof.problems.append(f"deadlock: {len(stuck)} ranks wait for each other: {shown}")


class _Hosts:
    """Simulates how the hosts of all ranks issue their messages and wait for each other.

    Attributes:
        at: Rank -> index of the rank's next message.
        ready: Ranks that may be able to issue their next message.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.at = dict.fromkeys(programs, 0)
        self.ready = deque(programs)
        # (rank, communicator) -> batches that the rank has posted and that are not done, in order.
        self._posted: dict[tuple[int, Communicator], deque[_Batch]] = defaultdict(deque)
        # Transfers that are done, as (rank, index of the message).
        self._served: set[tuple[int, int]] = set()
        # Communicator -> members that have reached its current collective.
        self._arrived: dict[Communicator, set[int]] = defaultdict(set)

    def advance(self, rank: int) -> None:
        """Issue messages of a rank until it has to wait for another rank."""
        program = self.programs[rank]
        while self.at[rank] < len(program):
            message = program[self.at[rank]]
            if message.kind == "collective":
                if not self._arrive(rank, message.communicator):
                    return
                continue
            if message.kind == "wait":
                if (rank, message.what) not in self._served:
                    return
            elif message.op in self.programs:
                self._post(rank, message)
            else:
                self._served.add((rank, self.at[rank]))
            self.at[rank] += 1

    def _arrive(self, rank: int, where: Communicator | None) -> bool:
        """Record that a rank has reached a collective in communicator `where`.

        If all other rehearsed members have already reached it, the collective is done, and every
        member goes on to the next of its messages.

        Returns:
            Whether all members have now reached the collective.
        """
        assert where is not None
        self._arrived[where].add(rank)
        members = [r for r in where.ranks if r in self.programs]
        if len(self._arrived[where]) < len(members):
            return False
        del self._arrived[where]
        for member in members:
            self.at[member] += 1
            if member != rank:
                self.ready.append(member)
        return True

    def _post(self, rank: int, message: RankMessage) -> None:
        """Post a send or receive of a rank, and complete all transfers that can run now."""
        assert message.communicator is not None
        posted = self._posted[rank, message.communicator]
        if not posted or message.batch < 0 or posted[-1].number != message.batch:
            posted.append(_Batch(message.batch))
        posted[-1].waiting.append((message.kind, message.op, self.at[rank]))
        self._serve(rank, message.communicator)

    def _serve(self, rank: int, where: Communicator) -> None:
        """Complete transfers that are next in line on both of their ranks, until none is left.

        Args:
            rank: Rank that has just posted a transfer.
            where: Communicator of the transfer.
        """
        changed = [rank]
        while changed:
            one = changed.pop()
            queue = self._posted[one, where]
            while queue:
                for transfer in tuple(queue[0].waiting):
                    changed += self._paired(one, transfer, queue[0], where)
                if queue[0].waiting:
                    break
                queue.popleft()

    def _paired(
        self, rank: int, transfer: "_Transfer", batch: "_Batch", where: Communicator
    ) -> list[int]:
        """Complete a transfer if its other end is in the batch that its peer runs at present.

        A batch is the transfers that NCCL starts together. A rank runs its batches in a
        communicator one after the other.

        Args:
            rank: Rank that posted `transfer`.
            transfer: The send or receive to complete.
            batch: The batch of `rank` that has `transfer`.
            where: Communicator of the transfer.

        Returns:
            [peer] if all transfers of the peer's batch are now done, so that the peer's next batch
            may run. Otherwise [].
        """
        kind, peer, index = transfer
        others = self._posted[peer, where]
        halves = others[0].waiting if others else []
        half = next((h for h in halves if h[1] == rank and h[0] != kind), None)
        if half is None:
            return []
        batch.waiting.remove(transfer)
        halves.remove(half)
        self._served |= {(rank, index), (peer, half[2])}
        self.ready.append(peer)
        if halves:
            return []
        others.popleft()
        return [peer]


_Transfer = tuple[str, int, int]
"""A send or receive: (kind, peer, index of its message among the messages of its rank)."""


@dataclass(slots=True)
class _Batch:
    """Transfers of a rank that NCCL starts together."""

    number: int  # number that all transfers of the batch have in `RankMessage.batch`
    waiting: list[_Transfer] = field(default_factory=list)  # transfers that are not done yet


def _named(where: Communicator) -> str:
    ranks = ", ".join(map(str, where.ranks[:4])) + (", ..." if len(where.ranks) > 4 else "")
    return f"{where.axis} ({ranks})"


def _text(message: RankMessage | None, program: Sequence[RankMessage] = ()) -> str:
    if message is None:
        return "nothing"
    if message.kind == "wait":
        awaited = program[message.what]
        return (
            f"waiting at {message.where} for its {awaited.kind} with rank {awaited.op} "
            f"(step {message.step})"
        )
    what = f"{message.op}" if message.kind == "collective" else f"{message.kind} {message.op}"
    return f"{what} of {message.what} in step {message.step} at {message.where}"
