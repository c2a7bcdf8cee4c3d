"""Trains two processes on OpenRLHF's micro-batches, cut by wlb (>= 0.11; 0.11.2 was run)."""

import numpy as np
import torch
import torch.distributed as dist

from experiments.hosts.common import TinyTrainer, in_two_processes


def train(rank: int) -> None:
    from openrlhf.utils import seqlen_balancing

    import wlb.adapters.openrlhf

    wlb.adapters.openrlhf.install()
    rng, trainer = np.random.default_rng(rank), TinyTrainer()
    for step in range(4):
        lengths = rng.integers(4, 100, 24).tolist()
        # As the replay buffer does: the most that a rank needs, then so many of each.
        num = torch.tensor(seqlen_balancing.get_minimum_num_micro_batch_size(lengths, 256, 1, 1))
        dist.all_reduce(num, dist.ReduceOp.MAX)
        parts = seqlen_balancing.get_seqlen_balanced_partitions(lengths, int(num), False)
        loss = trainer.step(lengths, parts)
        print(f"step {step}, rank {rank}: {len(parts)} micro-batches, {loss:.3f}")


if __name__ == "__main__":
    in_two_processes(train)
