"""Tests that a divided step trains what the whole batch at once does.

Ranks and micro-batches run one after the other; gradients, summed, equal those of all samples to
1e-5: with a mean over the step's tokens (verl's "token-mean", TRL's "dapo", torchtitan's global
valid tokens), over its sequences' means (verl's "seq-mean-token-mean", TRL's "grpo" on slices of
equal number), and over its groups' means (each prompt counts once).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from wlb import balance_step

RNG = np.random.default_rng(0)
LENGTHS = np.minimum(RNG.lognormal(2.5, 0.7, 24), 40).astype(int) + 1
GROUPS = np.arange(24) // 4
TOKENS = [torch.from_numpy(RNG.integers(0, 12, n)) for n in LENGTHS]

Weights = Callable[[int], float]


def per_token(sample: int) -> float:
    return 1 / LENGTHS.sum()


def per_sequence(sample: int) -> float:
    return 1 / (LENGTHS[sample] * LENGTHS.size)


def per_group(sample: int) -> float:
    mine = GROUPS[sample] == GROUPS
    return 1 / (LENGTHS[mine].sum() * (GROUPS.max() + 1))


def gradients(batches: list[list[int]], weights: Weights) -> list[torch.Tensor]:
    """Returns gradients summed over batches, each a padded forward and backward pass."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    embedding, head = torch.nn.Embedding(12, 16), torch.nn.Linear(16, 12)
    model = torch.nn.ModuleList([embedding, layer, head]).double()
    for batch in batches:
        ids = torch.nn.utils.rnn.pad_sequence([TOKENS[i] for i in batch], batch_first=True)
        padding = torch.arange(ids.shape[1]) >= torch.tensor([LENGTHS[i] for i in batch])[:, None]
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        hidden = layer(embedding(ids), src_mask=causal, src_key_padding_mask=padding)
        losses = torch.nn.functional.cross_entropy(
            head(hidden).transpose(1, 2), ids, reduction="none"
        )
        scale = torch.tensor([weights(i) for i in batch])[:, None]
        (losses * ~padding * scale).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("weights", [per_token, per_sequence, per_group])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wait": "step"},
        {"equal_counts": True},
        {"groups": GROUPS, "groups_on": "rank"},
        {"atoms": np.arange(24) // 2},
    ],
    ids=["slots", "step", "counts", "groups", "atoms"],
)
def test_gradients_equal_those_of_the_whole_batch(
    options: dict[str, Any], weights: Weights
) -> None:
    step = balance_step(LENGTHS, num_ranks=3, max_tokens=100, cost="verl", **options)
    parts = [s.tolist() for rank in range(3) for s in step.of_rank(rank)]
    assert len(parts) > 3
    whole = gradients([list(range(24))], weights)
    divided = gradients(parts, weights)
    assert len(whole) == len(divided) > 10
    for a, b in zip(whole, divided, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-8)
    with pytest.raises(AssertionError):  # what a lost micro-batch would look like
        torch.testing.assert_close(gradients(parts[1:], weights)[0], whole[0], rtol=1e-5, atol=1e-8)


def test_optimiser_steps_of_a_rollout_batch_each_equal_theirs() -> None:
    """Mini-batches partition the batch, so their summed gradients are the whole batch's."""
    step = balance_step(LENGTHS, num_ranks=2, max_tokens=100, groups=GROUPS, mini_batches=2)
    parts = [s.tolist() for k in range(2) for rank in range(2) for s in step.of_rank(rank, k)]
    for a, b in zip(
        gradients([list(range(24))], per_token), gradients(parts, per_token), strict=True
    ):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-8)
