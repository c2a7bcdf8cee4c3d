"""Records of the whole project: documents, packing, sharding, plans of steps, and their metrics."""

from wlb.lazy import attach

attach(__name__)
