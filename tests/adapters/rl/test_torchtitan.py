"""Tests the batcher of torchtitan's RL experiment (0.3.0; b5bcd76 by TORCHTITAN_SOURCE, too)."""

import importlib
import sys
import types
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapters.rl.case import LENGTHS
from tests.adapters.rl.own_code import torchtitan_batcher  # noqa: F401


def priced(tokens: Any) -> int:
    """Returns verl's workload of a packed micro-batch of torchtitan, whose samples are numbered."""
    lengths = torch.bincount(tokens.token_ids.flatten(), minlength=97)[1:]
    return int((24576 * lengths + lengths**2).sum())


def test_torchtitans_rl_micro_batches(
    torchtitan_batcher: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own Batcher packs (0.3.0, or a checkout's); the experiment's package imports vLLM."""
    name = "torchtitan.experiments.rl.components.batcher"
    for part in ("torchtitan.experiments.rl", "torchtitan.experiments.rl.components", name):
        module = types.ModuleType(part)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, part, module)
    vars(sys.modules[name]).update(torchtitan_batcher)
    monkeypatch.delitem(sys.modules, "wlb.adapters.rl.torchtitan", raising=False)
    adapter = importlib.import_module("wlb.adapters.rl.torchtitan")
    monkeypatch.setattr(adapter.BalancedBatcher, "cost", "verl")
    shape = torchtitan_batcher["BatchConfig"](local_batch_size=2, seq_len=1500)
    batcher = adapter.BalancedBatcher.Config(batch=shape).build(
        num_prompts_per_train_step=24, dp_degree=4, pad_id=0
    )
    assert isinstance(batcher, adapter.BalancedBatcher)
    batch = None
    for group in np.arange(96).reshape(24, 4).tolist():
        assert batch is None
        samples = [
            Namespace(
                token_ids=[i + 1] * (LENGTHS[i] + 1), min_policy_version=0,
                **dict.fromkeys(("logprobs", "loss_mask", "advantage"), [1] * (LENGTHS[i] + 1)),
            )
            for i in group
        ]  # fmt: skip
        given = Namespace(training_samples=samples, metrics=[])
        batch = batcher.add_training_samples(training_sample_group=given)
    assert batch is not None
    assert batch.num_global_valid_tokens == sum(LENGTHS)
    trained = torch.cat([m.token_ids.flatten() for slot in batch.microbatches for m in slot])
    assert torch.bincount(trained)[1:].tolist() == LENGTHS, "each sample once"
    work = np.array([[priced(m) for m in slot] for slot in batch.microbatches])
    assert work.shape == (2, 4)
    assert work.max(1).sum() < 1.02 * work.sum() / 4
