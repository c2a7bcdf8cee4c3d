"""AReaL 1.0: a rank's micro-batches, cut to meet those of the other ranks.

import wlb.adapters.areal
wlb.adapters.areal.install()      # in every trainer process
"""

from typing import Any

from wlb.adapters.versions import require

require("areal>=1.0")

from wlb.adapters.own_ranks import Cut, cut
from wlb.adapters.swap import Swap
from wlb.balance import Cost

PLACE = "areal.utils.data:allocate_balanced_mbs_synced"
_costs: list[Cost] = ["verl"]


def install(*, cost: Cost = "verl") -> None:
    """Make AReaL cut by wlb in this process; cost: of a sequence of so many tokens."""
    _costs[:] = [cost]
    _swap.install()


def uninstall() -> None:
    """Give AReaL its own function back."""
    _swap.uninstall()


def allocate_balanced_mbs_synced(mb_spec: Any, lens: Any, group: Any = None) -> list[list[int]]:
    """AReaL's function of this name: indices of each micro-batch, as many on all ranks of `group`.

    Honours mb_spec's n_mbs, n_mbs_divisor and max_tokens_per_mb; the m-th micro-batches of all
    ranks take nearly as long. UserError for a sequence above the limit.
    """
    how = Cut(
        max_tokens=int(mb_spec.max_tokens_per_mb),
        cost=_costs[0],
        at_least=mb_spec.n_mbs or 1,
        multiple=mb_spec.n_mbs_divisor or 1,
    )
    return cut(lens, how, group)


_swap = Swap("areal", {PLACE: allocate_balanced_mbs_synced})
