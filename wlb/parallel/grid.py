"""Numbers of ranks on the axes of a layout; imports no torch."""

import numpy as np

from wlb.spec import ParallelSpec


def rank_grid(parallel: ParallelSpec) -> np.ndarray:
    """All ranks, shape [pp, dp, cp, tp]."""
    physical = np.arange(parallel.world_size).reshape(
        max(1, parallel.dp), parallel.pp, parallel.cp, parallel.tp
    )
    return np.ascontiguousarray(physical.transpose(1, 0, 2, 3))
