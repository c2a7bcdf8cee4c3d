"""The library's front door: lengths in, step plans out; no torch."""

from wlb.lazy import attach

attach(__name__)
