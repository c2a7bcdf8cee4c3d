"""Tests names of experts in files, and models with experts that cannot be read or exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.case import SPEC, hub_tensors, write_hub
from wlb.model import build_reference
from wlb.spec import ExpertBalance, ExpertsSpec, ModelSpec, Scoring
from wlb.weights.config import config_json, read_config
from wlb.weights.expert_weights import names_in_files, type_of
from wlb.weights.names import parameters_of

EXPERTS = ExpertsSpec(num=3, per_token=2, hidden_size=16)
MIXTRAL = replace(SPEC, experts=EXPERTS)
QWEN = replace(MIXTRAL, qk_norm=True, experts=replace(EXPERTS, normalised=False))
OLMOE = replace(MIXTRAL, qk_norm_rows=True, head_dim=0)


SOME_LAYERS = replace(
    QWEN, num_layers=4, experts=replace(EXPERTS, normalised=False, every=2, dense_layers=(1,))
)


@pytest.mark.parametrize(
    "spec",
    [MIXTRAL, QWEN, OLMOE, SOME_LAYERS],
    ids=["mixtral", "qwen3_moe", "olmoe", "qwen3_moe-some"],
)
def test_a_config_is_read_back(spec: ModelSpec, tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub", spec=spec, tensors={"a": torch.zeros(1)})
    found = read_config(hub / "config.json").spec
    assert found.experts == spec.experts
    assert type_of(found) == type_of(spec)
    assert (found.qk_norm, found.qk_norm_rows) == (spec.qk_norm, spec.qk_norm_rows)


def test_a_stack_has_a_tensor_for_each_expert() -> None:
    name = "model.layers.1.mlp.experts.up_proj.weight"
    layer = "model.layers.1."
    assert names_in_files(name, QWEN) == tuple(
        f"{layer}mlp.experts.{i}.up_proj.weight" for i in range(3)
    )
    assert names_in_files(name, MIXTRAL) == tuple(
        f"{layer}block_sparse_moe.experts.{i}.w3.weight" for i in range(3)
    )
    gate = f"{layer}mlp.gate.weight"
    assert names_in_files(gate, MIXTRAL) == (f"{layer}block_sparse_moe.gate.weight",)
    assert names_in_files(gate, QWEN) == (gate,)
    assert names_in_files(f"{layer}self_attn.q_proj.weight", MIXTRAL) == (
        f"{layer}self_attn.q_proj.weight",
    )
    parameter = parameters_of(QWEN)[name]
    assert (parameter.shape, parameter.shape_in_files) == ((3, 16, 32), (16, 32))
    value = dict(build_reference(QWEN).named_parameters())[name].detach()
    written: dict[str, torch.Tensor] = {}
    parameter.add_to(written, value)
    assert torch.equal(written[f"{layer}mlp.experts.2.up_proj.weight"], value[2])


def test_one_expert_is_a_stack_too() -> None:
    spec = replace(QWEN, experts=replace(EXPERTS, num=1, per_token=1))
    parameter = parameters_of(spec)["model.layers.0.mlp.experts.up_proj.weight"]
    assert (parameter.shape_in_files, len(parameter.in_files)) == ((16, 32), 1)


@pytest.mark.parametrize(
    ("spec", "keys", "message"),
    [
        (
            QWEN,
            {"decoder_sparse_step": 9},
            "model.experts.every = 9 and .* leave no layer with experts",
        ),
        (
            QWEN,
            {"mlp_only_layers": [0, True]},
            "mlp_only_layers .* must be a list of whole numbers",
        ),
        (
            OLMOE,
            {"decoder_sparse_step": 2},
            "decoder_sparse_step = 2.*OLMoE, which has experts in every layer",
        ),
        (QWEN, {"norm_topk_prob": 3}, "norm_topk_prob = 3 must be true or false"),
        (QWEN, {"num_local_experts": 4}, "num_experts = 3 contradicts num_local_experts = 4"),
        (QWEN, {"num_experts_per_tok": 9}, "per_token = 9 is more than model.experts.num = 3"),
        (
            OLMOE,
            {"clip_qkv": 8.0},
            "clip_qkv = 8.0 must be null, because wlb does not clip Q, K and V",
        ),
        (
            MIXTRAL,
            {"sliding_window": 64},
            "sliding_window = 64 has a value, but use_sliding_window",
        ),
        (
            QWEN,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "max_window_layers = 1 takes the sliding window from the first layers in",
        ),
        (
            QWEN,
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types = .* contradicts a window of 64 tokens",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    spec: ModelSpec, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    hub = write_hub(tmp_path / "hub", spec=spec, tensors={"a": torch.zeros(1)}, **keys)
    with pytest.raises(ValueError, match=message):
        read_config(hub / "config.json")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(QWEN, experts=replace(EXPERTS, shared=1)), "model.experts.shared = 1"),
        (replace(QWEN, experts=replace(EXPERTS, scoring=Scoring.SIGMOID)), "scoring = sigmoid"),
        (replace(QWEN, experts=replace(EXPERTS, balance=ExpertBalance.BIAS)), "balance = bias"),
        (replace(MIXTRAL, qkv_bias=True), "qkv_bias = true cannot be exported with experts"),
        (replace(MIXTRAL, experts=replace(EXPERTS, normalised=False)), "normalised = false"),
        (replace(MIXTRAL, sliding_window=8), "with experts and windows is Qwen3-MoE"),
        (
            replace(QWEN, sliding_window=8, full_every=2),
            "model.full_every = 2 cannot be exported with experts",
        ),
        (
            replace(SPEC, qk_norm_rows=True),
            "qk_norm_rows = true cannot be exported without experts",
        ),
        (
            replace(MIXTRAL, experts=replace(EXPERTS, dense_layers=(0,))),
            r"dense_layers = \[0\] .* Mixtral or OLMoE, which have experts",
        ),
    ],
)
def test_what_transformers_lacks_is_not_exported(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_json(spec, max_positions=64, bos_id=None, eos_ids=(), dtype="float32")


def test_the_tensors_of_a_dense_model_keep_their_names() -> None:
    assert all(p.in_files == (name,) for name, p in parameters_of(SPEC).items())
    assert hub_tensors(SPEC).keys() == parameters_of(SPEC).keys()
