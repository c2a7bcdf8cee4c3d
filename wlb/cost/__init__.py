"""Predicted costs: FLOPs, kernel profiles, and the work of documents (Eq. 2 of the paper)."""

from wlb.lazy import attach

attach(__name__)
