"""Trains on two processes with AReaL, whose samples wlb divides into micro-batches.

`python -m experiments.hosts.areal_steps` needs areal >= 1.0; 1.0.4 was tested.
"""

from argparse import Namespace
from typing import Any

import numpy as np
import torch.distributed as dist

from experiments.hosts.common import TinyTrainer, in_two_processes
from wlb.adapters.rl.own_ranks import Cut, cut
from wlb.adapters.rl.swap import Swap

PLACE = "areal.utils.data:allocate_balanced_mbs_synced"


def allocate_balanced_mbs_synced(mb_spec: Any, lens: Any, group: Any = None) -> list[list[int]]:
    """Replaces AReaL's function of this name.

    Returns:
        Indices of the samples of each micro-batch. All ranks get equally many micro-batches.
    """
    least, multiple = mb_spec.n_mbs or 1, mb_spec.n_mbs_divisor or 1
    how = Cut(max_tokens=int(mb_spec.max_tokens_per_mb), at_least=least, multiple=multiple)
    return cut(lens, how, group)


def train(rank: int) -> None:
    from areal.utils import data

    Swap("areal", {PLACE: allocate_balanced_mbs_synced}).install()
    spec = Namespace(max_tokens_per_mb=256, n_mbs=1, n_mbs_divisor=1)
    rng, trainer = np.random.default_rng(rank), TinyTrainer()
    for step in range(4):
        lengths = rng.integers(4, 100, 24).tolist()
        parts = data.allocate_balanced_mbs_synced(spec, lengths, dist.group.WORLD)
        loss = trainer.step(lengths, parts)
        print(f"step {step}, rank {rank}: {len(parts)} micro-batches, {loss:.3f}")


if __name__ == "__main__":
    in_two_processes(train)
