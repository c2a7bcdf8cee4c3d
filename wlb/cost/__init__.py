"""What things cost: FLOPs, kernel profiles, the workload of Eq. 2, memory."""

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
from wlb.cost.latency import AttentionLatency, attention_latency
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
    "Scope",
    "Surface",
    "TokenCaps",
    "WorkloadModel",
    "attention_backward_flops",
    "attention_forward_flops",
    "attention_latency",
    "causal_pairs",
    "default_profile_name",
    "document_flops",
    "head_flops",
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
    "tile_pairs",
    "token_caps",
    "workload_for",
]
