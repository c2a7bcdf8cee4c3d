"""wlb: workload-balanced 4-D parallelism for LLM training on packed documents.

The names below are the public API of the planner: they import no torch, and keep their meaning
within a minor version. They are imported when they are first used. Everything else is reachable by
its room (`wlb.parallel`, `wlb.simulate`, ...) and may change. README.md has an example of
`Planner.for_lengths`.
"""

from wlb.lazy import attach

__version__ = "0.1.0"

attach(__name__)
