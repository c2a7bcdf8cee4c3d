"""Counts optimiser steps of an epoch by method, beside the paper's Tables 4 to 6."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.paper.packing_methods.counting import OURS, Count, Method, count
from experiments.paper.packing_methods.lengths import DATASETS
from experiments.paper.packing_methods.paper import StepsRow, steps_rows
from wlb.plan import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Holds a method at (bs, msl, gas), counted over several shuffles of one data set.

    paper: the paper's row, None for a method that it does not have
    counts: one count per shuffle
    """

    dataset: str
    method: Method
    bs: int
    msl: int
    gas: int
    paper: StepsRow | None
    counts: tuple[Count, ...]

    @property
    def steps(self) -> tuple[int, int, int]:
        """Returns least, median (of an even number the lower one) and most over the shuffles."""
        rising = sorted(made.steps(self.gas) for made in self.counts)
        return rising[0], rising[(len(rising) - 1) // 2], rising[-1]

    @property
    def difference(self) -> float | None:
        """Returns the median over the paper's, minus 1."""
        return self.steps[1] / self.paper.steps - 1 if self.paper else None

    def mean(self, name: str) -> float:
        """Returns the mean over the shuffles of a number of `Count`."""
        return float(np.mean([getattr(made, name) for made in self.counts]))

    @property
    def after_last_step(self) -> float:
        """Returns the micro-batches that belong to no whole step."""
        return float(
            np.mean([made.micro_batches - self.gas * made.steps(self.gas) for made in self.counts])
        )


def step_counts(seeds: range, *, printed: Iterable[StepsRow] | None = None) -> list[StepCounts]:
    """Returns Tables 4 to 6 in order; ours follow the paper's Multipack of the same layout."""
    out: list[StepCounts] = []
    for row in steps_rows() if printed is None else printed:
        method = Method(row.method)
        for added in (method, *(OURS if method == Method.MULTIPACK else ())):
            # Only the order of GroupByLength depends on gas (gradient accumulation steps), so other
            # methods are counted with gas = 1 and share the count.
            gas = row.gas if added == Method.GROUPED_PADDING else 1
            made = tuple(_count(row.dataset, added, row.bs, row.msl, gas, seed) for seed in seeds)
            out.append(
                StepCounts(
                    dataset=row.dataset,
                    method=added,
                    bs=row.bs,
                    msl=row.msl,
                    gas=row.gas,
                    paper=row if added == method else None,
                    counts=made,
                )
            )
    return out


@cache
def _lengths(dataset: str) -> IntArray:
    return DATASETS[dataset].lengths()


@cache
def _count(dataset: str, method: Method, bs: int, msl: int, gas: int, seed: int) -> Count:
    return count(method, _lengths(dataset), bs=bs, msl=msl, gas=gas, seed=seed)
