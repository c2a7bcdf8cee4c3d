"""Context-parallel sharding: which span of which piece each CP rank works on."""

from wlb.lazy import attach

attach(__name__)
