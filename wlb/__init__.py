"""wlb: workload-balanced 4-D parallelism for LLM training on packed documents.

The names below are the public API of the planner: they import no torch, and keep their meaning
within a minor version. They are imported when they are first used. Everything else is reachable by
its room (`wlb.parallel`, `wlb.simulate`, ...) and may change. README.md has an example of
`Planner.for_lengths`.
"""

import importlib

__version__ = "0.1.0"

_ROOMS = {
    "wlb.planner": "Planner",
    "wlb.balance": "StepBalance balance_step",
    "wlb.plan": (
        "Carry Documents GlobalBatch KernelSegments MicroBatch PackingPlan Pieces PipelinePlan "
        "PlannerState RankSpans ShardingPlan StepMetrics StepPlan"
    ),
    "wlb.packing": (
        "BoundedPacker CapacityPacker FixedPacker OriginalPacker Packer PackerOptions "
        "PackingRun PackingSummary VarLenPacker measure"
    ),
    "wlb.sharding": "shard",
    "wlb.cost": (
        "FlopsWorkload KernelProfile ProfiledWorkload WorkloadModel load_profile "
        "profile_names workload_of"
    ),
    "wlb.data": "GlobalBatches LengthSource TokenStore",
    "wlb.spec": "RunSpec load",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = ["__version__", *sorted(_ROOM_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'wlb' has no attribute {name!r}")
    # Rooms that import the version must not import the planner with it.
    return getattr(importlib.import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
