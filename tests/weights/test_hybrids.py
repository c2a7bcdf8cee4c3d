"""Tests Qwen3-Next and Qwen3.5 in Hugging Face's folders: logits of transformers, both ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", reason="compares with transformers")

from tests.weights.case import SPEC, hub_tensors, logits, model_of, some_tokens
from tests.weights.test_hub_transformers import (
    COMMON,
    loaded,
    model_of_family,
    their_logits,
    there_and_back,
)
from wlb.cli import main
from wlb.plan import UserError
from wlb.spec import Activation, ExpertsSpec, LinearSpec, ModelSpec, RopeScaling, Scoring
from wlb.weights import export, import_folder, load
from wlb.weights.config import config_json, read_config
from wlb.weights.names import parameters_of, shards_of

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
MIXED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED |= {"shared_expert_intermediate_size": 32}
KEYS = COMMON | LINEAR | {"num_hidden_layers": 4, "head_dim": 16, "rms_norm_eps": 1e-5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("qwen3_next", MIXED),
    "next-some": ("qwen3_next", MIXED | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "next-dense": ("qwen3_next", {"num_experts": 0}),
    "dense": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "dense-tied": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "dense-full": ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}),
    "dense-rope": (
        "qwen3_5_text",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "mixture": ("qwen3_5_moe_text", MIXED),
}


def of(case: str) -> Any:
    """A random model of transformers, in which every weight matters."""
    family, keys = CASES[case]
    theirs = model_of_family(family, KEYS | keys, draws_vectors=True)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "shared_expert_gate" in name:
                parameter.mul_(3.0)
    return theirs


@pytest.mark.parametrize("case", CASES)
def test_a_hybrid_is_the_same_there_and_back(case: str, tmp_path: Path) -> None:
    made, tokens, want = there_and_back(of(case), tmp_path, num_tokens=150)
    assert want.abs().max() > 0.5
    spec = made.model.spec
    assert spec.attention_gate
    assert spec.qk_norm
    assert spec.rotary_share == (0.5 if case.endswith("rope") else 0.25)
    assert spec.num_linear_layers == {"dense": 2, "dense-full": 0}.get(case, 3)
    assert import_folder(tmp_path / "exported", tmp_path / "again").model.spec == spec
    looked = load(made.checkpoint)
    torch.testing.assert_close(looked.logits(tokens), want, atol=1e-5, rtol=0)
    # Each weight of a linear layer is where it belongs: the files are equal too.
    before, after = (tensors_of(tmp_path / name) for name in ("hub", "exported"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_the_next_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = of("next")
    theirs.save_pretrained(tmp_path / "hub")
    looked = load(import_folder(tmp_path / "hub", tmp_path / "imported").checkpoint)
    tokens = some_tokens(70, 301)
    found = looked.greedy(tokens, most=5, stops=())
    text = tokens
    for token in found:
        assert token == int(their_logits(theirs, text)[-1].argmax())
        text = torch.cat([text, torch.tensor([token])])


def with_images(folder: Path, out: Path, *, family: str, stacked: bool) -> None:
    """The folder of a text model as that of a model with images, as Qwen3.5's are released."""
    out.mkdir()
    text = json.loads((folder / "config.json").read_text("utf-8"))
    del text["architectures"]
    outer = {"model_type": family, "architectures": ["X"], "text_config": text}
    outer |= {"vision_config": {"depth": 1}, "image_token_id": 5}
    text |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    (out / "config.json").write_text(json.dumps(outer), "utf-8")
    tensors = tensors_of(folder)
    if stacked:
        for layer in range(text["num_hidden_layers"]):
            block = f"model.layers.{layer}.mlp.experts"
            stacks = {
                matrix: torch.stack(
                    [
                        tensors.pop(f"{block}.{i}.{matrix}.weight")
                        for i in range(text["num_experts"])
                    ]
                )
                for matrix in ("gate_proj", "up_proj", "down_proj")
            }
            gates = [stacks["gate_proj"], stacks["up_proj"]]
            tensors[f"{block}.gate_up_proj"] = torch.cat(gates, 1)
            tensors[f"{block}.down_proj"] = stacks["down_proj"]
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    extra = {"mtp.norm.weight": torch.zeros(3), "model.visual.patch.weight": torch.zeros(2)}
    save_file(renamed | extra, out / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("case", ["dense", "mixture"])
def test_the_text_model_of_a_model_with_images(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = of(case)
    theirs.save_pretrained(tmp_path / "text")
    family = {"dense": "qwen3_5", "mixture": "qwen3_5_moe"}[case]
    with_images(tmp_path / "text", tmp_path / "hub", family=family, stacked=case == "mixture")
    assert main(["import", str(tmp_path / "hub"), "--out", str(tmp_path / "imported")]) == 0
    said = capsys.readouterr().out
    assert "left out, because not part of the text model: 1 tensor of the vision encoder" in said
    tokens = some_tokens(100, 301)
    want = their_logits(theirs, tokens)
    found = logits(model_of(tmp_path / "imported"), tokens)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
    export(tmp_path / "imported", tmp_path / "exported")
    again = loaded(tmp_path / "exported")
    assert type(again) is type(theirs)
    torch.testing.assert_close(their_logits(again, tokens), want, atol=1e-5, rtol=0)


def test_a_tensor_of_files_stays_in_one_shard() -> None:
    for model_type in ("qwen3_next", "qwen3_5_text"):
        parameters = parameters_of(HYBRID, model_type)
        shards = list(shards_of(parameters.values(), lambda _: 1, 1))
        for shard in shards:
            assert len({p.in_files for p in shard}) == 1
        assert sum(map(len, shards)) == len(parameters)
        assert len(shards) < len(parameters)


HYBRID = replace(
    SPEC,
    num_layers=4,
    full_every=2,
    qk_norm=True,
    attention_gate=True,
    zero_centred_norms=True,
    rotary_share=0.5,
    rope_scaling=RopeScaling(),
    linear=LinearSpec(num_value_heads=4, num_key_heads=2, key_head_dim=8, value_head_dim=8),
)
MIXTURE = ExpertsSpec(
    num=4, per_token=2, hidden_size=16, shared=1, shared_gate=True, normalised=True
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_gate": False}, "model.attention_gate = false"),
        ({"qk_norm": False}, "model.qk_norm = false"),
        ({"qkv_bias": True}, "model.qkv_bias = true"),
        ({"zero_centred_norms": False}, "model.zero_centred_norms = false"),
        ({"activation": Activation.GELU_TANH}, "model.activation = gelu_tanh"),
        ({"logit_softcap": 3.0}, "model.logit_softcap = 3.0"),
        ({"query_scale_size": 3}, "model.query_scale_size = 3"),
        ({"experts": replace(MIXTURE, shared_gate=False)}, "model.experts.shared_gate = false"),
        ({"experts": replace(MIXTURE, scoring=Scoring.SIGMOID)}, "model.experts.scoring = sigmoid"),
        ({"experts": replace(MIXTURE, balance="bias")}, "model.experts.balance = bias"),
    ],
)
def test_other_parts_are_not_exported(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        written(replace(HYBRID, **changed))


def written(spec: ModelSpec, model_type: str = "") -> dict[str, Any]:
    return config_json(
        spec, max_positions=64, bos_id=None, eos_ids=(), dtype="float32", model_type=model_type
    )


@pytest.mark.parametrize(
    ("changed", "imported_as", "expected"),
    [
        ({}, "", "qwen3_5_text"),
        ({}, "qwen3_next", "qwen3_next"),
        ({}, "qwen3_5_moe_text", "qwen3_5_text"),
        ({"experts": MIXTURE}, "", "qwen3_next"),
        ({"experts": MIXTURE}, "qwen3_5_moe_text", "qwen3_5_moe_text"),
        ({"experts": replace(MIXTURE, normalised=False)}, "qwen3_5_moe_text", "qwen3_next"),
        ({"experts": replace(MIXTURE, every=2)}, "qwen3_5_moe_text", "qwen3_next"),
    ],
)
def test_the_family_is_that_of_the_import(
    changed: dict[str, Any], imported_as: str, expected: str
) -> None:
    spec = replace(HYBRID, **changed)
    assert written(spec, imported_as)["model_type"] == expected
    names = {n for p in parameters_of(spec, imported_as).values() for n in p.in_files}
    is_next = "model.layers.0.linear_attn.in_proj_qkvz.weight" in names
    assert is_next == (expected == "qwen3_next")


CONFIG = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]} | KEYS | MIXED


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"shared_expert_intermediate_size": 24}, "shared_expert_intermediate_size"),
        ({"norm_topk_prob": None}, "norm_topk_prob"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention", "chunked_attention"] * 2}, "layer_types"),
        ({"partial_rotary_factor": 0.2}, "rotary_share = 0.2"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "0.5"),
        ({"linear_num_key_heads": 4}, "num_value_heads = 6 is not a multiple"),
        ({"linear_conv_bias": True}, "linear_conv_bias"),
    ],
)
def test_other_models_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG), "utf-8")
    assert read_config(file).spec.num_linear_layers == 3
    file.write_text(json.dumps(CONFIG | changed), "utf-8")
    with pytest.raises(UserError, match=said):
        read_config(file)


@pytest.mark.parametrize(
    ("outer", "text", "said"),
    [
        ({"text_config": None}, {}, "text_config"),
        ({}, {"model_type": "qwen3_5_moe_text"}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantised weights"),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, "contradicts the False"),
        ({}, {"num_experts": 4, "mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_other_models_with_images_are_refused(
    outer: dict[str, Any], text: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    usual = {"model_type": "qwen3_5", "text_config": KEYS | text} | outer
    file.write_text(json.dumps(usual), "utf-8")
    with pytest.raises(UserError, match=said):
        read_config(file)


def test_missing_and_wrong_tensors_have_their_names_of_files(tmp_path: Path) -> None:
    of("next").save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"requires: {name}"):
        import_folder(tmp_path / "hub", tmp_path / "imported")
    save_file(tensors | {name: tensors[name][:5].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} has shape \[5, 32\]"):
        import_folder(tmp_path / "hub", tmp_path / "imported")
    assert hub_tensors(HYBRID).keys() == parameters_of(HYBRID).keys()
