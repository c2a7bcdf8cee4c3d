"""Tests what import and export refuse: with the value and the remedy, leaving nothing behind."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.case import SPEC, hub_tensors, write_hub
from wlb.plan import UserError
from wlb.spec import Activation, ModelSpec, RopeScaling
from wlb.train.checkpoint.folder import write_manifest
from wlb.weights import export, hub_export, import_folder
from wlb.weights.config import config_json

GEMMA2 = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
GEMMA3 |= {"rope_scaling": None, "rope_parameters": None}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model_type": (
        {"model_type": "gemma"},
        r"model_type = 'gemma' is not supported; wlb supports Gemma2ForCausalLM, Gemma3ForCausalLM",
    ),
    "a gemma that sees what follows": (
        GEMMA2 | {"use_bidirectional_attention": True},
        "use_bidirectional_attention = True is not supported, because attention in wlb is causal",
    ),
    "a gemma of another activation": (
        GEMMA2 | {"hidden_activation": "relu"},
        "hidden_activation = 'relu' must be gelu_pytorch_tanh",
    ),
    "a gemma without a window": (
        GEMMA2 | {"sliding_window": None},
        "sliding_window = None must be a number of tokens, because a gemma2 has",
    ),
    "a cap that transformers ignores": (
        GEMMA3 | {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping = 50.0 is ignored by transformers for a Gemma 3",
    ),
    "a scaled base of sliding layers": (
        GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention: rope_type = 'linear' must be default",
    ),
    "rope of other kinds of layers": (
        GEMMA3 | {"rope_parameters": {"chunked_attention": {}}},
        "rope_parameters = .* must hold full_attention and sliding_attention and nothing else",
    ),
    "a key of gemma in a llama": (
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping = 30.0 is an unknown key that may change",
    ),
    "no model_type": ({"model_type": ...}, r"model_type = \(missing\) is not supported"),
    "model_type of another type": ({"model_type": []}, r"model_type = \[\] is not supported"),
    "another head": (
        {"architectures": ["LlamaForSequenceClassification"]},
        r"architectures = \['LlamaForSequenceClassification'\] is not supported",
    ),
    "a window of a llama": (
        {"use_sliding_window": True},
        "must be false, because a llama has no sliding",
    ),
    "a window that may be in use": (
        {"sliding_window": 4096},
        "sliding_window = 4096 has a value, but use_sliding_window",
    ),
    "a layer with a window, and no window": (
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "layer_types = .* lists layers with a sliding window, but sliding_window is not in use",
    ),
    "other layers": (
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types = .* must contain only full_attention and sliding_attention",
    ),
    "too many layer types": (
        {"layer_types": ["full_attention"] * 3},
        "layer_types = .* must have 2 entries",
    ),
    "a pattern without a period": (
        {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": [
                f"{kind}_attention" for kind in ["sliding", "full", "full", "sliding", "full"]
            ],
        },
        "layer_types = .* must have full attention either in every n-th layer",
    ),
    "a mistral whose layers contradict": (
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "layer_types": ["full_attention"] * 2,
        },
        "layer_types = .* contradicts a window of 4096 tokens",
    ),
    "a qwen that does not say": (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": ...},
        r"num_key_value_heads = \(missing\) must be an integer",
    ),
    "attention bias": ({"attention_bias": True}, "attention_bias = True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias = True"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' must be silu"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq"}},
        r"quantization_config = .*gptq.* means quantised weights, .* import the original",
    ),
    "dynamic scaling": (
        {"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "rope_scaling: rope_type = 'dynamic' is not supported, .* types are default, llama3",
    ),
    "two types": (
        {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
        "rope_scaling: type = 'linear' contradicts rope_type = 'default'; remove the wrong one",
    ),
    "longrope": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e3}, "rope_scaling": None},
        "rope_parameters: rope_type = 'longrope' is not supported",
    ),
    "a scaling of another type": (
        {"rope_parameters": ..., "rope_scaling": {"type": [], "factor": 4.0}},
        r"rope_type = \[\] is not supported",
    ),
    "yarn between pairs": (
        {
            "rope_parameters": ...,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False},
        },
        "truncate = False must be true, because wlb's YaRN rounds",
    ),
    "rope by layer type": (
        {"rope_scaling": None, "rope_parameters": {"full": {"rope_type": "default"}}},
        r"rope_parameters: full = .* differs between layers",
    ),
    "contradicting bases": ({"rope_theta": 7.0}, r"rope_theta = 7.0 contradicts the 5000.0 of"),
    "contradicting scalings": (
        {"rope_parameters": {"rope_theta": 5000.0}},
        "rope_parameters = .* contradicts rope_scaling = ",
    ),
    "partly rotated": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor = 0.5 must be 1, because wlb rotates whole heads",
    ),
    "llama3 without its numbers": (
        {"rope_parameters": ..., "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        r"rope_scaling: low_freq_factor = \(missing\) must be a number",
    ),
    "no width": ({"hidden_size": ...}, r"hidden_size = \(missing\) must be an integer"),
    "text as a number": ({"vocab_size": "301"}, "vocab_size = '301' must be an integer"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "is not a multiple of model.num_kv"),
    "a token that is text": ({"eos_token_id": "</s>"}, "eos_token_id = '</s>' must be a token"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_wlb_does_not_compute_is_refused(name: str, tmp_path: Path) -> None:
    change, says = CONFIGS[name]
    hub = write_hub(tmp_path / "hub", **change)
    with pytest.raises(ValueError, match=says) as refused:
        import_folder(hub, tmp_path / "out")
    assert str(hub / "config.json") in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hub"]


def _refused(hub: Path, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        import_folder(hub, hub.parent / "out")
    assert not list(hub.parent.glob("*out*"))


def test_tensors_that_are_missing_too_many_or_of_another_shape(tmp_path: Path) -> None:
    tensors = hub_tensors(SPEC)
    name = "model.layers.1.mlp.up_proj.weight"
    less = {n: value for n, value in tensors.items() if n != name}
    _refused(
        write_hub(tmp_path / "a", tensors=less),
        rf"a does not contain tensors that the model of .*config.* requires: {name}",
    )
    more = tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}
    _refused(
        write_hub(tmp_path / "b", tensors=more),
        r"b contains tensors that .* does not have: .*q_proj.bias",
    )
    other = tensors | {name: tensors[name].T.contiguous()}
    says = rf"{name} has shape \[32, 48\], but .* requires \[48, 32\]"
    _refused(write_hub(tmp_path / "c", tensors=other), says)
    headless = {n: value for n, value in tensors.items() if n != "lm_head.weight"}
    says = r"requires: lm_head.weight.* set tie_word_embeddings = true in config.json"
    _refused(write_hub(tmp_path / "d", tensors=headless), says)
    few = {n: value for n, value in tensors.items() if "layers.0" not in n}
    _refused(write_hub(tmp_path / "e", tensors=few), r"layers.0.* and 6 more")
    # What a configuration determines may lie in old files.
    old = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}
    import_folder(write_hub(tmp_path / "f", tensors=old), tmp_path / "imported")


def test_weights_of_other_kinds_are_refused(tmp_path: Path) -> None:
    tensors = hub_tensors(SPEC)
    name = "model.norm.weight"
    eight = tensors | {name: tensors[name].to(torch.int8)}
    _refused(write_hub(tmp_path / "a", tensors=eight), rf"{name} has dtype I8, .* quantised")
    pickled = write_hub(tmp_path / "b")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    _refused(pickled, r"only pickled weights \(pytorch_model.bin\).* convert them to safetensors")
    (pickled / "pytorch_model.bin").rename(pickled / "consolidated.pth")
    _refused(pickled, r"only pickled weights \(consolidated.pth\)")
    (pickled / "consolidated.pth").rename(pickled / "part.safetensors")
    _refused(pickled, "has part.safetensors, but neither model.safetensors nor")
    (pickled / "part.safetensors").unlink()
    _refused(pickled, "has no weights")


def test_folders_that_are_not_there_or_there_already(tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub")
    with pytest.raises(ValueError, match=r"nothing is not the folder of a Hugging Face model"):
        import_folder(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"--out .*there already exists; remove it or give"):
        import_folder(hub, tmp_path / "there")
    made = import_folder(hub, tmp_path / "imported")
    with pytest.raises(ValueError, match=r"--out .*there already exists; remove it or give"):
        export(made.checkpoint, tmp_path / "there")
    with pytest.raises(ValueError, match=r"nothing must be a checkpoint \(a folder with"):
        export(tmp_path / "nothing", tmp_path / "out")
    (hub / "config.json").write_text("{", "utf-8")
    _refused(hub, r"config.json is not JSON")
    (hub / "config.json").write_text("[]", "utf-8")
    _refused(hub, r"config.json must contain a JSON object, but contains a list")


def _sharded(tmp_path: Path) -> Path:
    made = import_folder(write_hub(tmp_path / "one"), tmp_path / "imported")
    return export(made.checkpoint, tmp_path / "hub", shard_bytes=50_000).folder


def test_corrupt_files_are_named(tmp_path: Path) -> None:
    hub = _sharded(tmp_path)
    shard = hub / "model-00002-of-00004.safetensors"
    whole = shard.read_bytes()
    says = (
        r"model-00002-of-00004.safetensors is not a complete safetensors file: .*download it again"
    )
    shard.write_bytes(whole[:-100])  # an interrupted download
    _refused(hub, says)
    shard.write_bytes(b"\xff" * 8 + whole[8:])  # a header of absurd length
    _refused(hub, says)
    shard.write_bytes(b"<html>not found</html>")
    _refused(hub, says)
    shard.write_bytes(b"")
    _refused(hub, says)
    shard.unlink()
    _refused(hub, r"hub does not contain files .* model-00002-of-00004.safetensors")


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    hub = _sharded(tmp_path)
    index = hub / "model.safetensors.index.json"
    good = json.loads(index.read_text("utf-8"))

    def write(weight_map: Any) -> None:
        index.write_text(json.dumps(good | {"weight_map": weight_map}), "utf-8")

    write(good["weight_map"] | {"lm_head.weight": "model-00001-of-00004.safetensors"})
    _refused(hub, r"00001-of-00004.safetensors does not contain tensors .* lm_head.weight")
    write(good["weight_map"] | {"lm_head.weight": "../other.safetensors"})
    _refused(hub, r"lm_head.weight in '../other.safetensors', which must be a file name")
    write(good["weight_map"] | {"lm_head.weight": "model.bin"})
    _refused(hub, r"lm_head.weight in 'model.bin', but wlb reads only .safetensors")
    write([])
    _refused(hub, "weight_map must be a JSON object")
    # Tensors that the index does not name are not read.
    write(good["weight_map"])
    file = hub / good["weight_map"]["lm_head.weight"]
    save_file(load_file(file) | {"more": torch.zeros(3)}, file)
    import_folder(hub, tmp_path / "again")


def test_checkpoints_that_cannot_be_exported(tmp_path: Path) -> None:
    made = import_folder(write_hub(tmp_path / "hub"), tmp_path / "imported").checkpoint
    out = tmp_path / "out"

    def broken(says: str) -> None:
        with pytest.raises(ValueError, match=says):
            export(tmp_path / "broken", out)
        assert not list(tmp_path.glob("*out*"))
        shutil.rmtree(tmp_path / "broken")

    def copy() -> Path:
        return Path(shutil.copytree(made, tmp_path / "broken"))

    def rewritten() -> None:
        """Rewrites the manifest, which says what is there; checksums do not matter here."""
        (tmp_path / "broken" / "manifest.json").unlink()
        write_manifest(tmp_path / "broken")

    run = json.loads((made / "run.json").read_text("utf-8"))
    run["spec"]["model"]["num_layers"] = 3
    (copy() / "run.json").write_text(json.dumps(run), "utf-8")
    rewritten()
    broken(r"broken does not contain model.layers.2.input_layernorm.weight, .*run.json requires")
    run["spec"]["model"] |= {"num_layers": 2, "ffn_hidden_size": 64}
    (copy() / "run.json").write_text(json.dumps(run), "utf-8")
    rewritten()
    broken(r"gate_proj.weight with shape \[48, 32\], .* requires \[64, 32\]")
    (copy() / "run.json").write_text("{}", "utf-8")
    rewritten()
    broken(r"run\.json: it lacks the key 'step'")
    (copy() / "manifest.json").unlink()
    broken(r"manifest.json cannot be read .*there is no older checkpoint")
    next(copy().glob("*.safetensors")).unlink()
    broken(r"safetensors is missing. This checkpoint cannot be used")
    shard = next(copy().glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    broken(r"safetensors is corrupt: its SHA-256 differs from the one in the manifest")
    shard = next(copy().glob("*.safetensors"))
    shard.write_bytes(b"no safetensors")
    rewritten()
    broken(r"broken is damaged or incomplete: .*; use another checkpoint")


GEMMA_PARTS = ModelSpec(
    activation=Activation.GELU_TANH,
    branch_norms=True,
    zero_centred_norms=True,
    scaled_embeddings=True,
    sliding_window=4,
)
EXPORTS: dict[str, tuple[ModelSpec, str]] = {
    "both of Qwen's": (ModelSpec(qkv_bias=True, qk_norm=True), "cannot be exported together"),
    "exported as Qwen2": (ModelSpec(qkv_bias=True, head_dim=16), "exported as Qwen2"),
    "windows in some of Llama's layers": (
        ModelSpec(sliding_window=8, full_every=2),
        "model.full_every = 2 and model.full_first = 0 cannot be exported",
    ),
    "a capped Llama": (
        ModelSpec(logit_softcap=30.0),
        "lacks model.zero_centred_norms, model.branch_norms, model.scaled_embeddings, model.slid",
    ),
    "a Gemma 3 with capped scores": (
        replace(GEMMA_PARTS, qk_norm=True, attention_softcap=50.0),
        "the model has model.attention_softcap; .* gemma3_text",
    ),
    "a Gemma 2 with two bases": (
        replace(GEMMA_PARTS, sliding_rope_theta=1e4),
        "the model has model.sliding_rope_theta; .* gemma2",
    ),
    "a Gemma 3 that is scaled everywhere": (
        replace(GEMMA_PARTS, qk_norm=True, rope_scaling=RopeScaling(factor=2.0)),
        "Gemma 3 does not scale RoPE in its sliding layers",
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_a_model_that_no_family_has_is_not_exported(name: str) -> None:
    spec, says = EXPORTS[name]
    with pytest.raises(UserError, match=says):
        config_json(spec, max_positions=64, bos_id=None, eos_ids=(), dtype="float32")


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = import_folder(write_hub(tmp_path / "hub"), tmp_path / "imported").checkpoint

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(hub_export, "_write_configs", full)
    with pytest.raises(OSError, match="No space left"):
        export(made, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "imported"]


def test_tokenizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    made = import_folder(write_hub(tmp_path / "hub"), tmp_path / "imported").checkpoint
    with pytest.raises(ValueError, match=r"does not exist; give the path of a tokenizer.json"):
        export(made, tmp_path / "out", tokenizer=tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"config.json cannot be read as a tokenizer.json: "):
        export(made, tmp_path / "out", tokenizer=tmp_path / "hub" / "config.json")
    large = tmp_path / "large.json"
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(302)}, unk_token="w0")).save(str(large))
    with pytest.raises(
        ValueError, match=r"large.json has 302 tokens, more than the model's vocabulary of 301; set"
    ):
        export(made, tmp_path / "out", tokenizer=large)
    with pytest.raises(ValueError, match="--shard-size = 0 must be at least 1 byte"):
        export(made, tmp_path / "out", shard_bytes=0)
    assert not list(tmp_path.glob("*out*"))
