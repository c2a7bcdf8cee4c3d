"""Named grouping methods for packed fine-tuning: the [packing] keys that each one sets.

The names are those of Table 1 in "Enhancing Training Efficiency Using Packing with Flash Attention"
(Kundu et al., 2024). That paper's bs (batch size) is packing.examples or packing.bin_windows, its
msl (maximum sequence length) is data.context_window, and its gas (gradient accumulation steps) is
N / dp.

Deviation: the paper says that Multipack packs best fit decreasing, but the Multipack library packs
first fit decreasing. multipack_posid packs as the library does, and multipack_bfd_posid as the
paper says.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from wlb.plan import UserError


class BinMethod(StrEnum):
    """Bin-packing algorithm of the policy `capacity`."""

    FIRST_FIT_DECREASING = "first_fit_decreasing"
    BEST_FIT_DECREASING = "best_fit_decreasing"
    NEXT_FIT = "next_fit"
    BEST_FIT = "best_fit"
    NEXT_FIT_DECREASING = "next_fit_decreasing"

    @property
    def is_streaming(self) -> bool:
        """Whether the algorithm places documents into bins in the order in which they arrive."""
        return self in (BinMethod.NEXT_FIT, BinMethod.BEST_FIT)

    @property
    def keeps_order(self) -> bool:
        """Whether bins (micro-batches) are trained in the order in which they were opened."""
        return self.is_streaming or self == BinMethod.NEXT_FIT_DECREASING


GROUPED_BY_LENGTH = "group_by_length_padding"
"""Name of the method that sorts the documents of 50 steps by length and groups neighbours."""
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
"""[packing] keys that each method sets, by the method's name."""


def bin_method_of(method: str) -> BinMethod:
    """Return the bin-packing algorithm that a value of `packing.method` stands for.

    For values that stand for none, including "", this is best fit decreasing.
    """
    return _BIN_METHODS.get(method, BinMethod.BEST_FIT_DECREASING)


def kept_method(method: str, policy: str) -> str:
    """Return `method` (a value of `packing.method`) if its policy is `policy`, otherwise ""."""
    return method if keys_of(method).get("policy") == policy else ""


def keys_of(method: str) -> Mapping[str, Any]:
    """Return the [packing] keys that a grouping method sets, by name; {} for the method "".

    Raises:
        UserError: If the method is unknown.
    """
    if not method:
        return {}
    if method not in METHODS:
        raise UserError(f"packing.method = {method!r} is unknown; use one of {', '.join(METHODS)}")
    return METHODS[method]
