"""A tiny model whose step is trained whole or divided over ranks and micro-batches, in float64.

Ranks run one after the other; gradients are summed over micro-batches and averaged over ranks, as
FSDP and DDP do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wlb import balance_step

RNG = np.random.default_rng(0)
NUM, WORDS, CLIP = 24, 12, 0.2
LENGTHS = np.minimum(RNG.lognormal(2.5, 0.7, NUM), 40).astype(int) + 1
"""Tokens of each response; one more, its prompt, precedes them."""
LONGEST = int(LENGTHS.max())
ROLLOUTS = np.arange(NUM) // 3
IDS = [torch.from_numpy(RNG.integers(0, WORDS, n + 1)) for n in LENGTHS]
# A ninth of the tokens are a tool's, and nothing of sample 5 is trained.
TRAINS = [(RNG.random(n) > 1 / 9) * (i != 5) for i, n in enumerate(LENGTHS)]
MASKS = [torch.from_numpy(trains).double() for trains in TRAINS]
ADVANTAGES = torch.from_numpy(RNG.normal(size=NUM))
NOISE = [torch.from_numpy(RNG.normal(0, 0.3, n)) for n in LENGTHS]
NUM_ROLLOUTS = int(ROLLOUTS.max()) + 1
TOKENS = float(sum(mask.sum() for mask in MASKS))
TRAINED = float(sum(mask.sum() > 0 for mask in MASKS))


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch, padded to its longest response: tensors of shape [samples, longest]."""

    samples: list[int]
    logps: Tensor
    old: Tensor
    mask: Tensor
    ranks: int
    num: int
    """Micro-batches of a rank in the step."""
    rank: list[int]
    """Samples of its rank in the step."""

    @property
    def losses(self) -> Tensor:
        """The clipped policy loss of each token."""
        ratio = (self.logps - self.old).exp()
        advantages = ADVANTAGES[self.samples][:, None]
        return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


Loss = Callable[[Part], Tensor]
Division = Sequence[Sequence[Sequence[int]]]
"""division[rank][micro-batch]: samples."""
WHOLE: Division = [[list(range(NUM))]]


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def gradient(division: Division, loss: Loss) -> Tensor:
    """Returns the gradient of a causal model of means of embeddings, as one vector."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(WORDS, 8).double()
    head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, WORDS))
    model = torch.nn.ModuleList([embedding, head.double()])
    for rank in division:
        mine = [i for samples in rank for i in samples]
        for samples in rank:
            ids = padded([IDS[i] for i in samples])
            places = torch.arange(1, ids.shape[1] + 1)[:, None]
            hidden = embedding(ids).cumsum(1) / places
            logps = head(hidden[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            old = logps.detach() + padded([NOISE[i] for i in samples])
            mask = padded([MASKS[i] for i in samples])
            part = Part(list(samples), logps, old, mask, len(division), len(rank), mine)
            (loss(part) / len(division)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference, in parts of the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def divided(**options: Any) -> Division:
    step = balance_step(LENGTHS + 1, num_ranks=2, max_tokens=60, cost="verl", **options)
    division = [[s.tolist() for s in step.of_rank(rank)] for rank in range(2)]
    assert len(division[0]) == len(division[1]) > 2
    return division


DIVISIONS: dict[str, Division] = {
    "slots": divided(),
    "once a step": divided(wait="step"),
    "equal counts": divided(equal_counts=True),
}


def token_mean(part: Part) -> Tensor:
    return (part.losses * part.mask).sum() / TOKENS * part.ranks


def token_sum(part: Part) -> Tensor:
    return (part.losses * part.mask).sum() * part.ranks


def sums(part: Part) -> Tensor:
    return (part.losses * part.mask).sum(1)


def sequence_means(part: Part) -> Tensor:
    return sums(part) / part.mask.sum(1).clamp(min=1)


def siblings(sample: int) -> list[int]:
    """Returns the samples of the same rollout, which may lie in other micro-batches."""
    return np.flatnonzero(ROLLOUTS[sample] == ROLLOUTS).tolist()
