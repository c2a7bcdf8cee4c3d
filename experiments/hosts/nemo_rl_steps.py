"""Trains on two processes with a NeMo-RL sequence packer that is made by wlb.

`python -m experiments.hosts.nemo_rl_steps` needs nemo-rl >= 0.6; commit 7ea279a was tested. Leave
`positive_example_nll_weight` at 0, because that loss depends on how a packer divides a step.
"""

import numpy as np

from experiments.hosts.common import TinyTrainer, in_two_processes
from wlb import balance_step


def balanced_bins(lengths: list[int], *, capacity: int, ranks: int) -> list[list[int]]:
    """Packs samples into bins of nearly equal work, in the order in which NeMo-RL assigns them.

    NeMo-RL gives the bins to ranks in turn. So the first micro-batch of every rank comes first,
    then the second of every rank, and so on.
    """
    step = balance_step(lengths, num_ranks=ranks, max_tokens=capacity, cost="verl")
    num = int(step.num_micro_batches[0])
    return [step.samples(0, r, m).tolist() for m in range(num) for r in range(ranks)]


def train(rank: int) -> None:
    from nemo_rl.data.packing import algorithms

    class Balanced(algorithms.SequencePacker):
        def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
            return balanced_bins(sequence_lengths, capacity=self.bin_capacity, ranks=2)

    packer = Balanced(256, min_bin_count=2, bin_count_multiple=2)
    rng, trainer = np.random.default_rng(0), TinyTrainer()
    for step in range(4):
        lengths = rng.integers(4, 100, 48).tolist()
        bins = packer.pack(lengths)[rank::2]  # as NeMo-RL's shard_by_batch_size assigns them
        places = iter(range(sum(map(len, bins))))
        micro_batches = [[next(places) for _ in one] for one in bins]
        loss = trainer.step([lengths[i] for one in bins for i in one], micro_batches)
        print(f"step {step}, rank {rank}: {len(bins)} micro-batches, {loss:.3f}")


if __name__ == "__main__":
    in_two_processes(train)
