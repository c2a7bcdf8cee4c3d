"""Provides a packing plan that several tests share."""

from wlb.plan import Documents, PackingPlan, split_long


def plan() -> PackingPlan:
    return PackingPlan(
        step=3,
        policy="literal",
        pieces=split_long(Documents.from_lengths([5, 2, 9]), window=9, long_documents="split"),
        offsets=[0, 2, 2, 3],
        workload_ns=[30, 0, 90],
        num_held_tokens=4,
    )
