"""Deals micro-batches to pipelines whose ranks meet in layers with experts: EP groups span them.

In an EP group of several pipelines a layer waits for its slowest member, so that what counts is
which micro-batches run at the same place of their pipelines: a round. Sorted by work and cut,
rounds have the least sum of their slowest work. Groups of pipelines that meet are then dealt whole
rounds, as `wlb.planner.deal` deals single micro-batches; within a round all take equally long, so
that its micro-batches go where fewest tokens are.
"""

import numpy as np

from wlb.plan import IntArray, UserError
from wlb.planner.deal import deal


def deal_rounds(work_ns: IntArray, tokens: IntArray, dp: int, meets: int) -> IntArray:
    """Shape [dp, N / dp]: the micro-batches of each pipeline; place i of `meets` neighbouring
    pipelines is a round. work_ns, tokens: shape [N]; what a rank computes between meetings."""
    if work_ns.size % dp or dp % meets:
        raise UserError(
            f"{work_ns.size} micro-batches cannot be dealt to {dp} pipelines, of which {meets} meet"
        )
    rounds = np.argsort(-work_ns, kind="stable").reshape(-1, meets)
    slowest, together = work_ns[rounds].max(1), tokens[rounds].sum(1)
    dealt = np.zeros((dp, work_ns.size // dp), np.int64)
    for group, chosen in enumerate(deal(slowest, together, dp // meets)):
        # Rounds come in the order of their first micro-batches.
        members = rounds[chosen]
        members = members[np.argsort(members.min(1), kind="stable")]
        dealt[group * meets : (group + 1) * meets] = _spread(members, tokens).T
    return dealt


def _spread(members: IntArray, tokens: IntArray) -> IntArray:
    """Order within each round, [rounds, meets], so that pipelines have about equal tokens."""
    held = np.zeros(members.shape[1], np.int64)
    out = np.zeros_like(members)
    unequal = np.ptp(tokens[members], axis=1)
    for i in np.argsort(-unequal, kind="stable").tolist():
        most_first = members[i][np.argsort(-tokens[members[i]], kind="stable")]
        least_first = np.argsort(held, kind="stable")
        out[i, least_first] = most_first
        held[least_first] += tokens[most_first]
    return out
