"""Makes step plans from documents' lengths: packing and sharding together, without torch."""

from wlb.cost import LLAMA2_7B as LLAMA2_7B
from wlb.planner.compose import BatchSource as BatchSource
from wlb.planner.compose import Planner as Planner
from wlb.planner.compose import TargetCounter as TargetCounter
from wlb.planner.resume import check_planner_state as check_planner_state
from wlb.planner.runs import open_heldout_planner as open_heldout_planner
from wlb.planner.runs import open_planner as open_planner
from wlb.planner.runs import packs_of as packs_of
