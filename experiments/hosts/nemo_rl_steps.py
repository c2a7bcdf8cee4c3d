"""Trains two processes on bins of NeMo-RL's packer "wlb" (nemo-rl >= 0.6; 7ea279a was run)."""

import numpy as np

from experiments.hosts.common import TinyTrainer, in_two_processes


def train(rank: int) -> None:
    from nemo_rl.data.packing import algorithms

    import wlb.adapters.nemo_rl

    wlb.adapters.nemo_rl.install(cost="verl")
    packer = algorithms.get_packer("wlb", 256, min_bin_count=2, bin_count_multiple=2)
    rng, trainer = np.random.default_rng(0), TinyTrainer()
    for step in range(4):
        lengths = rng.integers(4, 100, 48).tolist()
        bins = packer.pack(lengths)[rank::2]  # as shard_by_batch_size deals them
        samples = [sample for one in bins for sample in one]
        places = iter(range(len(samples)))
        micro_batches = [[next(places) for _ in one] for one in bins]
        loss = trainer.step([lengths[i] for i in samples], micro_batches)
        print(f"step {step}, rank {rank}: {len(bins)} micro-batches, {loss:.3f}")


if __name__ == "__main__":
    in_two_processes(train)
