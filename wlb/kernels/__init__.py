"""Attention of packed documents: one call for all segments of a micro-batch."""

from wlb.kernels.attend import attend
from wlb.kernels.backend import Backend, empty_lse
from wlb.kernels.observe import AttentionObserver, observing
from wlb.kernels.op import BACKENDS
from wlb.kernels.segments import Segments
from wlb.kernels.select import explain_backend, select_backend

__all__ = [
    "BACKENDS",
    "AttentionObserver",
    "Backend",
    "Segments",
    "attend",
    "empty_lse",
    "explain_backend",
    "observing",
    "select_backend",
]
