"""Configuration of a run: model, layout, data, policies; TOML, presets and checks."""

from wlb.lazy import attach

attach(__name__)
