"""The place of each rank in the mesh, and the ranks that each pipeline link joins. No torch."""

import numpy as np

from wlb.spec import ParallelSpec

LINKS = ("pp_even", "pp_odd", "pp_last")
"""Kinds of links, which are the communicators of two neighbouring pipeline ranks.

The pipeline ranks form a ring, in which link i joins ranks i and i + 1 (modulo pp). Links are even
or odd by their number. Two links of one kind never share a rank, so one collective call can make
the communicators of all links of a kind. If the number of ranks is odd, the last link would share a
rank with another even link, so it is a kind of its own.
"""


def rank_grid(parallel: ParallelSpec) -> np.ndarray:
    """Return the number of the rank at each place of the mesh, shape [pp, dp, cp, tp]."""
    physical = np.arange(parallel.world_size).reshape(
        max(1, parallel.dp), parallel.pp, parallel.cp, parallel.tp
    )
    return np.ascontiguousarray(physical.transpose(1, 0, 2, 3))


def kind_of_link(link: int, pp: int) -> str:
    """Return the kind (see `LINKS`) of link i = `link`, which joins ranks i and (i + 1) mod pp."""
    is_last_of_odd = pp % 2 == 1 and link == pp - 1
    return LINKS[2] if is_last_of_odd else LINKS[link % 2]


def link_members(parallel: ParallelSpec) -> dict[str, list[list[int]]]:
    """Return the groups of ranks that links join, by kind of link (`LINKS`); {} without a pipeline.

    A link joins two neighbouring ranks of a pipeline. For each kind of link, every rank is in
    exactly one group: with a neighbour, or alone. Ranks that are alone must make a group too. torch
    names a group by the number of groups that the rank has made so far, so ranks that later make a
    group together must have made equally many groups before.
    """
    pp = parallel.pp
    if pp == 1:
        return {}
    pipelines = rank_grid(parallel).reshape(pp, -1).T.tolist()
    out: dict[str, list[list[int]]] = {}
    for link in range(pp):
        pairs = [sorted((ranks[link], ranks[(link + 1) % pp])) for ranks in pipelines]
        out.setdefault(kind_of_link(link, pp), []).extend(pairs)
    for parts in out.values():
        joined = {rank for part in parts for rank in part}
        parts += [[rank] for rank in range(parallel.world_size) if rank not in joined]
    return out
