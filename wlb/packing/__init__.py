"""Packing policies: which documents make up each micro-batch of a step."""

from wlb.lazy import attach

attach(__name__)
