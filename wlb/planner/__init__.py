"""The library's front door: lengths in, step plans out; no torch."""

from wlb.planner.compose import (
    LLAMA2_7B,
    BatchSource,
    Planner,
    open_heldout_planner,
    open_planner,
    packs_of,
)
from wlb.planner.deal import deal

__all__ = [
    "LLAMA2_7B",
    "BatchSource",
    "Planner",
    "deal",
    "open_heldout_planner",
    "open_planner",
    "packs_of",
]
