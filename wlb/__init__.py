"""wlb: workload-balanced 4-D parallelism for LLM training on packed documents.

The names that `__init__.pyi` lists are the planner's public API. They import no torch, and they
keep their meaning within a minor version. Each is imported when it is first used. All other code is
reached through its folder (`wlb.parallel`, `wlb.simulate`, ...) and may change at any time.
README.md has an example with `Planner.for_lengths`.
"""

from wlb.lazy import attach

__version__ = "0.1.0"

attach(__name__)
