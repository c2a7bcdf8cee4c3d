"""What `Planner.for_lengths` makes of its arguments: the source of documents, and the packer."""

from typing import Any

import numpy as np

from wlb.data import LengthSource, Source
from wlb.packing import BoundedPacker, Packer, PackerOptions, VarLenPacker
from wlb.plan import IntLike, int_array


def source_of(lengths: IntLike | Source) -> Source:
    """A source as it is, or one that knows lengths alone."""
    if isinstance(lengths, Source):
        return lengths
    array = int_array("lengths", lengths)
    # What was given says more than the integers: a float may have been rounded.
    given: Any = lengths if isinstance(lengths, list | tuple | np.ndarray) else array
    return LengthSource(name="given", lengths=given)


def packer_of(
    options: PackerOptions,
    s_max: int | None,
    step_tokens: int | None,
    max_delay: int,
    queue_thresholds: tuple[int, ...] | None,
) -> Packer:
    """`bounded`, or Algorithm 1 with thresholds."""
    caps: dict[str, Any] = {
        "options": options,
        "s_max": options.context_window * 3 // 2 if s_max is None else s_max,
        "step_tokens": step_tokens,
    }
    if queue_thresholds is None:
        return BoundedPacker(**caps, max_delay=max_delay)
    thresholds = int_array("queue_thresholds", queue_thresholds).tolist()
    return VarLenPacker(**caps, queue_thresholds=tuple(thresholds))
