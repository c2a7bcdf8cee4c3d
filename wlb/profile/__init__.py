"""`python -m wlb.profile`: measures kernels and fits W_a and W_l (Eq. 2, Section 5.3)."""

from wlb.profile.build import BuiltProfile, SweepOrigin, build
from wlb.profile.sweep import PRESETS, SweepSettings, run_sweep, settings_of

__all__ = [
    "PRESETS",
    "BuiltProfile",
    "SweepOrigin",
    "SweepSettings",
    "build",
    "run_sweep",
    "settings_of",
]
