"""Prints digests of plans that all hosts of a run must compute equally, as this CPU computes them.

A test runs it with different CPU instruction sets and compares the digests.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.planner.test_compose import fingerprint, planner
from tests.sharding.test_by_need import h100
from wlb.balance import balance_step
from wlb.data import lengths_of_family
from wlb.plan import IntArray, digest
from wlb.sharding import NAMES, shard
from wlb.sharding.by_need import _PlanMaker  # pyright: ignore[reportPrivateUsage]

POLICIES = ("original", "fixed", "var_len", "bounded", "capacity")


def _pieces() -> list[IntArray]:
    drawn = lengths_of_family(window=131072, num_documents=240, seed=0).lengths
    return np.array_split(drawn, 8)


def _shardings() -> Iterator[int]:
    for tp, cp in ((1, 16), (8, 8)):
        cost = h100(tp, cp)
        for pieces in _pieces():
            for name in NAMES:
                for exchange in ("gather", "needed"):
                    plan = shard(pieces, cp=cp, strategy=name, cost=cost, exchange=exchange)
                    yield plan.digest()


def _corrections() -> Iterator[int]:
    """Yields digests of the shares of work by which `by_need` corrects a plan.

    A difference in the last bit of a share rarely changes a plan, so digests of plans would not
    show it.
    """
    cost = h100(1, 16)
    for pieces in _pieces():
        made = _PlanMaker(pieces, 16, cost)
        scale = made._corrected(np.ones(16), shard(pieces, cp=16, strategy="balanced", cost=cost))
        yield digest(scale.view(np.int64))


def _balances() -> Iterator[int]:
    drawn = np.concatenate(_pieces()).clip(1, 30_000)
    cost = drawn * 3e-4 + (drawn / 7.0) * drawn
    several: list[dict[str, Any]] = [{}, {"dynamic_cp": 4}, {"wait": "step"}, {"mini_batches": 2}]
    for options in several:
        made = balance_step(drawn, num_ranks=8, max_tokens=32_768, cost=cost, **options)
        for k in range(made.num_mini_batches):
            yield digest(*(samples for rank in range(8) for samples in made.of_rank(rank, k)))


def _steps() -> Iterator[int]:
    for policy in POLICIES:
        made = planner(policy=policy)
        for plan in made.steps():
            yield digest(*fingerprint(made, plan))


if __name__ == "__main__":
    kinds = (_shardings, _corrections, _balances, _steps)
    sys.stdout.write(json.dumps({kind.__name__: list(kind()) for kind in kinds}))
