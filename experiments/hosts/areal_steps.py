"""Trains two processes on AReaL's micro-batches, cut by wlb (areal >= 1.0; 1.0.4 was run)."""

from argparse import Namespace

import numpy as np
import torch.distributed as dist

from experiments.hosts.common import TinyTrainer, in_two_processes


def train(rank: int) -> None:
    from areal.utils import data

    import wlb.adapters.areal

    wlb.adapters.areal.install()
    spec = Namespace(max_tokens_per_mb=256, n_mbs=1, n_mbs_divisor=1)
    rng, trainer = np.random.default_rng(rank), TinyTrainer()
    for step in range(4):
        lengths = rng.integers(4, 100, 24).tolist()
        parts = data.allocate_balanced_mbs_synced(spec, lengths, dist.group.WORLD)
        loss = trainer.step(lengths, parts)
        print(f"step {step}, rank {rank}: {len(parts)} micro-batches, {loss:.3f}")


if __name__ == "__main__":
    in_two_processes(train)
