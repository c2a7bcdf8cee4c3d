"""Tests that the proof over ranks accepts right programs and finds each kind of fault."""

import random
from collections.abc import Callable

import pytest

from wlb.rehearse.gpu import Communicator, RankMessage, Splits
from wlb.rehearse.prove import prove

TP = {0: Communicator("tp", (0, 1)), 2: Communicator("tp", (2, 3))}
WORLD = Communicator("world", (0, 1, 2, 3))

Programs = dict[int, list[RankMessage]]


def collective(where: Communicator, what: str = "x", op: str = "all_reduce") -> RankMessage:
    return RankMessage(where, "collective", op, what, "wlb/a.py:1", 0)


def transfer(kind: str, peer: int, what: str = "rows") -> RankMessage:
    return RankMessage(Communicator("pp", ()), kind, peer, what, "wlb/b.py:1", 0)


def wait(index: int) -> RankMessage:
    return RankMessage(None, "wait", None, index, "wlb/c.py:1", 0)


def programs() -> Programs:
    """Two stages of two TP ranks, two micro-batches, forward and back, then one sum of all."""
    out: Programs = {}
    for rank in range(4):
        stage, peer = divmod(rank, 2)
        peer = rank + 2 if stage == 0 else rank - 2
        tp = TP[rank - rank % 2]
        own: list[RankMessage] = []
        for batch in ("first", "second"):
            steps = [("send", "forward"), ("recv", "back")]
            for kind, way in steps if stage == 0 else [("recv", "forward"), ("send", "back")]:
                own.append(collective(tp, f"{batch} {way}"))
                own.append(transfer(kind, peer, f"{batch} {way}"))
                own.append(wait(len(own) - 1))
        own.append(collective(WORLD))
        out[rank] = own
    return out


def test_right_programs_match_and_end() -> None:
    proof = prove(programs(), world_size=4)
    assert proof.problems == []
    assert (proof.num_communicators, proof.num_seen, proof.is_complete) == (3, 3, True)
    assert (proof.num_collectives, proof.num_transfers) == (9, 8)


def dropped(found: Programs) -> None:
    del found[1][0]
    found[1] = [m._replace(what=m.what - 1) if m.kind == "wait" else m for m in found[1]]


def other_shape(found: Programs) -> None:
    found[3][-1] = collective(WORLD, "y")


def short_send(found: Programs) -> None:
    found[0][1] = transfer("send", 2, "fewer rows")


def swapped(found: Programs) -> None:
    """Rank 0 receives before it sends, and waits."""
    a = found[0]
    a[1], a[4] = a[4], a[1]


def overtaken(found: Programs) -> None:
    """Rank 1 sums over the world before its last sum over TP."""
    a = found[1]
    a[9], a[12] = a[12], a[9]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (dropped, "the ranks disagree on collective 0 of tp (0, 1)"),
        (other_shape, "collective 0 of world"),
        (short_send, "does not match"),
        (swapped, "deadlock"),
        (overtaken, "deadlock"),
    ],
)
def test_a_fault_is_found(plant: Callable[[Programs], None], said: str) -> None:
    found = programs()
    plant(found)
    problems = prove(found, world_size=4).problems
    assert any(said in problem for problem in problems), problems


def all_to_all(received: tuple[int, ...], sent: tuple[int, ...]) -> RankMessage:
    where = Communicator("cp", (4, 6))
    return collective(where, "row", "all_to_all_single")._replace(splits=Splits(received, sent))


def test_ranks_agree_on_rows_of_an_all_to_all() -> None:
    """Members receive and send different numbers of rows, and what one sends the other receives."""
    found = {4: [all_to_all((8, 3), (8, 5))], 6: [all_to_all((5, 8), (3, 8))]}
    assert prove(found, world_size=2).problems == []
    found[6].append(all_to_all((5, 8), (3, 8)))
    found[4].append(all_to_all((8, 3), (8, 4)))
    (problem,) = prove(found, world_size=2).problems
    assert problem == (
        "the ranks disagree on an all-to-all of cp (4, 6): rank 4 sends 4 rows to rank 6, which "
        "expects 5 rows, in step 0 at wlb/a.py:1"
    )
    # Nothing is known about a rank that was not rehearsed.
    assert prove({4: found[4]}, world_size=2).problems == []


@pytest.mark.parametrize(("batch", "passes"), [(7, True), (-1, False)])
def test_transfers_of_a_batch_start_together(batch: int, passes: bool) -> None:
    """Two ranks that both send first; NCCL holds them unless the receives are in the same group."""
    found = {
        rank: [
            transfer("send", 1 - rank)._replace(batch=batch),
            transfer("recv", 1 - rank)._replace(batch=batch),
            wait(0),
            wait(1),
        ]
        for rank in (0, 1)
    }
    assert bool(prove(found, world_size=2).problems) != passes


def test_ranks_that_were_not_rehearsed_are_not_waited_for() -> None:
    some = {rank: program for rank, program in programs().items() if rank in (0, 2)}
    proof = prove(some, world_size=4)
    assert proof.problems == []
    assert (proof.num_communicators, proof.is_complete) == (0, False)
    assert proof.num_transfers == 4


def test_the_order_in_which_ranks_are_looked_at_does_not_matter() -> None:
    order = list(range(4))
    for seed in range(6):
        random.Random(seed).shuffle(order)
        found = programs()
        assert not prove({rank: found[rank] for rank in order}, world_size=4).problems


def test_transfers_of_one_communicator_wait_for_each_other() -> None:
    """Three ranks that each send on, then receive, in turn: their streams hold each other."""
    where = Communicator("pp", (0, 1, 2))
    found = {
        rank: [
            transfer("send", (rank + 1) % 3)._replace(communicator=where),
            transfer("recv", (rank - 1) % 3)._replace(communicator=where),
            wait(0),
            wait(1),
        ]
        for rank in range(3)
    }
    assert any("deadlock" in problem for problem in prove(found, world_size=3).problems)
    found[2][:2] = [found[2][1], found[2][0]]  # the last receives first
    (problem,) = prove(found, world_size=3).problems
    assert "deadlock" not in problem
    assert "may have to wait for an earlier transfer" in problem
