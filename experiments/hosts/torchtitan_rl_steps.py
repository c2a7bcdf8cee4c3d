"""Trains on two processes with torchtitan's RL batcher, whose samples wlb divides.

`python -m experiments.hosts.torchtitan_rl_steps` was tested with torchtitan 0.3.0 and b5bcd76.
"""

import numpy as np
import torch
import torch.distributed as dist

from experiments.hosts.common import in_two_processes, torchtitan_rl_without_vllm


def train(rank: int) -> None:
    torchtitan_rl_without_vllm()  # a real run has vLLM and needs no such call
    from torchtitan.experiments.rl import types
    from torchtitan.experiments.rl.components.batcher import BatchConfig

    from wlb.adapters.rl.torchtitan import BalancedBatcher

    config = BalancedBatcher.Config(batch=BatchConfig(local_batch_size=1, seq_len=256))
    batcher = config.build(num_prompts_per_train_step=12, dp_degree=2, pad_id=0)
    rng, old = np.random.default_rng(0), {"min_policy_version": 0, "max_policy_version": 0}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for g in range(4 * 12):  # prompts, with four answers each
        old["rollout_id"], turns = types.RolloutTurnID(g, 0, 0), []
        for ids in [[i % 8 for i in range(n)] for n in rng.integers(4, 100, 4)]:
            row = dict.fromkeys(("loss_mask", "logprobs", "advantage"), [1.0] * len(ids))
            turns.append(types.TrainingSample(token_ids=ids, **row, **old))
        group = types.TrainingSampleGroup(group_id=g, training_samples=turns, metrics=[])
        if batch := batcher.add_training_samples(training_sample_group=group):
            # Both ranks have equally many micro-batches.
            for mine in [slot[rank] for slot in batch.microbatches]:
                logits, labels = model(mine.token_ids.flatten()), mine.labels.flatten()
                loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
                (loss @ mine.loss_mask.flatten().float() / batch.num_global_valid_tokens).backward()
            _ = [dist.all_reduce(weight.grad) for weight in model.parameters()]
            optimizer.step(), optimizer.zero_grad()
            print(f"step {g // 12}, rank {rank}: {len(batch.microbatches)} micro-batches")


if __name__ == "__main__":
    in_two_processes(train)
