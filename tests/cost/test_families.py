"""Tests the counts of each family against transformers' own models."""

import json
from collections.abc import Callable
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.cost.transformers_defaults import FILE, defaults
from tests.cost.transformers_models import ALSO, has_head, small_config, small_model
from wlb.cost.config_json import counted_of
from wlb.cost.families import COUNTED, LAYER_TYPES
from wlb.cost.flops import CHUNK

TOKENS = 256
HIDDEN, HEADS = 64, 4


def _solved(k_dim: int, v_dim: int) -> int:
    """The inverse of a chunk times keys and values, which torch solves as a triangular system."""
    return HEADS * 2 * CHUNK * (k_dim + v_dim)


def _mamba2(chunk: int = 64) -> float:
    """Transformers' code passes states between all pairs of chunks, by a product; kernels scan."""
    chunks = TOKENS // chunk + 1
    return -2 * chunks * chunks * 128 * 16 / TOKENS


def _experts_all(layers: int, width: int) -> int:
    """Llama 4's plain code passes each token through all of 8 experts, of which two are chosen."""
    return -layers * 6 * 2 * 3 * HIDDEN * width


NOT_ALIKE: dict[str, Callable[[dict[str, int]], float]] = {
    "kimi_linear": lambda kinds: kinds["linear"] * _solved(16, 16),
    "olmo_hybrid": lambda kinds: kinds["linear"] * _solved(16, 24),
    "qwen3_5_moe_text": lambda kinds: kinds["linear"] * _solved(16, 24),
    "qwen3_5_text": lambda kinds: kinds["linear"] * _solved(16, 24),
    "qwen3_next": lambda kinds: kinds["linear"] * _solved(16, 24),
    "bamba": lambda kinds: kinds["linear"] * _mamba2(),
    "falcon_h1": lambda kinds: kinds["hybrid"] * _mamba2(),
    "granitemoehybrid": lambda kinds: kinds["linear"] * _mamba2(),
    "mamba2": lambda kinds: kinds["linear"] * _mamba2(),
    "nemotron_h": lambda kinds: kinds["linear"] * _mamba2(),
    # Of nine FLOPs for an element of the state two are a product, which is all that is seen.
    "falcon_mamba": lambda kinds: kinds["linear"] * 7 * 128 * 16,
    "jamba": lambda kinds: kinds["linear"] * 7 * 128 * 16,
    "mamba": lambda kinds: kinds["linear"] * 7 * 128 * 16,
    "llama4_text": lambda kinds: _experts_all(8, 96),
}
"""FLOPs of a token that kernels have and transformers' plain code hides from the counter, or the
reverse, by the number of layers of each kind."""


def in_matrices(model: torch.nn.Module) -> int:
    """Parameters in matrices. Not counted: convolutions, positions, biases of experts, and what a
    recurrence has for each of its states.
    """
    left_out = ("conv1d.weight", "conv.weight", "wpe.weight", "A_log", "_bias")
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if p.ndim >= 2 and not name.endswith(left_out))


@pytest.mark.parametrize("model_type", COUNTED)
def test_parameters_and_flops_are_those_of_transformers_model(model_type: str) -> None:
    config = small_config(model_type)
    model = counted_of(config.to_dict(), model_type)
    theirs = small_model(config)
    head = 0 if has_head(config) else HIDDEN * 320
    tables = 0 if has_head(config) or getattr(config, "tie_word_embeddings", False) else head
    assert model.total == pytest.approx(in_matrices(theirs) + tables, rel=1e-3)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        theirs(input_ids=torch.randint(3, 300, (1, TOKENS)), use_cache=False)
    # Plain attention multiplies every query with every key and masks afterwards.
    pairs = TOKENS * sum(one.flops for one in model.pairs)
    differs = NOT_ALIKE.get(model_type, lambda _: 0.0)(model.kinds)
    seen = counter.get_total_flops() / TOKENS + 2 * head + differs
    assert model.token_flops + pairs == pytest.approx(seen, rel=0.02 if differs else 2e-3)


@pytest.mark.parametrize("model_type", COUNTED)
def test_files_that_leave_out_defaults_count_alike(model_type: str) -> None:
    """Transformers leaves out of a file what is its default."""
    config = small_config(model_type)
    whole = counted_of(config.to_dict(), model_type)
    short = json.loads(json.dumps(config.to_diff_dict()))
    assert counted_of({**short, "model_type": model_type}, model_type) == whole


NAMES = ("layer_types", "layers_block_type", "mlp_layer_types")


@pytest.mark.parametrize("layers", [2, 7, 13])
@pytest.mark.parametrize("model_type", sorted(set(COUNTED) - set(ALSO) | {"kimi_linear"}))
def test_rules_of_layers_are_those_of_transformers(model_type: str, layers: int) -> None:
    """Kinds of layers are the same where a file does not list them."""
    depth = {"num_hidden_layers": layers, "n_layer": layers}
    config = small_config(model_type, **depth)
    values = {k: v for k, v in config.to_dict().items() if k not in NAMES}
    model = counted_of(values, model_type)
    assert model == counted_of(config.to_dict(), model_type)
    names = getattr(config, "layer_types", None)
    if names:
        expected = [LAYER_TYPES[name] for name in names]
        assert model.kinds == {kind: expected.count(kind) for kind in expected}


@pytest.mark.parametrize("model_type", COUNTED)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A default that changes in transformers changes what older files mean; this test names it."""
    written: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    assert defaults(model_type) == written[model_type], "python -m tests.cost.transformers_defaults"
