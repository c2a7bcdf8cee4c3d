"""The library's front door: lengths in, step plans out; no torch."""

from wlb.planner.compose import Planner, Source, deal, with_shardings

__all__ = ["Planner", "Source", "deal", "with_shardings"]
