"""Gradient norms of the last steps, and which norm is a spike over them (`training.skip_spikes`).

A few bad documents can make a finite gradient many times longer than usual. Clipping keeps its
direction, which is what the bad documents say; a skipped update does not. The median is compared
with, which single spikes do not move. Modelled on OLMo-core's SkipStepOptimizer, which takes a mean
and standard deviations instead (https://github.com/allenai/OLMo-core).
"""

import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from wlb.spec import RunSpec
from wlb.train.checkpoint.folder import saved_norms

WINDOW = 128
"""Norms that are remembered, so that the median follows the norm's slow decline."""
LEAST = 16
"""Norms that must be known before one is called a spike."""


class GradientNorms:
    """The last norms of a run, the same on all ranks and part of its checkpoints. factor: times the
    median beyond which a norm is a spike; 0 = none is, and nothing is remembered."""

    def __init__(self, factor: float, known: Iterable[float] = ()) -> None:
        self.factor = factor
        self._known = deque(known if factor else (), maxlen=WINDOW)

    @classmethod
    def of(cls, spec: RunSpec, saved_in: Path) -> Self:
        """Norms as of a checkpoint."""
        factor = spec.training.skip_spikes
        return cls(factor, saved_norms(saved_in) if factor else ())

    def spike_over(self, norm: float) -> float | None:
        """The median over which a finite `norm` is a spike; None if it is none. Remembers it: of
        norms that stay high the median gets high too."""
        if not self.factor:
            return None
        median = statistics.median(self._known) if len(self._known) >= LEAST else 0.0
        self._known.append(norm)
        return median if median and norm > self.factor * median else None

    def to_json(self) -> list[float]:
        return list(self._known)
