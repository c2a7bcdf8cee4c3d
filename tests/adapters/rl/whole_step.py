"""Trains a step of a tiny model in float64, whole or divided over ranks and micro-batches.

Ranks run one after the other. Gradients are summed over micro-batches and averaged over ranks, as
in FSDP and DDP. Tests compare the gradient of a division with that of the whole step.
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
"""Tokens of each response. A prompt of one token precedes it."""
LONGEST = int(LENGTHS.max())
ROLLOUTS = np.arange(NUM) // 3
IDS = [torch.from_numpy(RNG.integers(0, WORDS, n + 1)) for n in LENGTHS]
# A ninth of the tokens come from tools and are not trained. Sample 5 is not trained at all.
TRAINS = [(RNG.random(n) > 1 / 9) * (i != 5) for i, n in enumerate(LENGTHS)]
MASKS = [torch.from_numpy(trains).double() for trains in TRAINS]
ADVANTAGES = torch.from_numpy(RNG.normal(size=NUM))
NOISE = [torch.from_numpy(RNG.normal(0, 0.3, n)) for n in LENGTHS]
NUM_ROLLOUTS = int(ROLLOUTS.max()) + 1
TOKENS = float(sum(mask.sum() for mask in MASKS))
TRAINED = float(sum(mask.sum() > 0 for mask in MASKS))


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch, padded to its longest response. Tensors have shape [samples, longest]."""

    samples: list[int]
    logps: Tensor  # log-probabilities of the tokens
    old: Tensor  # log-probabilities before the update
    mask: Tensor  # 1 for tokens that are trained
    ranks: int  # data-parallel ranks
    num: int  # micro-batches of a rank in the step
    rank: list[int]  # samples of the micro-batch's rank in the step

    @property
    def losses(self) -> Tensor:
        """Returns the clipped policy loss of each token."""
        ratio = (self.logps - self.old).exp()
        advantages = ADVANTAGES[self.samples][:, None]
        return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


Loss = Callable[[Part], Tensor]
Division = Sequence[Sequence[Sequence[int]]]
"""Samples of each micro-batch, indexed as division[rank][micro-batch]."""
WHOLE: Division = [[list(range(NUM))]]


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def gradient(division: Division, loss: Loss) -> Tensor:
    """Trains a step of a tiny causal model and returns its gradient as one vector.

    Args:
        division: How samples are divided over ranks and micro-batches.
        loss: Loss of a micro-batch.
    """
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
    """Returns the largest difference over the largest value of `b`."""
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
    """Returns the samples of the same rollout, which may be in other micro-batches."""
    return np.flatnonzero(ROLLOUTS[sample] == ROLLOUTS).tolist()
