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
    """Counts of a method at (bs, msl, gas) over several shuffles of a data set."""

    dataset: str
    method: Method
    bs: int  # rows of a micro-batch
    msl: int  # tokens of a row
    gas: int  # micro-batches of an optimiser step
    paper: StepsRow | None  # the paper's row; None for methods that it does not have
    counts: tuple[Count, ...]  # one count per shuffle

    @property
    def steps(self) -> tuple[int, int, int]:
        """Returns the least, median and most steps over the shuffles.

        The median of an even number of shuffles is the lower middle value.
        """
        rising = sorted(made.steps(self.gas) for made in self.counts)
        return rising[0], rising[(len(rising) - 1) // 2], rising[-1]

    @property
    def difference(self) -> float | None:
        """Returns our median number of steps over the paper's, minus 1."""
        return self.steps[1] / self.paper.steps - 1 if self.paper else None

    def mean(self, name: str) -> float:
        """Returns a field or property of `Count` as a mean over the shuffles."""
        return float(np.mean([getattr(made, name) for made in self.counts]))

    @property
    def after_last_step(self) -> float:
        """Returns the number of micro-batches that belong to no complete step."""
        return float(
            np.mean([made.micro_batches - self.gas * made.steps(self.gas) for made in self.counts])
        )


def step_counts(seeds: range, *, printed: Iterable[StepsRow] | None = None) -> list[StepCounts]:
    """Counts the rows of Tables 4 to 6 in order.

    The methods that the paper does not have come after its Multipack with the same (bs, msl, gas).

    Args:
        seeds: Seeds of the shuffles.
        printed: Rows of the paper to count. Defaults to all.
    """
    out: list[StepCounts] = []
    for row in steps_rows() if printed is None else printed:
        method = Method(row.method)
        for added in (method, *(OURS if method == Method.MULTIPACK else ())):
            # Only GroupByLength depends on gas (gradient accumulation steps). Other methods are
            # counted with gas = 1, so that the cached count serves all their rows.
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
