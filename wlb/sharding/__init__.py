"""Context-parallel sharding: which tokens of which piece each CP rank processes."""

from wlb.lazy import attach

attach(__name__)
