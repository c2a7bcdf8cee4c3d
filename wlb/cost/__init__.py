"""Predicted costs: FLOPs, kernel profiles, the workload of Eq. 2."""

from wlb.lazy import attach

attach(__name__)
