"""Compares micro-batches with a CP degree of their own with Megatron-Core's hybrid scheduler."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.beyond.step_balance.families import FAMILIES, draw
from experiments.harness.pages import Table
from wlb import StepBalance, balance_step
from wlb.plan import IntArray

CAPS = 4
"""The longest sample needs so many ranks."""


class Group:
    """Stands for a process group of so many ranks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def megatron(lengths: IntArray, ranks: int, cap: int) -> tuple[float, int] | None:
    """Returns wait and number of groups of its BalancedCPScheduler, None if it fails.

    Its estimate of work, and so ours in this table, is tokens^2 over the degree.
    """
    try:
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError:
        return None
    scheduler: Any = BalancedCPScheduler(cap, Group(ranks))
    order = np.argsort(-lengths, kind="stable")
    try:
        _, groups = scheduler.get_groups_and_subsamples(
            [(int(i), int(lengths[i])) for i in order], None
        )
    except (AssertionError, IndexError, ValueError, TypeError):
        return None
    slots, seen = 0.0, set[int]()
    for group in groups:
        shared = Counter(sample for samples in group for sample in samples)
        times = [sum(float(lengths[i]) ** 2 / shared[i] for i in samples) for samples in group]
        slots += max(times)
        seen.update(shared)
    if len(seen) < lengths.size:
        return None
    return slots * ranks / float((lengths.astype(float) ** 2).sum()), len(groups)


def table(shapes: Sequence[tuple[int, int]]) -> Table:
    rows = []
    for ranks, samples in ((8, 128), (8, 768), (64, 2048)):
        if (ranks, samples) not in shapes:
            continue
        for family in FAMILIES:
            lengths = draw(family, samples, seed=0)
            cap = -(-int(lengths.max()) // CAPS)
            ours = balance_step(
                lengths, num_ranks=ranks, max_tokens=cap, dynamic_cp=8,
                cost=lengths.astype(float) ** 2,
            )  # fmt: skip
            theirs = megatron(lengths, ranks, cap)
            rows.append([
                family, ranks, samples, ours.imbalance, _once(ours),
                int(ours.num_micro_batches[0]),
                *(theirs or ("fails", "")),
            ])  # fmt: skip
    return Table(
        name="dynamic_cp",
        title="Micro-batches with a CP degree of their own, beside Megatron-Core's scheduler",
        columns=(
            "lengths",
            "ranks",
            "samples",
            "wlb",
            "once a step",
            "micro-batches",
            "Megatron-Core",
            "groups",
        ),
        rows=rows,
        formats={"wlb": ".3f", "once a step": ".3f", "Megatron-Core": ".3f"},
        note=f"A rank holds a {CAPS}th of the longest sample; work is tokens^2 over the degree, "
        "the scheduler's own estimate. Its ranks run samples one by one and meet at the end of a "
        "group; ours meet in every micro-batch, which the cap limits.",
    )


def _once(balance: StepBalance) -> float:
    """Returns the largest total of a rank over the mean."""
    totals = balance.time(0).sum(1)
    return float(totals.max() / totals.mean())
