"""Tests what a config.json means that lacks keys, or has some that transformers does not read."""

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.weights.case import SPEC, write_hub
from wlb.weights import import_folder
from wlb.weights.config import ARCHITECTURES, HubModel, read_config
from wlb.weights.defaults import DEFAULTS

transformers = pytest.importorskip(
    "transformers", reason="compares with transformers: pip install 'wlb-llm[test]'"
)

SIZES: dict[str, Any] = {
    "vocab_size": 60_000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(folder: Path, config: dict[str, Any]) -> HubModel:
    path = folder / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    return read_config(path)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_absent_keys_mean_what_they_mean_to_transformers(family: str, tmp_path: Path) -> None:
    theirs = transformers.AutoConfig.for_model(family, **SIZES)
    found = read(tmp_path, SIZES | {"model_type": family})
    spec = found.spec
    assert found.max_positions == theirs.max_position_embeddings == DEFAULTS[family].positions
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.init_std == theirs.initializer_range
    assert spec.tied_embeddings == theirs.tie_word_embeddings
    assert spec.head_size == (getattr(theirs, "head_dim", None) or 8)
    ropes = theirs.rope_parameters
    assert spec.rope_theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert found.bos_id == theirs.bos_token_id
    assert found.eos_ids == ()
    assert (*found.default_eos_ids, None)[0] == theirs.eos_token_id
    window = getattr(theirs, "sliding_window", None) or 0
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full"] * 4
    slides = [kind == "sliding_attention" for kind in types]
    assert [spec.slides(layer) for layer in range(4)] == slides
    assert spec.sliding_window == (window if any(slides) else 0)
    if spec.experts.num:
        assert spec.experts.per_token == theirs.num_experts_per_tok
        assert spec.experts.num == theirs.num_experts
    # A scaled RoPE without a base has the family's.
    if family != "gemma3_text":
        rope = {"rope_type": "linear", "factor": 2.0}
        for name in ("rope_scaling", "rope_parameters"):
            scaled = read(tmp_path, SIZES | {"model_type": family, name: dict(rope)}).spec
            assert scaled.rope_theta == spec.rope_theta
            assert scaled.rope_scaling.is_on


def test_a_token_that_is_null_is_none_and_one_beyond_the_vocabulary_too(tmp_path: Path) -> None:
    nothing = {"model_type": "llama", "bos_token_id": None, "eos_token_id": None}
    found = read(tmp_path, SIZES | nothing)
    assert (found.bos_id, found.eos_ids, found.default_eos_ids) == (None, (), ())
    small = read(tmp_path, SIZES | {"model_type": "olmoe", "vocab_size": 500})
    assert small.default_eos_ids == ()


@pytest.mark.parametrize(("generation", "stops"), [({}, [2]), ({"eos_token_id": 7}, [7])])
def test_a_default_stop_counts_where_no_file_has_one(
    generation: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    hub = write_hub(tmp_path / "hub", spec=SPEC, eos_token_id=...)
    (hub / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    made = import_folder(hub, tmp_path / "imported")
    run = json.loads((made.checkpoint / "run.json").read_text("utf-8"))
    assert run["imported"]["eos_token_ids"] == stops


# Keys of published files besides sizes: Qwen3-Coder-30B-A3B, SmolLM2, Qwen2.5-7B, Mixtral-8x7B,
# OLMoE-1B-7B, gemma-2-9b and gemma-3-270m; of fine-tuned ones, and of transformers itself.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "qkv_bias": False,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
    },
    "llama": {
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"},
        "unsloth_fixed": True,
        "unsloth_version": "2025.1.1",
        "neftune_noise_alpha": 5.0,
    },
    "qwen2": {"use_mrope": False, "use_sliding_window": False, "sliding_window": 131_072},
    "mixtral": {"router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02, "sliding_window": None},
    "olmoe": {"clip_qkv": None, "norm_topk_prob": False, "router_z_loss_coef": 0.001},
    "gemma2": {
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    "gemma3_text": {"_sliding_window_pattern": 6, "use_bidirectional_attention": False},
}
COMMON = {
    "_attn_implementation_autoset": True,
    "attention_dropout": 0.0,
    "output_router_logits": True,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_cache": True,
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_files_are_read(family: str, tmp_path: Path) -> None:
    read(tmp_path, SIZES | COMMON | PUBLISHED[family] | {"model_type": family})
    quantised = {"model_type": family, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ValueError, match=r"quantization_config = .* means quantised weights"):
        read(tmp_path, SIZES | quantised)


def test_what_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    other = {"model_type": "gemma2", "sliding_window": 4096, "sliding_window_size": 1024}
    with pytest.raises(ValueError, match="sliding_window_size = 1024 contradicts the window of 40"):
        read(tmp_path, SIZES | other)
    code = {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling.Other"}}
    with pytest.raises(ValueError, match=r"auto_map = .* names code of another model than Llama"):
        read(tmp_path, SIZES | code)
    for name in ("use_qk_norm", "sliding_window_size"):
        with pytest.raises(ValueError, match=f"{name} = .* is an unknown key that may change"):
            read(tmp_path, SIZES | {"model_type": "llama", name: 1})


UNREAD = {
    *("transformers.js_config", "auto_map", "unsloth_fixed", "unsloth_version", "is_llama_config"),
    *("neftune_noise_alpha", "sliding_window_size", "use_qk_norm", "router_z_loss_coef"),
    *("custom_pipelines", "processor_class", "cls_token_id", "mask_token_id", "_commit_hash"),
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_transformers_reads_no_key_that_is_harmless_here(family: str) -> None:
    package = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    used = set(re.findall(r"config\.(\w+)", inspect.getsource(module)))
    used |= set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", inspect.getsource(module)))
    assert {"hidden_size", "rms_norm_eps"} <= used
    assert not used & UNREAD
