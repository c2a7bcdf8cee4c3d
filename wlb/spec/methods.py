"""Named grouping methods for packed fine-tuning: the [packing] keys that each one sets.

Source: Table 1 of "Enhancing Training Efficiency Using Packing with Flash Attention" (Kundu et al.,
2024). The paper's bs is packing.examples or packing.bin_windows, msl is data.context_window, gas
is N / dp. Deviation: the paper says that Multipack packs best fit decreasing, but its library packs
first fit decreasing; multipack_bfd_posid is the true best fit decreasing.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from wlb.plan import UserError


class BinMethod(StrEnum):
    """How `capacity` fills its bins."""

    FIRST_FIT_DECREASING = "first_fit_decreasing"
    BEST_FIT_DECREASING = "best_fit_decreasing"
    NEXT_FIT = "next_fit"
    BEST_FIT = "best_fit"
    NEXT_FIT_DECREASING = "next_fit_decreasing"

    @property
    def is_streaming(self) -> bool:
        """Whether documents are placed in arrival order."""
        return self in (BinMethod.NEXT_FIT, BinMethod.BEST_FIT)

    @property
    def keeps_order(self) -> bool:
        """Whether bins are trained in the order in which they were opened."""
        return self.is_streaming or self == BinMethod.NEXT_FIT_DECREASING


GROUPED_BY_LENGTH = "group_by_length_padding"
"""The method that takes documents of similar length together, within 50 steps at a time."""
_BIN_METHODS = {
    "multipack_posid": BinMethod.FIRST_FIT_DECREASING,
    "multipack_bfd_posid": BinMethod.BEST_FIT_DECREASING,
    "sorted_posid": BinMethod.NEXT_FIT_DECREASING,
    "random_posid": BinMethod.NEXT_FIT,
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "random_padding": {"policy": "examples", "layout": "padded"},
    GROUPED_BY_LENGTH: {"policy": "examples", "layout": "padded"},
    "mini_batch_posid": {"policy": "examples", "layout": "separate"},
    "fixed_length": {"policy": "original", "window_cut": "anywhere", "layout": "joined"},
    "fixed_length_posid": {"policy": "original", "window_cut": "anywhere", "layout": "separate"},
    **{name: {"policy": "capacity", "layout": "separate"} for name in _BIN_METHODS},
}


def bin_method_of(method: str) -> BinMethod:
    """How bins are filled; best fit decreasing without a method that says how."""
    return _BIN_METHODS.get(method, BinMethod.BEST_FIT_DECREASING)


def kept_method(method: str, policy: str) -> str:
    """`method`, which decides bins and grouping too, if it is one of `policy`; else ""."""
    return method if keys_of(method).get("policy") == policy else ""


def keys_of(method: str) -> Mapping[str, Any]:
    """Return the [packing] keys of a method, none for ""; UserError listing the known methods."""
    if not method:
        return {}
    if method not in METHODS:
        raise UserError(f"packing.method = {method!r} is unknown; known: {', '.join(METHODS)}")
    return METHODS[method]
