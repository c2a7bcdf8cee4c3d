"""Measures the cells of the comparison: one step, divided by wlb and by every other framework.

A step is a list of sample lengths. To divide it is to assign its samples to ranks and
micro-batches.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from experiments.beyond.step_balance.peers import Division, Peer
from wlb import StepBalance, balance_step
from wlb.plan import FloatArray, IntArray

SHAPES = ((8, 128), (8, 768), (8, 2048), (64, 2048), (64, 8192))
"""(ranks, samples) of the steps."""
MINI_BATCHES = 4
CALLS = 3
"""Calls that are timed; the median counts."""

ANY_COUNTS = "wlb, any counts"
"""Division by wlb in which ranks may have unequally many samples of a mini-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good one division of a step is. All divisions are priced alike."""

    # Time of the step over the mean rank's, if ranks wait for each other after every micro-batch.
    wait: float
    step: float  # the same if ranks wait for each other once per step
    micro_batches: int  # most micro-batches of a rank
    over: int  # number of micro-batches above the cap on tokens
    ms: float  # CPU time of the call, so that other work on the machine does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A step and the scores of its divisions."""

    lengths_of: str  # family or file of the lengths
    ranks: int
    samples: int
    caps: int  # cap on the tokens of a micro-batch, in lengths of the longest sample
    bound: float  # lower bound of `Score.wait` for any division with this cap
    scores: dict[str, Score]  # by name: "wlb" and the other frameworks


def work(lengths: IntArray) -> FloatArray:
    """Returns the work of samples by verl's model of a 7B LLaMA, which prices all divisions."""
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
    """Divides a step with wlb and all peers and returns the scores.

    With several mini-batches, wlb divides twice: with equally many samples on every rank, as verl
    does, and with any numbers, as slime does.

    Args:
        name: Family or file of the lengths.
        lengths: Tokens of each sample.
        ranks: Data-parallel ranks.
        caps: Cap on the tokens of a micro-batch, in lengths of the longest sample.
        peers: The other frameworks.
        mini_batches: Optimiser steps that the samples are divided into.
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
    """Returns wlb's division and the median CPU time of CALLS calls in ms."""
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
    """Returns the score of a division.

    Args:
        steps: The division of each optimiser step.
        lengths: Tokens of each sample.
        cap: Cap on the tokens of a micro-batch.
        ms: CPU time of the call.

    Raises:
        ValueError: If a sample is missing or occurs twice.
    """
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
