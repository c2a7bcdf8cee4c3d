"""Named grouping methods for packed fine-tuning: the [packing] keys that each one sets.

Source: Table 1 of "Enhancing Training Efficiency Using Packing with Flash Attention" (Kundu et al.,
2024). The paper's bs is packing.examples or packing.bin_windows, msl is data.context_window, gas
is N / dp. Deviation: the paper says that Multipack packs best fit decreasing, but its library packs
first fit decreasing; multipack_bfd_posid is the true best fit decreasing.
"""

from collections.abc import Mapping
from typing import Any

from wlb.plan import UserError

METHODS: Mapping[str, Mapping[str, Any]] = {
    "random_padding": {"policy": "examples", "by_length": False, "layout": "padded"},
    "group_by_length_padding": {"policy": "examples", "by_length": True, "layout": "padded"},
    "mini_batch_posid": {"policy": "examples", "by_length": False, "layout": "separate"},
    "fixed_length": {"policy": "original", "window_cut": "anywhere", "layout": "joined"},
    "fixed_length_posid": {"policy": "original", "window_cut": "anywhere", "layout": "separate"},
    **{
        name: {"policy": "capacity", "bin_method": bin_method, "layout": "separate"}
        for name, bin_method in (
            ("multipack_posid", "first_fit_decreasing"),
            ("multipack_bfd_posid", "best_fit_decreasing"),
            ("sorted_posid", "next_fit_decreasing"),
            ("random_posid", "next_fit"),
        )
    },
}


def keys_of(method: str) -> Mapping[str, Any]:
    """Return the [packing] keys of a method, none for ""; UserError listing the known methods."""
    if not method:
        return {}
    if method not in METHODS:
        raise UserError(f"packing.method = {method!r} is unknown; known: {', '.join(METHODS)}")
    return METHODS[method]
