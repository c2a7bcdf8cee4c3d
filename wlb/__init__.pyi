"""Types of the public API (`wlb/__init__.py` imports it when it is used)."""

from wlb.balance import StepBalance, balance_step
from wlb.cost import (
    FlopsWorkload,
    KernelProfile,
    ProfiledWorkload,
    WorkloadModel,
    counted,
    load_profile,
    profile_names,
    workload_of,
)
from wlb.data import GlobalBatches, LengthSource, TokenStore
from wlb.packing import (
    BoundedPacker,
    CapacityPacker,
    FixedPacker,
    OriginalPacker,
    Packer,
    PackerOptions,
    PackingRun,
    PackingSummary,
    VarLenPacker,
    measure,
)
from wlb.plan import (
    Carry,
    Documents,
    GlobalBatch,
    KernelSegments,
    MicroBatch,
    PackingPlan,
    Pieces,
    PipelinePlan,
    PlannerState,
    RankSpans,
    ShardingPlan,
    StepMetrics,
    StepPlan,
)
from wlb.planner import Planner
from wlb.sharding import shard
from wlb.spec import RunSpec, load

__version__: str

__all__ = [
    "BoundedPacker",
    "CapacityPacker",
    "Carry",
    "Documents",
    "FixedPacker",
    "FlopsWorkload",
    "GlobalBatch",
    "GlobalBatches",
    "KernelProfile",
    "KernelSegments",
    "LengthSource",
    "MicroBatch",
    "OriginalPacker",
    "Packer",
    "PackerOptions",
    "PackingPlan",
    "PackingRun",
    "PackingSummary",
    "Pieces",
    "PipelinePlan",
    "Planner",
    "PlannerState",
    "ProfiledWorkload",
    "RankSpans",
    "RunSpec",
    "ShardingPlan",
    "StepBalance",
    "StepMetrics",
    "StepPlan",
    "TokenStore",
    "VarLenPacker",
    "WorkloadModel",
    "balance_step",
    "counted",
    "load",
    "load_profile",
    "measure",
    "profile_names",
    "shard",
    "workload_of",
]
