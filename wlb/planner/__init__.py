"""Makes step plans from documents' lengths: packing and sharding together, without torch."""

from wlb.lazy import attach

attach(__name__)
