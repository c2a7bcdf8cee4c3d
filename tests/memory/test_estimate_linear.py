"""Tests the estimate of a linear layer's activations against what autograd keeps on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wlb.memory.estimate import layer_activation_bytes
from wlb.model import build_reference, local_rows
from wlb.spec import Dtype, LinearSpec, ModelSpec, ParallelSpec, RunSpec

HEADS = [(4, 8, 32, 32), (8, 8, 16, 64), (2, 8, 64, 32)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_activations_are_what_autograd_keeps(heads: tuple[int, int, int, int]) -> None:
    keys, values, key_dim, value_dim = heads
    linear = LinearSpec(
        num_key_heads=keys, num_value_heads=values, key_head_dim=key_dim, value_head_dim=value_dim
    )
    model = ModelSpec(
        vocab_size=256,
        hidden_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        ffn_hidden_size=512,
        full_every=2,
        linear=linear,
    )
    whole, tokens = build_reference(model), 1024
    weights = {p.untyped_storage().data_ptr() for p in whole.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in weights:
            kept[at] = tensor
        return tensor

    rows = local_rows(model, [0, tokens])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        whole.model.layers["0"](torch.randn(tokens, 256, requires_grad=True), rows)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    (alone,) = (kind.model for kind in model.layer_kinds if kind.is_linear)
    training = replace(RunSpec().training, dtype=Dtype.FLOAT32)
    spec = RunSpec(model=alone, training=training, parallel=ParallelSpec(dp=1))
    estimate = layer_activation_bytes(spec, micro_batch_tokens=tokens)
    assert measured <= estimate <= 1.2 * measured
