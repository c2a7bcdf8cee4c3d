"""Configuration of a run: model, layout, data, policies; TOML, presets and checks."""

from wlb.spec.check import check, resolve_dp
from wlb.spec.keys import KeyHelp, RenamedKeyWarning, apply, list_keys, to_dict
from wlb.spec.load import load, presets
from wlb.spec.methods import METHODS
from wlb.spec.model import ModelSpec, RopeScaling
from wlb.spec.packing import BinMethod, PackingSection, Policy, StepGrouping, WindowCut
from wlb.spec.run import (
    AttentionBackend,
    Device,
    Dtype,
    FsdpSection,
    LongDocuments,
    LossNormalizer,
    OnNonfinite,
    OverMemory,
    ParallelSpec,
    Recompute,
    Remainder,
    RunSpec,
    Schedule,
    Strategy,
    TrainingSection,
)
from wlb.spec.schedule import DecayedWeights, DecayShape, RateSchedule
from wlb.spec.systems import PLANNED_MEMORY, SYSTEMS, system_choice, system_overrides
from wlb.spec.write import to_toml

__all__ = [
    "METHODS",
    "PLANNED_MEMORY",
    "SYSTEMS",
    "AttentionBackend",
    "BinMethod",
    "DecayShape",
    "DecayedWeights",
    "Device",
    "Dtype",
    "FsdpSection",
    "KeyHelp",
    "LongDocuments",
    "LossNormalizer",
    "ModelSpec",
    "OnNonfinite",
    "OverMemory",
    "PackingSection",
    "ParallelSpec",
    "Policy",
    "RateSchedule",
    "Recompute",
    "Remainder",
    "RenamedKeyWarning",
    "RopeScaling",
    "RunSpec",
    "Schedule",
    "StepGrouping",
    "Strategy",
    "TrainingSection",
    "WindowCut",
    "apply",
    "check",
    "list_keys",
    "load",
    "presets",
    "resolve_dp",
    "system_choice",
    "system_overrides",
    "to_dict",
    "to_toml",
]
