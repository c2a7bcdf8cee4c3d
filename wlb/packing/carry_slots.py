"""Which slots a policy's carry has, so that a carry that was read can be held against them."""

from enum import Enum, auto

import numpy as np

from wlb.plan import BoolArray, IntArray
from wlb.plan.arrays import distinct


class CarrySlots(Enum):
    """Where a policy's pieces may wait."""

    ANY = auto()  # a policy that says nothing about its slots
    ONE = auto()  # all in slot 0
    HELD = auto()  # those held back in slot 1, then the others in slot 0
    NUMBERED = auto()  # slot 0, then slots 1, 2, ... in this order, each with a piece
    WINDOWS = auto()  # slots 0, 1, ... in this order, each with a piece
    BY_LENGTH = auto()  # slot 0, or slots that have longer pieces the higher they are

    def misplaced(self, slot: IntArray, length: IntArray, *, most: int) -> BoolArray:
        """Which pieces wait where the policy puts none, shape [n].

        Args:
            slot: Slot of each piece, in the order of the carry, shape [n].
            length: Tokens of each piece, shape [n].
            most: Highest slot of a policy that says nothing about its slots.
        """
        match self:
            case CarrySlots.ANY:
                wrong = slot > most
            case CarrySlots.ONE:
                wrong = slot != 0
            case CarrySlots.HELD:
                wrong = (slot > 1) | _steps(slot, 1)
            case CarrySlots.NUMBERED | CarrySlots.WINDOWS:
                first = int(self == CarrySlots.NUMBERED)
                taken = distinct(slot[slot >= first])
                wrong = (slot >= first + taken.size) | _steps(slot, -1)
            case CarrySlots.BY_LENGTH:
                order = np.lexsort((slot, length))
                reached = np.maximum.accumulate(slot[order])
                wrong = np.zeros(slot.size, bool)
                wrong[order] = (slot[order] > 0) & (slot[order] < reached)
                # Thresholds are whole numbers above 0, each larger than the one before.
                wrong |= slot > length
        return wrong | (slot < 0)


def _steps(slot: IntArray, sign: int) -> BoolArray:
    """Where a slot is above (sign = 1) or below (-1) the one before it, shape [n]."""
    return np.diff(slot, prepend=slot[:1]) * sign > 0
