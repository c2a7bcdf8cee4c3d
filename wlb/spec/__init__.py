"""What a run is told: model, layout, data, policies; TOML, presets and checks."""

from wlb.spec.check import check, resolve_dp
from wlb.spec.keys import KeyHelp, apply, list_keys, to_dict
from wlb.spec.load import load, presets
from wlb.spec.run import (
    AttentionBackend,
    Device,
    Dtype,
    LongDocuments,
    LossNormalizer,
    ModelSpec,
    ParallelSpec,
    Policy,
    RopeScaling,
    RunSpec,
    Schedule,
    Strategy,
)

__all__ = [
    "AttentionBackend",
    "Device",
    "Dtype",
    "KeyHelp",
    "LongDocuments",
    "LossNormalizer",
    "ModelSpec",
    "ParallelSpec",
    "Policy",
    "RopeScaling",
    "RunSpec",
    "Schedule",
    "Strategy",
    "apply",
    "check",
    "list_keys",
    "load",
    "presets",
    "resolve_dp",
    "to_dict",
]
