"""OpenRLHF 0.11: samples to ranks, and a rank's to micro-batches, for train.dynamic_batch_enable.

    import wlb.adapters.openrlhf
    wlb.adapters.openrlhf.install()   # in the trainer's process and in every actor

No micro-batch exceeds max_tokens_per_gpu; OpenRLHF itself only derives their number from it.
"""

import importlib
from typing import Any

from wlb.adapters.versions import require

require("openrlhf>=0.11")

import numpy as np

from wlb.adapters.swap import Swap
from wlb.balance import Cost, balance_step

BALANCING = "openrlhf.utils.seqlen_balancing"
EXPERIENCE = "openrlhf.trainer.ppo_utils.experience"
_costs: list[Cost] = ["verl"]
_caps: list[int] = [0]


def install(*, cost: Cost = "verl") -> None:
    """Make OpenRLHF balance by wlb in this process; cost: of a sample of so many tokens."""
    _costs[:] = [cost]
    _swap.install()


def uninstall() -> None:
    """Give OpenRLHF its own functions back."""
    _swap.uninstall()


def get_minimum_num_micro_batch_size(
    total_lengths: list[int],
    max_tokens_per_gpu: int,
    ring_attn_size: int,
    ds_tensor_parallel_size: int,
) -> int:
    """OpenRLHF's function of this name: as few micro-batches as hold a rank's samples.

    The limit is kept for the division that follows. UserError for a sample above it.
    """
    _caps[0] = max_tokens_per_gpu * ring_attn_size * ds_tensor_parallel_size
    step = balance_step(total_lengths, num_ranks=1, max_tokens=_caps[0], cost=_costs[0])
    return int(step.num_micro_batches[0])


def get_seqlen_balanced_partitions(
    seqlen_list: list[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """OpenRLHF's function of this name: k lists of indices of nearly equal work.

    No list has more tokens than the limit that its number was counted with. equal_size: as many in
    each, without that limit. UserError for fewer samples than lists.
    """
    total = int(sum(seqlen_list))
    step = balance_step(
        seqlen_list,
        num_ranks=k_partitions,
        max_tokens=total if equal_size or not _caps[0] else _caps[0],
        cost=_costs[0],
        equal_counts=equal_size,
        num_micro_batches=1,
    )
    return [step.samples(0, k, 0).tolist() for k in range(k_partitions)]


def balance_experiences(experiences: list[Any], args: Any) -> list[Any]:
    """OpenRLHF's function of this name: an experience for each rank.

    A rank cuts its own into optimiser steps of train.batch_size / ranks in order; so it is given
    steps of equal work and lengths one after the other. What fills no step, or not all ranks, is
    divided as one step of its own.
    """
    module = importlib.import_module(EXPERIENCE)
    items = [item for one in experiences for item in module.split_experience_batch(one)]
    size = args.actor.num_nodes * args.actor.num_gpus_per_node
    ranks = size // args.ds.ring_attn_size // args.ds.tensor_parallel_size
    lengths = np.array([int(item.total_length) for item in items], np.int64)
    steps = lengths.size // args.train.batch_size
    is_whole = steps > 0 and lengths.size % (steps * ranks) == 0
    step = balance_step(
        lengths,
        num_ranks=ranks,
        max_tokens=int(lengths.sum()),
        cost=_costs[0],
        wait="step",
        mini_batches=steps if is_whole else 1,
        equal_counts=True,
        count_slack=0 if is_whole else 1,
        num_micro_batches=1,
    )
    return [
        module.make_experience_batch(
            [items[i] for k in range(step.num_mini_batches) for i in step.samples(k, rank, 0)]
        )
        for rank in range(ranks)
    ]


_swap = Swap(
    "openrlhf",
    {
        f"{BALANCING}:get_minimum_num_micro_batch_size": get_minimum_num_micro_batch_size,
        f"{BALANCING}:get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
        f"{EXPERIENCE}:balance_experiences": balance_experiences,
    },
)
