"""Data that training reads: token stores, blends, document lengths, global batches."""

from wlb.lazy import attach

attach(__name__)
