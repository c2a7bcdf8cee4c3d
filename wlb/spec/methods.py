"""Grouping methods of packed fine-tuning, by name: which keys of [packing] each one is.

The eight rows of Table 1 of "Enhancing Training Efficiency Using Packing with Flash Attention"
(Kundu et al., 2024) and of its second edition, which calls RandomSampling+PosID
MiniBatchPacking+PosID. `packing.method` names one in a TOML file; the paper's bs is
packing.examples or packing.bin_windows, its msl data.context_window, its gas N / dp. Multipack's
library packs by first fit decreasing; true best fit decreasing has a name of its own.
"""

from collections.abc import Mapping
from typing import Any

METHODS: Mapping[str, Mapping[str, Any]] = {
    "random_padding": {"policy": "examples", "by_length": False, "layout": "padded"},
    "group_by_length_padding": {"policy": "examples", "by_length": True, "layout": "padded"},
    "mini_batch_posid": {"policy": "examples", "by_length": False, "layout": "separate"},
    "fixed_length": {"policy": "original", "window_cut": "anywhere", "layout": "joined"},
    "fixed_length_posid": {"policy": "original", "window_cut": "anywhere", "layout": "separate"},
    "multipack_posid": {
        "policy": "capacity",
        "bin_method": "first_fit_decreasing",
        "layout": "separate",
    },
    "multipack_bfd_posid": {
        "policy": "capacity",
        "bin_method": "best_fit_decreasing",
        "layout": "separate",
    },
    "sorted_posid": {
        "policy": "capacity",
        "bin_method": "next_fit_decreasing",
        "layout": "separate",
    },
    "random_posid": {"policy": "capacity", "bin_method": "next_fit", "layout": "separate"},
}


def keys_of(method: str) -> Mapping[str, Any]:
    """Keys of [packing], none for no method; ValueError listing the known ones."""
    if not method:
        return {}
    if method not in METHODS:
        raise ValueError(f"packing.method = {method!r} is unknown; known: {', '.join(METHODS)}")
    return METHODS[method]
