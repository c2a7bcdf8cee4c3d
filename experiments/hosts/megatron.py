"""Compares Megatron-Core's scheduler of packed samples with ours.

`python -m experiments.hosts.megatron` needs the extra [megatron]. It runs on the CPU in one
process, because a scheduler needs no communication. Megatron-Core's scheduler and our
`BalancedScheduler` divide the same steps; our `PackedSteps` may also delay documents to a later
step.
"""

import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np

# Megatron warns that Transformer Engine and Apex are missing.
warnings.simplefilter("ignore", UserWarning)

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from experiments.harness.pages import show
from experiments.hosts.common import (
    ACCUMULATION,
    COST,
    NUM_RANKS,
    WINDOW,
    Document,
    Row,
    Step,
    Tokens,
    documents_of,
    ledger,
    row_of,
    rows_of,
    shifted,
    split_at_restarts,
    stores,
    table_of,
    trained_losses,
    work_ns,
)
from wlb import Planner, TokenStore
from wlb.adapters.megatron import BalancedScheduler, PackedSteps
from wlb.data.reader import StoreReader
from wlb.plan import IGNORE, IntArray

LIBRARY = "Megatron-Core"


class _Ranks:
    """A fake process group with the one method that a scheduler calls."""

    def size(self) -> int:
        return NUM_RANKS


def batches(rows: list[Tokens]) -> Iterator[list[tuple[int, int]]]:
    """Yields the samples of each step as (row, number of tokens).

    Rows come in random order. A step ends as soon as it has N windows of tokens.
    """
    step: list[tuple[int, int]] = []
    for i in np.random.default_rng(0).permutation(len(rows)).tolist():
        step.append((i, len(rows[i])))
        if sum(n for _, n in step) >= NUM_RANKS * ACCUMULATION * WINDOW:
            yield step
            step = []
    if step:
        yield step


def scheduled(
    rows: list[Tokens], scheduler: BalancedCPScheduler | BalancedScheduler
) -> tuple[list[Step], IntArray]:
    """Returns the steps that a scheduler makes of the samples, and the work of each rank.

    Megatron's scheduler may let several ranks share a sample (context parallelism). Then each rank
    has an equal part of its work, and the first of them is listed with the sample.
    """
    out: list[Step] = []
    work = np.zeros((0, NUM_RANKS), np.int64)
    for samples in batches(rows):
        _, groups = scheduler.get_groups_and_subsamples(samples, ModelParallelConfig())
        step: list[list[list[Document]]] = [[] for _ in range(NUM_RANKS)]
        work = np.append(work, np.zeros((1, NUM_RANKS), np.int64), 0)
        for group in groups:
            num_ranks = Counter(i for ids in group for i in ids)
            listed: set[int] = set()
            for rank, ids in enumerate(group):
                step[rank].append([shifted(rows[i]) for i in ids if i not in listed])
                listed.update(ids)
                for i in ids:
                    work[-1, rank] += int(COST.workload_ns([len(rows[i])])[0]) // num_ranks[i]
        out.append(step)
    return out, work


def planned(prefix: str, lengths: list[int]) -> list[Step]:
    """Returns the steps that `PackedSteps` makes for all ranks."""
    ranks: list[list[list[list[Document]]]] = []
    for rank in range(NUM_RANKS):
        planner = Planner.for_lengths(
            lengths,
            context_window=WINDOW,
            num_micro_batches=NUM_RANKS * ACCUMULATION,
            dp=NUM_RANKS,
            cost=COST,
            shuffle=True,
        )
        steps = PackedSteps(planner, StoreReader(prefix, 1 << 30), dp_rank=rank)
        ranks.append([])
        while True:
            try:
                made, *_ = steps.next()
            except StopIteration:
                break
            ranks[-1].append([_documents(batch) for batch in made])
    return [list(step) for step in zip(*ranks, strict=True)]


def _documents(batch: dict) -> list[Document]:
    """Returns the documents of a packed (THD) batch without padding."""
    trained = batch["loss_mask"][0].bool()
    labels = batch["labels"][0].masked_fill(~trained, IGNORE)
    tokens, positions = batch["tokens"][0].tolist(), batch["position_ids"][0].tolist()
    return split_at_restarts(tokens, labels.tolist(), positions)


def compare(seeds: int = 1) -> list[Row]:
    """Returns the table's rows for Megatron-Core's scheduler and ours."""
    found = stores()
    rows, whole = rows_of(found.train), documents_of(found.train)
    heldout = rows_of(found.heldout)
    lengths = TokenStore(found.train).lengths.tolist()
    ours = BalancedScheduler(dp=NUM_RANKS, max_tokens=WINDOW * 3 // 2, cost=COST)
    steps = planned(found.train, lengths)
    ways = (
        ("its BalancedCPScheduler", *scheduled(rows, BalancedCPScheduler(WINDOW, _Ranks())), rows),
        ("BalancedScheduler of wlb", *scheduled(rows, ours), rows),
        ("PackedSteps of wlb", steps, work_ns(steps), whole),
    )
    return [
        row_of(
            LIBRARY,
            how,
            steps,
            ledger(map(shifted, of)),
            trained_losses(steps, heldout, seeds=seeds),
            work,
        )
        for how, steps, work, of in ways
    ]


if __name__ == "__main__":
    show(table_of(compare()))
