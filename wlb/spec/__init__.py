"""The configuration of a run: its sections, TOML files, presets and checks."""

from wlb.lazy import attach

attach(__name__)
