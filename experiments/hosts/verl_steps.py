"""Trains on two processes with verl, whose samples wlb divides into micro-batches.

`python -m experiments.hosts.verl_steps` needs verl >= 0.9; 0.9.1 was tested.
"""

import torch
import torch.distributed as dist
from tensordict import TensorDict

from experiments.hosts.common import in_two_processes

SAMPLES, CAP = 24, 256


def train(rank: int) -> None:
    from verl.utils import seqlen_balancing

    import wlb.adapters.rl.verl

    wlb.adapters.rl.verl.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    rng = torch.Generator().manual_seed(1 + rank)
    for step in range(4):
        mask = (torch.arange(100) < torch.randint(4, 100, (SAMPLES, 1), generator=rng)).long()
        ids = torch.randint(0, 8, mask.shape, generator=rng)
        batch = TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=SAMPLES)
        parts, _ = seqlen_balancing.rearrange_micro_batches(batch, CAP, dp_group=dist.group.WORLD)
        dist.all_reduce(tokens := mask.sum())
        for part in parts:  # equally many on both ranks, with at most CAP tokens each
            logits = model(part["input_ids"]).transpose(1, 2)
            losses = torch.nn.functional.cross_entropy(logits, part["input_ids"], reduction="none")
            ((losses * part["attention_mask"]).sum() / tokens).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}, rank {rank}: {len(parts)} micro-batches, {losses.mean():.3f}")


if __name__ == "__main__":
    in_two_processes(train)
