"""Tests which transfers could be held up by others of their communicator."""

from tests.rehearse.test_prove import wait
from wlb.rehearse.gpu import Communicator, RankMessage
from wlb.rehearse.held_up import held_up
from wlb.rehearse.prove import prove

PIPELINE = Communicator("pp", (0, 1, 2))
"""One communicator for all transfers."""


def link(one: int, other: int) -> Communicator:
    return Communicator("pp_even", (min(one, other), max(one, other)))


def transfer(kind: str, peer: int, what: str, where: Communicator = PIPELINE) -> RankMessage:
    return RankMessage(where, kind, peer, what, f"wlb/{kind}.py:1", 0)


def early_receive() -> dict[int, list[RankMessage]]:
    """Rank 1 posts the receive of a late gradient of rank 2, then sends rank 0 what rank 0 needs
    before it can do its part for that gradient.
    """
    return {
        0: [transfer("recv", 1, "early"), wait(0), transfer("send", 2, "part"), wait(2)],
        1: [transfer("recv", 2, "late"), transfer("send", 0, "early"), wait(1), wait(0)],
        2: [transfer("recv", 0, "part"), wait(0), transfer("send", 1, "late"), wait(2)],
    }


def test_a_receive_whose_sender_may_be_late_holds_up_the_send_behind_it() -> None:
    """Here the late gradient even depends on the early transfer, so that the ranks deadlock."""
    (found,) = held_up(early_receive())
    assert (found.rank, found.first.what, found.second.what) == (1, "late", "early")
    assert any("deadlock" in problem for problem in prove(early_receive(), world_size=3).problems)


def merely_slow() -> dict[int, list[RankMessage]]:
    """The same without the dependency: only time is lost."""
    return {
        0: [transfer("recv", 1, "early"), wait(0)],
        1: [transfer("recv", 2, "late"), transfer("send", 0, "early"), wait(1), wait(0)],
        2: [transfer("send", 1, "late"), wait(0)],
    }


def test_the_proof_says_which_transfer_waits_for_which() -> None:
    (problem,) = prove(merely_slow(), world_size=3).problems
    assert problem == (
        "transfers in pp (0, 1, 2) may have to wait for an earlier transfer of the same rank, "
        "because a communicator runs transfers in order (number of such transfers: 1); rank 1 "
        "first posts its recv with rank 2 (step 0, wlb/recv.py:1), which its peer may not have "
        "posted yet, and then its send with rank 0 (step 0, wlb/send.py:1); give each pair of "
        "ranks a separate communicator"
    )


def test_with_a_communicator_for_each_pair_nothing_is_held_up() -> None:
    found = {
        rank: [
            m if m.kind == "wait" else m._replace(communicator=link(rank, m.op)) for m in program
        ]
        for rank, program in merely_slow().items()
    }
    assert held_up(found) == []
    assert prove(found, world_size=3).problems == []


def test_a_transfer_that_is_needed_only_after_the_earlier_one_is_not_held_up() -> None:
    """Rank 0 hears from rank 2 that it sent, before it waits for rank 1."""
    found = merely_slow()
    found[2] += [transfer("send", 0, "sent")]
    found[0] = [transfer("recv", 2, "sent"), wait(0), transfer("recv", 1, "early"), wait(2)]
    assert held_up(found) == []


def test_transfers_that_start_together_do_not_hold_up_each_other() -> None:
    found = merely_slow()
    found[1][:2] = [m._replace(batch=7) for m in found[1][:2]]
    assert held_up(found) == []


def test_a_transfer_that_the_receiver_needs_first_anyway_holds_up_nothing() -> None:
    """Rank 1 receives from 0, then from 2, and needs them in this order."""
    found = {
        0: [transfer("send", 1, "a"), wait(0)],
        1: [transfer("recv", 0, "a"), wait(0), transfer("recv", 2, "b"), wait(2)],
        2: [transfer("send", 1, "b"), wait(0)],
    }
    assert held_up(found) == []


def test_a_batch_waits_for_what_stands_before_it() -> None:
    """The early send is in one batch with a receive of rank 2, and behind another one."""
    found = {
        0: [transfer("recv", 1, "early"), wait(0)],
        1: [
            transfer("recv", 2, "late"),
            transfer("recv", 2, "later")._replace(batch=3),
            transfer("send", 0, "early")._replace(batch=3),
            *(wait(i) for i in (2, 0, 1)),
        ],
        2: [transfer("send", 1, "late"), transfer("send", 1, "later"), wait(0), wait(1)],
    }
    (one,) = held_up(found)
    assert (one.first.what, one.second.what) == ("late", "early")


def test_a_collective_that_may_be_asynchronous_excuses_nobody() -> None:
    """Ranks 0 and 2 both begin a collective, which need not have ended when rank 0 waits."""
    found = merely_slow()
    begun = RankMessage(Communicator("fsdp", (0, 2)), "collective", "gather", "x", "a.py:1", 0)
    found[2].append(begun)
    found[0] = [begun, transfer("recv", 1, "early"), wait(1)]
    assert len(held_up(found)) == 1


def test_a_sender_that_waits_for_its_send_is_looked_at_too() -> None:
    """Nobody waits to receive, but rank 1 waits for its send and then sends rank 2 something."""
    found = {
        0: [transfer("recv", 1, "early")],
        1: [transfer("recv", 2, "late"), transfer("send", 0, "early"), wait(1), wait(0)],
        2: [transfer("send", 1, "late"), wait(0)],
    }
    assert len(held_up(found)) == 1


def test_transfers_that_nobody_waits_for_are_left_out() -> None:
    found = {rank: [m for m in p if m.kind != "wait"] for rank, p in merely_slow().items()}
    assert held_up(found) == []


def test_ranks_that_take_different_links_do_not_pair_up() -> None:
    """Two ranks have two links; rank 0 sends over one, and rank 1 receives over the other."""
    even, odd = (Communicator(kind, (0, 1)) for kind in ("pp_even", "pp_odd"))
    found = {0: [transfer("send", 1, "rows", even)], 1: [transfer("recv", 0, "rows", odd)]}
    problems = prove(found, world_size=2).problems
    assert [problem.partition(":")[0] for problem in problems] == [
        "transfer 0 from rank 0 to rank 1 in pp_even (0, 1) does not match",
        "transfer 0 from rank 0 to rank 1 in pp_odd (0, 1) does not match",
    ]


def test_two_links_between_two_ranks_are_apart() -> None:
    """Each rank posts them in its own order."""
    even, odd = (Communicator(kind, (0, 1)) for kind in ("pp_even", "pp_odd"))
    found = {
        0: [transfer("send", 1, "a", even), transfer("send", 1, "b", odd), wait(0), wait(1)],
        1: [transfer("recv", 0, "b", odd), wait(0), transfer("recv", 0, "a", even), wait(2)],
    }
    assert prove(found, world_size=2).problems == []


def test_transfers_with_ranks_that_were_not_rehearsed_are_left_out() -> None:
    found = merely_slow()
    del found[2]
    assert held_up(found) == []
