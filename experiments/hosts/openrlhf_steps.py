"""Trains on two processes with OpenRLHF, whose samples wlb divides into micro-batches.

`python -m experiments.hosts.openrlhf_steps` needs openrlhf >= 0.11; 0.11.2 was tested.
"""

import numpy as np
import torch
import torch.distributed as dist

from experiments.hosts.common import TinyTrainer, in_two_processes
from wlb import balance_step
from wlb.adapters.rl.swap import Swap

PLACE = "openrlhf.utils.seqlen_balancing:get_seqlen_balanced_partitions"
LIMIT = 256  # train.max_tokens_per_gpu


def balanced_partitions(
    seqlen_list: list[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Divides a rank's samples into k lists of nearly equal work and at most LIMIT tokens.

    It replaces `get_seqlen_balanced_partitions` of OpenRLHF.
    """
    how = {"max_tokens": LIMIT, "cost": "verl", "equal_counts": equal_size, "num_micro_batches": 1}
    step = balance_step(seqlen_list, num_ranks=k_partitions, **how)
    return [step.samples(0, k, 0).tolist() for k in range(k_partitions)]


def train(rank: int) -> None:
    from openrlhf.utils import seqlen_balancing as theirs

    Swap("openrlhf", {PLACE: balanced_partitions}).install()
    rng, trainer = np.random.default_rng(rank), TinyTrainer()
    for step in range(4):
        lengths = rng.integers(4, 100, 24).tolist()
        # All ranks need equally many micro-batches. One more than the tokens fill leaves slack for
        # balancing.
        num = torch.tensor(sum(lengths) // LIMIT + 2)
        dist.all_reduce(num, dist.ReduceOp.MAX)
        parts = theirs.get_seqlen_balanced_partitions(lengths, int(num), False)
        loss = trainer.step(lengths, parts)
        print(f"step {step}, rank {rank}: {len(parts)} micro-batches, {loss:.3f}")


if __name__ == "__main__":
    in_two_processes(train)
