"""Bounds what any policy could do on a few steps, by an integer program that knows all of them.

Documents of at least a fifth of a window are placed whole in a step and a micro-batch; all shorter
ones are a fluid in three classes, which can only help. The program minimises, summed over steps,
(slowest micro-batch - mean) of the worse of forward and forward + backward, in typical
micro-batches, and `price` times the global batches that are held after each step. `bounded` is
scored the same way on the same windows, each from an empty start. The solver's bound is therefore
below the score of every policy. Steps take `LEAST` global batches in both.
"""

# PuLP ships no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.beyond.robust_packing.cases import CAPS, COST, loads
from experiments.harness.streams import WINDOW
from wlb.cost.flops import FloatArray
from wlb.packing import Packer
from wlb.packing.ilp.solvers import Solver, SolverLimits, modeller, run
from wlb.packing.release import LEAST
from wlb.plan import GlobalBatch, IntArray

N = 4
SMALLEST = WINDOW // 5
CLASSES = (0, WINDOW // 32, WINDOW // 10, SMALLEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Per step: wait in typical micro-batches, and global batches held (a mean delay in steps)."""

    wait: float
    held: float


def both(lengths: IntArray) -> FloatArray:
    """Returns forward and forward + backward of each document, shape [2, n]."""
    return np.stack([COST.forward_latency_ns(lengths), COST.workload_ns(lengths)]).astype(float)


def typical(window: list[GlobalBatch]) -> FloatArray:
    """Returns forward and forward + backward of a mean micro-batch."""
    total = sum(both(batch.documents.length).sum(1) for batch in window)
    return np.asarray(total) / (len(window) * N)


def online(packer: Packer, window: list[GlobalBatch]) -> Score:
    carry, wait, held, mean = packer.start(), 0.0, 0, typical(window)
    for batch in window:
        plans, carry = packer.push(batch, carry)
        held += carry.num_tokens
        for plan in plans:
            load = np.stack([loads(plan, work) for work in both(plan.pieces.length)])
            wait += float(((load.max(1) - load.mean(1)) / mean).max())
    return Score(wait=wait / len(window), held=held / (N * WINDOW) / len(window))


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A document, or a class of short ones that came together; work: [2], in typical ones."""

    arrival: int
    tokens: int
    work: FloatArray
    is_whole: bool


def items_of(window: list[GlobalBatch]) -> list[Item]:
    mean, out = typical(window), list[Item]()
    for arrival, batch in enumerate(window):
        length = batch.documents.length
        for document in length[length >= SMALLEST]:
            work = both(np.array([document]))[:, 0] / mean
            out.append(Item(arrival=arrival, tokens=int(document), work=work, is_whole=True))
        for low, high in pairwise(CLASSES):
            some = length[(length >= low) & (length < high)]
            if some.size:
                work = both(some).sum(1) / mean
                out.append(Item(arrival=arrival, tokens=int(some.sum()), work=work, is_whole=False))
    return out


def offline(window: list[GlobalBatch], price: float, *, time_limit_s: float) -> tuple[Score, float]:
    """Returns the best plan found, and per step a bound on wait + price * held of every plan."""
    pulp: Any = modeller()
    items, steps = items_of(window), range(len(window))
    problem = pulp.LpProblem("offline", pulp.LpMinimize)
    level = [pulp.LpVariable(f"level_{s}", 0) for s in steps]
    part: dict[tuple[int, int, int], Any] = {
        (i, s, j): pulp.LpVariable(
            f"x_{i}_{s}_{j}", 0, 1, pulp.LpBinary if item.is_whole else pulp.LpContinuous
        )
        for i, item in enumerate(items)
        for s in steps[item.arrival :]
        for j in range(N)
    }
    batches = [item.tokens / (N * WINDOW) for item in items]
    all_held = sum(
        tokens * (len(window) - item.arrival) for item, tokens in zip(items, batches, strict=True)
    )
    saved = pulp.lpSum(batches[i] * (len(window) - s) * x for (i, s, _), x in part.items())
    problem += pulp.lpSum(level) - price * saved
    for i, item in enumerate(items):
        own = [part[i, s, j] for s in steps[item.arrival :] for j in range(N)]
        problem += pulp.lpSum(own) <= 1
    for s in steps:
        of_step = {key: x for key, x in part.items() if key[1] == s}
        tokens = pulp.lpSum(batches[i] * x for (i, _, _), x in of_step.items())
        problem += tokens <= CAPS[0].step_tokens
        problem += tokens >= LEAST
        for j in range(N):
            mine = {i: x for (i, _, at), x in of_step.items() if at == j}
            most = CAPS[0].s_max / N
            problem += pulp.lpSum(batches[i] * x for i, x in mine.items()) <= most
            for k in (0, 1):
                load = pulp.lpSum(items[i].work[k] * x for i, x in mine.items())
                mean = pulp.lpSum(items[i].work[k] / N * x for (i, _, _), x in of_step.items())
                problem += load - mean <= level[s]
    limits = SolverLimits(time_limit_s=time_limit_s, gap=0.002)
    bound = run(problem, Solver.HIGHS, limits).bound
    wait = sum(x.varValue for x in level) / len(window)
    held = (all_held - pulp.value(saved)) / len(window)
    return Score(wait=wait, held=held), (bound + price * all_held) / len(window)
