"""What things cost: FLOPs, kernel profiles, the workload of Eq. 2, memory."""

from wlb.cost.calibrate import Scales, calibrated_name, fit_scales, scaled_profile
from wlb.cost.flops import (
    attention_backward_flops,
    attention_forward_flops,
    causal_pairs,
    document_flops,
    head_flops,
    layer_linear_flops,
    linear_flops_per_token,
    tile_pairs,
)
from wlb.cost.latency import AttentionLatency, attention_latency, ideal_kernels_ns
from wlb.cost.memory import (
    MemoryEstimate,
    TokenCaps,
    in_flight,
    memory_estimate,
    memory_of_rank,
    token_caps,
)
from wlb.cost.profile import (
    AttentionTable,
    Collective,
    CollectiveCost,
    ElementwiseCost,
    GemmCost,
    KernelProfile,
    Kind,
    Provenance,
    Scope,
)
from wlb.cost.profile_file import (
    SCHEMA_VERSION,
    default_profile_name,
    load_profile,
    profile_from_json,
    profile_names,
    profile_to_json,
    save_profile,
)
from wlb.cost.stage import StageTimes, stage_times, without_collectives
from wlb.cost.surface import Surface, limit_growth
from wlb.cost.workload import FlopsWorkload, ProfiledWorkload, WorkloadModel, workload_for

__all__ = [
    "SCHEMA_VERSION",
    "AttentionLatency",
    "AttentionTable",
    "Collective",
    "CollectiveCost",
    "ElementwiseCost",
    "FlopsWorkload",
    "GemmCost",
    "KernelProfile",
    "Kind",
    "MemoryEstimate",
    "ProfiledWorkload",
    "Provenance",
    "Scales",
    "Scope",
    "StageTimes",
    "Surface",
    "TokenCaps",
    "WorkloadModel",
    "attention_backward_flops",
    "attention_forward_flops",
    "attention_latency",
    "calibrated_name",
    "causal_pairs",
    "default_profile_name",
    "document_flops",
    "fit_scales",
    "head_flops",
    "ideal_kernels_ns",
    "in_flight",
    "layer_linear_flops",
    "limit_growth",
    "linear_flops_per_token",
    "load_profile",
    "memory_estimate",
    "memory_of_rank",
    "profile_from_json",
    "profile_names",
    "profile_to_json",
    "save_profile",
    "scaled_profile",
    "stage_times",
    "tile_pairs",
    "token_caps",
    "without_collectives",
    "workload_for",
]
