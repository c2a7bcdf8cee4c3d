"""Which slots each policy's carry uses, so that a carry from a checkpoint can be checked.

The carry has the pieces that wait. A slot is an integer that a policy stores with each piece, to
tell for example in which outlier queue or open window the piece waits.
"""

from enum import Enum, auto

import numpy as np

from wlb.plan import BoolArray, IntArray
from wlb.plan.arrays import distinct


class CarrySlots(Enum):
    """Which slots a policy gives to the pieces that wait in its carry.

    A slot is an integer. Its meaning depends on the policy: with Algorithm 1 it is the outlier
    queue in which the piece waits.
    """

    ANY = auto()  # The policy does not declare its slots.
    ONE = auto()  # All pieces are in slot 0.
    HELD = auto()  # Pieces that were held back come first, in slot 1; all others are in slot 0.
    NUMBERED = auto()  # Slot 0 may be empty; slots 1, 2, ... follow in order, none of them empty.
    WINDOWS = auto()  # Slots 0, 1, ... follow in order, none of them empty.
    BY_LENGTH = auto()  # Above slot 0, a higher slot has longer pieces.

    def misplaced(self, slot: IntArray, length: IntArray, *, most: int) -> BoolArray:
        """Return a mask, shape [n], of waiting pieces with a slot that the policy never gives them.

        Args:
            slot: Slot of each piece, such as its outlier queue, in the order of the carry, shape
                [n].
            length: Tokens of each piece, shape [n].
            most: Highest slot permitted to a policy that does not declare its slots.
        """
        match self:
            case CarrySlots.ANY:
                wrong = slot > most
            case CarrySlots.ONE:
                wrong = slot != 0
            case CarrySlots.HELD:
                wrong = (slot > 1) | _changes(slot, 1)
            case CarrySlots.NUMBERED | CarrySlots.WINDOWS:
                first = int(self == CarrySlots.NUMBERED)
                taken = distinct(slot[slot >= first])
                wrong = (slot >= first + taken.size) | _changes(slot, -1)
            case CarrySlots.BY_LENGTH:
                order = np.lexsort((slot, length))
                reached = np.maximum.accumulate(slot[order])
                wrong = np.zeros(slot.size, bool)
                wrong[order] = (slot[order] > 0) & (slot[order] < reached)
                # The i-th threshold is at least i tokens, because thresholds are increasing
                # positive integers. So a piece in slot i has at least i tokens.
                wrong |= slot > length
        return wrong | (slot < 0)


def _changes(slot: IntArray, sign: int) -> BoolArray:
    """Return which pieces have a higher (sign = 1) or lower (-1) slot than the piece before."""
    return np.diff(slot, prepend=slot[:1]) * sign > 0
