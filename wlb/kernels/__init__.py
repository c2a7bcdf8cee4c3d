"""Attention of packed documents: one call for all segments of a micro-batch."""

from wlb.kernels.attend import BACKENDS, attend, select_backend
from wlb.kernels.segments import Segments

__all__ = ["BACKENDS", "Segments", "attend", "select_backend"]
