"""`python -m wlb.profile`: measures kernels and fits W_a and W_l (Eq. 2, Section 5.3)."""

from wlb.profile.build import Built, Origin, build
from wlb.profile.sweep import PRESETS, Settings, run_sweep, settings_of

__all__ = [
    "PRESETS",
    "Built",
    "Origin",
    "Settings",
    "build",
    "run_sweep",
    "settings_of",
]
