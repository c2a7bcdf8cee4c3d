"""Attention of packed documents: one call for all segments of a micro-batch."""

from wlb.kernels.op import BACKENDS as BACKENDS
from wlb.kernels.op import AttentionObserver as AttentionObserver
from wlb.kernels.op import Backend as Backend
from wlb.kernels.op import attend as attend
from wlb.kernels.op import observing as observing
from wlb.kernels.segments import Scores as Scores
from wlb.kernels.segments import Segments as Segments
from wlb.kernels.select import select_backend as select_backend
