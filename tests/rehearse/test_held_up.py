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
    before it can do its part for that gradient."""
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
        "1 transfers of pp (0, 1, 2) could be held up by others that their rank posted before them "
        "in the same communicator: rank 1 posts its recv with rank 2 (step 0, wlb/recv.py:1), "
        "which its peer may not have posted yet, and behind it its send with rank 0 (step 0, "
        "wlb/send.py:1); give each pair of ranks a communicator"
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


def test_transfers_with_ranks_that_were_not_rehearsed_are_left_out() -> None:
    found = merely_slow()
    del found[2]
    assert held_up(found) == []
