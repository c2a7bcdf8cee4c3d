"""Tests the adapter of TRL's GRPO: slices by length, without padding."""

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="needs the extra [hf]")

from wlb.adapters.rl.trl import by_length, without_padding
from wlb.plan import UserError

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(5, 0.9, 100), 1000).astype(int)


def test_completions_of_each_optimiser_step_have_the_same_lengths() -> None:
    order = by_length(LENGTHS, steps=4)
    assert sorted(order.tolist()) == list(range(100))
    steps = LENGTHS[order].reshape(4, 25)
    assert (np.diff(steps, axis=1) <= 0).all(), "long to short, at once on every rank"
    assert np.ptp(steps.mean(1)) < 0.02 * steps.mean()
    with pytest.raises(UserError, match=r"100 completions cannot be divided .* steps = 3"):
        by_length(LENGTHS, steps=3)


def test_a_slice_loses_the_columns_that_are_only_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    prompt = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]])
    inputs = {
        "completion_ids": torch.arange(10).view(2, 5), "completion_mask": mask,
        "prompt_ids": torch.arange(8).view(2, 4), "prompt_mask": prompt,
        "old_per_token_logps": torch.arange(10.0).view(2, 5), "advantages": torch.ones(2),
        "num_items_in_batch": torch.tensor(4),
        "token_type_ids": torch.tensor([[5, 6, 7, 8, 0, 0, 0, 0, 0]] * 2),
        "mm_token_type_ids": torch.zeros(2, 9),
    }  # fmt: skip
    out = without_padding(inputs)
    assert out["completion_ids"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert out["completion_mask"].sum() == mask.sum()
    assert out["prompt_ids"].tolist() == [[2, 3], [6, 7]]
    assert out["old_per_token_logps"].shape == (2, 3)
    assert out["advantages"].shape == (2,)
    assert out["num_items_in_batch"] == 4
    assert out["token_type_ids"].tolist() == [[7, 8, 0, 0, 0]] * 2
    assert out["mm_token_type_ids"].shape == (2, 5)


def test_a_slice_keeps_the_images_of_a_completion_that_is_masked() -> None:
    """TRL masks all of a truncated completion, and the model counts its images' tokens."""
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    kinds = torch.tensor([[0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 0]])
    inputs = {
        "completion_ids": torch.zeros(2, 5), "completion_mask": mask, "mm_token_type_ids": kinds,
        "prompt_ids": torch.zeros(2, 2), "prompt_mask": torch.tensor([[0, 1], [0, 1]]),
    }  # fmt: skip
    out = without_padding(inputs)
    assert out["completion_ids"].shape == (2, 4)
    assert out["prompt_ids"].shape == (2, 1)
    assert out["mm_token_type_ids"].tolist() == [[0] * 5, [1, 0, 0, 1, 1]]
