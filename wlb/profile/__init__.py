"""Measure kernels and fit a kernel profile, which prices W_a and W_l (Eq. 2, Section 5.3)."""

from wlb.profile.build import BuiltProfile as BuiltProfile
from wlb.profile.build import SweepOrigin as SweepOrigin
from wlb.profile.build import build as build
from wlb.profile.sweep import PRESETS as PRESETS
from wlb.profile.sweep import SweepSettings as SweepSettings
from wlb.profile.sweep import run_sweep as run_sweep
from wlb.profile.sweep import settings_of as settings_of
