"""Tests which slots a carry may have, and that every policy says its own."""

import numpy as np
import pytest

from wlb.packing import PACKERS, CarrySlots
from wlb.packing.base import PolicyPacker


@pytest.mark.parametrize(
    ("slots", "slot", "misplaced"),
    [
        (CarrySlots.ANY, [0, 7, 3, -1, 8], [3, 4]),
        (CarrySlots.ONE, [0, 1, 0], [1]),
        (CarrySlots.HELD, [1, 1, 0, 0], []),
        (CarrySlots.HELD, [1, 0, 1, 2], [2, 3]),
        (CarrySlots.NUMBERED, [0, 1, 1, 2], []),
        (CarrySlots.NUMBERED, [1, 0, 3, 3], [1, 2, 3]),
        (CarrySlots.WINDOWS, [0, 0, 1, 2], []),
        (CarrySlots.WINDOWS, [0, 2], [1]),
    ],
)
def test_pieces_in_slots_that_the_policy_does_not_have_are_found(
    slots: CarrySlots, slot: list[int], misplaced: list[int]
) -> None:
    found = slots.misplaced(np.array(slot), np.full(len(slot), 10), most=7)
    assert np.flatnonzero(found).tolist() == misplaced


def test_queues_by_length_hold_longer_pieces_the_higher_they_are() -> None:
    length, slot = np.array([5, 6, 9, 9]), np.array([0, 1, 2, 2])
    assert not CarrySlots.BY_LENGTH.misplaced(slot, length, most=0).any()
    swapped = CarrySlots.BY_LENGTH.misplaced(np.array([0, 2, 1, 1]), length, most=0)
    assert np.flatnonzero(swapped).tolist() == [2, 3]


def policies(base: type[PolicyPacker] = PolicyPacker) -> set[str]:
    """Returns the names of all policies of wlb that derive from `base`."""
    made = [one for one in base.__subclasses__() if one.__module__.startswith("wlb.")]
    return {one.policy for one in made}.union(*(policies(one) for one in made))


def test_every_policy_of_wlb_is_known_and_says_its_slots() -> None:
    assert policies() == {packer.policy for packer in PACKERS}
    assert [packer for packer in PACKERS if packer.slots == CarrySlots.ANY] == []
