"""Provides invented results of the convergence study."""

from dataclasses import replace
from typing import Any

from experiments.paper.fig16.arms import ARMS
from experiments.paper.fig16.bookkeeping import Bookkeeping
from experiments.paper.fig16.outcome import Result
from wlb.packing import PackingSummary


def books(**values: Any) -> Bookkeeping:
    names = PackingSummary.__dataclass_fields__
    summary = PackingSummary(**{n: "x" if n in ("label", "policy") else 1 for n in names})
    made = Bookkeeping(
        summary=summary,
        num_steps=100,
        num_labels=900,
        class_labels=(300, 300, 200, 100),
        class_weights=(1.05, 1.02, 0.95, 0.9),
    )
    return replace(made, **values)


def result(loss: float, **values: Any) -> Result:
    made = Result(
        curve=((0, 7.0), (1_900_000, loss + 0.2), (2_100_000, loss + 0.1), (2_500_000, loss)),
        num_steps=100,
        num_tokens=2_500_000,
        num_labels=900,
        trained=((1_000_000, loss + 0.5), (2_500_000, loss + 0.1)),
        norm_mean=0.5,
        norm_std=0.1,
        class_losses=(loss, loss - 0.1, loss - 0.2, None),
        made_by=1,
        commit="abc",
    )
    return replace(made, **values)


def found(seeds: int = 3) -> dict[tuple[str, int], Result]:
    """Returns runs in which the loss of arm i is (0.01 + 0.001 seed) i above the first arm's."""
    return {
        (arm.name, seed): result(3.0 + 0.1 * seed + (0.01 + 0.001 * seed) * i)
        for seed in range(seeds)
        for i, arm in enumerate(ARMS)
    }


def all_books(seeds: int = 3) -> dict[tuple[str, int], Bookkeeping]:
    return {(arm.packing, seed): books() for seed in range(seeds) for arm in ARMS}
