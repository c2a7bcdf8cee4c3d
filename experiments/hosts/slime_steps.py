"""Trains on two processes by slime's data-parallel schedule, which wlb makes.

`python -m experiments.hosts.slime_steps` needs slime >= 0.3; commit 624b824 was tested.
"""

from argparse import Namespace

import numpy as np

from experiments.hosts.common import TinyTrainer, in_two_processes


def train(rank: int) -> None:
    from slime.utils import dp_schedule

    import wlb.adapters.rl.slime

    wlb.adapters.rl.slime.install(cost="verl")
    args = Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=256)
    layout = {
        "dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1,
    }  # fmt: skip
    rng, trainer = np.random.default_rng(0), TinyTrainer()
    for step in range(4):
        lengths = rng.integers(4, 100, 48).tolist()
        samples, micro_batches, *_ = dp_schedule.build_dp_schedule(
            args, layout, lengths, global_batch_size=48, rollout_indices=list(range(48))
        )
        mine = [lengths[i] for i in samples[rank]]
        loss = trainer.step(mine, micro_batches[rank])
        print(f"step {step}, rank {rank}: {len(micro_batches[rank])} micro-batches, {loss:.3f}")


if __name__ == "__main__":
    in_two_processes(train)
