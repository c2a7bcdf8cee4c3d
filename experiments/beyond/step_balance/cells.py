"""Measures cells of the comparison: one drawn or given step, divided by wlb and by every peer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from experiments.beyond.step_balance.peers import Division, Peer
from wlb import StepBalance, balance_step
from wlb.plan import FloatArray, IntArray

SHAPES = ((8, 128), (8, 768), (8, 2048), (64, 2048), (64, 8192))
"""(ranks, samples)."""
MINI_BATCHES = 4
CALLS = 3

ANY_COUNTS = "wlb, any counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Describes one division of a step.

    wait: slowest rank of every micro-batch over the mean rank, with the same prices for all
    step: the same where ranks wait once a step
    micro_batches: of a rank, the most
    over: micro-batches above the cap
    ms: CPU time of the call; other work on the machine does not count
    """

    wait: float
    step: float
    micro_batches: int
    over: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Describes a step and how it was divided.

    lengths_of: the family or file
    bound: of the wait, for any division with this cap
    scores: by name, "wlb" and the peers
    """

    lengths_of: str
    ranks: int
    samples: int
    caps: int
    bound: float
    scores: dict[str, Score]


def work(lengths: IntArray) -> FloatArray:
    """Returns verl's workload of a 7B model: what all divisions are judged by."""
    return 24576.0 * lengths + lengths.astype(np.float64) ** 2


def cell(
    name: str,
    lengths: IntArray,
    ranks: int,
    caps: int,
    peers: Sequence[Peer],
    *,
    mini_batches: int = 1,
) -> Cell:
    """Returns all divisions; caps: the cap in lengths of the longest sample.

    With mini-batches, ours hold equal counts on every rank, as verl's do, and once more any counts,
    as slime's do.
    """
    cap = int(lengths.max()) * caps
    balance, ms = timed(lengths, ranks, cap, mini_batches, equal_counts=mini_batches > 1)
    scores = {"wlb": score(_divisions(balance), lengths, cap, ms)}
    if mini_batches > 1:
        free, ms = timed(lengths, ranks, cap, mini_batches)
        scores[ANY_COUNTS] = score(_divisions(free), lengths, cap, ms)
    listed = lengths.tolist()
    for peer in peers:
        begin = time.process_time()
        if mini_batches == 1:
            divided = [peer.divide(listed, ranks, cap)]
        elif peer.into_mini_batches is not None:
            divided = peer.into_mini_batches(listed, ranks, cap, mini_batches)
        else:
            continue
        scores[peer.name] = score(divided, lengths, cap, 1e3 * (time.process_time() - begin))
    return Cell(
        lengths_of=name, ranks=ranks, samples=lengths.size, caps=caps, bound=balance.lower_bound,
        scores=scores,
    )  # fmt: skip


def _divisions(balance: StepBalance) -> list[Division]:
    num, ranks = balance.num_mini_batches, range(balance.num_ranks)
    return [[[s.tolist() for s in balance.of_rank(r, k)] for r in ranks] for k in range(num)]


def timed(
    lengths: IntArray,
    ranks: int,
    cap: int,
    mini_batches: int,
    *,
    wait: str = "micro_batch",
    equal_counts: bool = False,
) -> tuple[StepBalance, float]:
    """Returns our division and the median CPU time of CALLS calls, in ms."""
    times = []
    for _ in range(CALLS):
        begin = time.process_time()
        balance = balance_step(
            lengths, num_ranks=ranks, max_tokens=cap, cost="verl", wait=wait,
            mini_batches=mini_batches, equal_counts=equal_counts,
        )  # fmt: skip
        times.append(1e3 * (time.process_time() - begin))
    return balance, median(times)


def score(steps: Sequence[Division], lengths: IntArray, cap: int, ms: float) -> Score:
    """Judges a division into optimiser steps; ValueError if it loses or repeats a sample."""
    cost = work(lengths)
    seen = np.sort(np.concatenate([x for d in steps for rank in d for x in rank if len(x)]))
    if not np.array_equal(seen, np.arange(lengths.size)):
        raise ValueError(f"{lengths.size} samples became {seen.size}")
    slots = total = 0.0
    most = over = 0
    for division in steps:
        num = max(map(len, division))
        loads = np.zeros((len(division), num))
        for rank, micro_batches in enumerate(division):
            for m, samples in enumerate(micro_batches):
                loads[rank, m] = cost[samples].sum() if len(samples) else 0.0
                over += bool(len(samples) and lengths[samples].sum() > cap)
        slots += float(loads.max(0).sum())
        total += float(loads.sum(1).max())
        most = max(most, num)
    mean = float(cost.sum()) / len(steps[0])
    return Score(wait=slots / mean, step=total / mean, micro_batches=most, over=over, ms=ms)
