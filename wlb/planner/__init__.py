"""The library's front door: lengths in, step plans out; no torch."""

from wlb.cost import LLAMA2_7B as LLAMA2_7B
from wlb.planner.compose import BatchSource as BatchSource
from wlb.planner.compose import Planner as Planner
from wlb.planner.compose import TargetCounter as TargetCounter
from wlb.planner.compose import open_heldout_planner as open_heldout_planner
from wlb.planner.compose import open_planner as open_planner
from wlb.planner.compose import packs_of as packs_of
from wlb.planner.deal import deal as deal
from wlb.planner.resume import hold_state as hold_state
