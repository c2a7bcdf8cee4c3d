"""Tests for transformers' logits: of its folders imported here, and of ours loaded there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.sets import full, nightly
from tests.train.case import relaid, small_spec, train, write_corpus
from tests.weights.case import SPEC, hub_tensors, logits, model_of, some_tokens, write_hub
from wlb.plan import UserError
from wlb.spec import Dtype, ExpertBalance, ExpertsSpec, RopeScaling
from wlb.spec import load as load_spec
from wlb.weights import export, hub_import, import_folder, load
from wlb.weights.names import parameters_of

transformers = pytest.importorskip(
    "transformers", reason="compares with transformers: pip install 'wlb-llm[test]'"
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
}
COMMON: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"rms_norm_eps": 1e-5},
    "many-heads": {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 300.0}},
    "head-dim": {"head_dim": 12, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "llama3": {"head_dim": 16, "rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    "yarn": {"head_dim": 16, "rope_parameters": YARN},
    "yarn-mscale": {
        "head_dim": 16,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.3},
    },
    "yarn-factor": {"rope_parameters": YARN | {"attention_factor": 1.5, "beta_slow": 2.0}},
    "llama3-tied": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
}


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens[None], use_cache=False).logits[0]


def loaded(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_imported_llama_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**COMMON | CONFIGS[name], attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    made = import_folder(tmp_path / "hub", tmp_path / "imported")
    ours = model_of(made.checkpoint)
    tokens = some_tokens(200, 301)  # beyond original_max_position_embeddings
    want = their_logits(theirs, tokens)
    assert want.abs().max() > 0.5
    torch.testing.assert_close(logits(ours, tokens), want, atol=1e-5, rtol=0)
    # At these sizes the comparison sees a rotation that is wrong by little.
    ours.spec = replace(ours.spec, rope_theta=ours.spec.rope_theta * 1.01)
    assert (logits(ours, tokens) - want).abs().max() > 1e-3
    assert made.model.spec.tied_embeddings == (name == "llama3-tied")
    assert made.model.eos_ids == (3,)
    export(made.checkpoint, tmp_path / "exported")
    again = loaded(tmp_path / "exported")
    torch.testing.assert_close(their_logits(again, tokens), want, atol=1e-5, rtol=0)


def model_of_family(family: str, keys: dict[str, Any], *, draws_vectors: bool = False) -> Any:
    """Returns a random model of transformers. draws_vectors: norms and biases are drawn too, as
    they start as ones or zeros.
    """
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **keys, attn_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if draws_vectors and parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return theirs


def there_and_back(
    theirs: Any, folder: Path, *, num_tokens: int, keeps_type: bool = True
) -> tuple[Any, Tensor, Tensor]:
    """Returns what was imported, tokens and their logits, which the import and its export have.
    keeps_type: a Mistral without a window, for example, comes back as a Llama.
    """
    theirs.save_pretrained(folder / "hub", max_shard_size="60KB")
    made = import_folder(folder / "hub", folder / "imported")
    tokens = some_tokens(num_tokens, 301)
    want = their_logits(theirs, tokens)
    torch.testing.assert_close(logits(model_of(made.checkpoint), tokens), want, atol=1e-5, rtol=0)
    export(made.checkpoint, folder / "exported")
    again = loaded(folder / "exported")
    assert (type(again) is type(theirs)) == keeps_type
    torch.testing.assert_close(their_logits(again, tokens), want, atol=1e-5, rtol=0)
    return made, tokens, want


QWEN = {"qwen2": {"num_key_value_heads": 2}, "qwen3": {"num_key_value_heads": 2, "head_dim": 12}}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", QWEN)
def test_a_qwen_is_the_same_there_and_back(name: str, is_tied: bool, tmp_path: Path) -> None:
    keys = COMMON | QWEN[name] | {"tie_word_embeddings": is_tied}
    theirs = model_of_family(name, keys, draws_vectors=True)
    made, *_ = there_and_back(theirs, tmp_path, num_tokens=200)
    spec = made.model.spec
    assert (spec.qkv_bias, spec.qk_norm) == (name == "qwen2", name == "qwen3")


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"norm_topk_prob": True, "head_dim": 12},
    "qwen3_moe-plain": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_moe-some": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1, 7]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_the_same_there_and_back(name: str, tmp_path: Path) -> None:
    asked = MIXTURES[name]
    theirs = model_of_family(name.partition("-")[0], COMMON | asked, draws_vectors=True)
    made, tokens, want = there_and_back(theirs, tmp_path, num_tokens=200)
    experts = made.model.spec.experts
    assert experts.num == asked.get("num_experts", asked.get("num_local_experts"))
    assert experts.per_token == asked["num_experts_per_tok"]
    assert experts.normalised == (name in ("qwen3_moe", "mixtral"))
    of_layers = [made.model.spec.has_experts(i) for i in range(made.model.spec.num_layers)]
    assert of_layers == ([False] * 3 + [True] if name.endswith("some") else [True] * len(of_layers))
    looked = load(made.checkpoint).logits(tokens)
    torch.testing.assert_close(looked, want, atol=1e-5, rtol=0)


def test_a_mixtral_of_one_expert_a_token_is_imported_but_not_trained(tmp_path: Path) -> None:
    """Its logits are transformers'; its router gets no gradient there either."""
    keys = {"num_local_experts": 4, "num_experts_per_tok": 1}
    theirs = model_of_family("mixtral", COMMON | keys)
    made, *_ = there_and_back(theirs, tmp_path, num_tokens=100)
    assert "router cannot be trained" in " ".join(made.toml.replace("#", "").split())
    with pytest.raises(UserError, match=r"set model\.experts\.normalised = false"):
        load_spec(str(made.checkpoint / "model.toml"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_the_auxiliary_loss_is_exported_without_its_shares(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = ExpertsSpec(num=4, per_token=2, hidden_size=16)
    spec = replace(SPEC, qk_norm=True, experts=experts)
    trained = replace(spec, experts=replace(experts, balance=ExpertBalance.AUX_LOSS))
    tensors = hub_tensors(spec, dtype)
    parts: dict[str, torch.Tensor] = {}
    for name, parameter in parameters_of(spec).items():
        parameter.add_to(parts, tensors[name])
    # A checkpoint with the state of a run: the folder that it is made of has shares too.
    shares = {name: torch.rand(4) for name in parameters_of(trained).keys() - tensors.keys()}
    assert len(shares) == spec.num_layers
    hub = write_hub(tmp_path / "hub", spec=spec, tensors=parts | shares)
    read = hub_import.read_config
    monkeypatch.setattr(hub_import, "read_config", lambda p: replace(read(p), spec=trained))
    made = import_folder(hub, tmp_path / "run")
    monkeypatch.undo()
    back = export(made.checkpoint, tmp_path / "exported")
    assert back.dtype == str(dtype).removeprefix("torch.")
    loaded(back.folder)  # expects no unexpected tensors
    again = import_folder(back.folder, tmp_path / "again")
    assert again.model.spec == spec
    found = load_file(back.folder / "model.safetensors")
    assert found.keys() == parts.keys()
    assert all(torch.equal(found[name], value) for name, value in parts.items())


WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 12}, (24, 0, 0)),
    "mistral-0.2": ("mistral", {"sliding_window": None, "head_dim": 12}, (0, 0, 0)),
    "qwen2-last": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        (24, 0, 1),
    ),
    "qwen3-alternating": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        (24, 2, 0),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "head_dim": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        (24, 0, 0),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_the_same_there_and_back(name: str, tmp_path: Path) -> None:
    family, config, expected = WINDOWS[name]
    theirs = model_of_family(family, COMMON | config)
    made, *_ = there_and_back(theirs, tmp_path, num_tokens=100, keeps_type=expected[0] > 0)
    spec = made.model.spec
    assert (spec.sliding_window, spec.full_every, spec.full_first) == expected


_BOTH = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
GEMMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "2": ("gemma2", {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}),
    "2-uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 5},
    ),
    "3": ("gemma3_text", {"num_hidden_layers": 7, "rope_parameters": _BOTH}),
    "3-default": ("gemma3_text", {"query_pre_attn_scalar": 12}),
}


@pytest.mark.parametrize("name", GEMMAS)
def test_a_gemma_is_the_same_there_and_back(name: str, tmp_path: Path) -> None:
    family, changed = GEMMAS[name]
    keys = COMMON | {"head_dim": 12, "sliding_window": 24} | changed
    theirs = model_of_family(family, keys, draws_vectors=True)
    made, tokens, want = there_and_back(theirs, tmp_path, num_tokens=100)
    assert want.abs().max() > 0.5
    # The window matters at these sizes.
    ours = model_of(made.checkpoint)
    ours.spec = replace(ours.spec, sliding_window=ours.spec.sliding_window - 1)
    assert (logits(ours, tokens) - want).abs().max() > 1e-4
    assert import_folder(tmp_path / "exported", tmp_path / "again").model.spec == made.model.spec


@pytest.mark.parametrize("is_scaled", [False, True])
def test_transformers_computes_the_logits_of_an_export(tmp_path: Path, is_scaled: bool) -> None:
    spec = SPEC if is_scaled else replace(SPEC, rope_scaling=RopeScaling(), head_dim=0)
    hub = write_hub(tmp_path / "hub", spec=spec)
    made = import_folder(hub, tmp_path / "imported")
    export(made.checkpoint, tmp_path / "exported")
    tokens = some_tokens(200, 301)
    want = logits(model_of(made.checkpoint), tokens)
    theirs = loaded(tmp_path / "exported")
    torch.testing.assert_close(their_logits(theirs, tokens), want, atol=1e-5, rtol=0)
    assert theirs.config.bos_token_id is None
    assert theirs.config.eos_token_id is None


def test_transformers_reads_the_keys_of_version_4_as_those_of_5(tmp_path: Path) -> None:
    """Both spellings are in a config.json of ours; either alone says the same model."""
    hub = write_hub(tmp_path / "hub")
    whole = json.loads((hub / "config.json").read_text("utf-8"))
    found: list[Any] = []
    for drop in ((), ("rope_parameters",), ("rope_theta", "rope_scaling")):
        kept = {name: value for name, value in whole.items() if name not in drop}
        (hub / "config.json").write_text(json.dumps(kept), "utf-8")
        config = transformers.AutoConfig.from_pretrained(hub)
        found.append(config.rope_parameters)
        made = import_folder(hub, tmp_path / f"without-{len(drop)}")
        assert made.model.spec == SPEC
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("weights") / "corpus")


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["one", *nightly("tp2-pp2-v2")])
def test_transformers_computes_the_logits_of_a_run(
    corpus: Path, tmp_path: Path, layout: str
) -> None:
    spec = relaid(small_spec(tmp_path, corpus, training={"steps": 2}), layout)
    run, _ = train(spec)
    made = export(run.folder, tmp_path / "hub", shard_bytes=30_000)
    assert made.checkpoint == run.folder / "checkpoints" / "step-00000002"
    assert made.num_shards > 2
    theirs = loaded(made.folder)
    tokens = some_tokens(100, theirs.config.vocab_size)
    want = logits(model_of(made.checkpoint), tokens)
    torch.testing.assert_close(their_logits(theirs, tokens), want, atol=1e-5, rtol=0)
    # The run's store was made with a tokenizer, which encodes text as the store has it.
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder)
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == 0
    assert tokenizer.decode(tokenizer.encode("the plan waits")) == "the plan waits"
    assert len(tokenizer) == theirs.config.vocab_size


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["one", *full("tp2-pp2-v2"), *nightly("dp2-tp2")])
def test_any_layout_begins_with_imported_weights(corpus: Path, tmp_path: Path, layout: str) -> None:
    """A run that hardly learns saves the weights that it was given, to the bit."""
    base = small_spec(tmp_path, corpus)
    model = replace(base.model, vocab_size=320, head_dim=8)
    tensors = hub_tensors(model, torch.bfloat16)
    hub = write_hub(tmp_path / "hub", spec=model, tensors=tensors)
    made = import_folder(hub, tmp_path / "imported")
    assert made.dtypes == ("bfloat16",)
    training = replace(
        base.training, steps=1, learning_rate=1e-30, min_learning_rate=0.0, weight_decay=0.0
    )
    init = replace(base.checkpoint, init_from=str(made.checkpoint))
    spec = replace(base, model=made.model.spec, training=training, checkpoint=init)
    run, said = train(relaid(spec, layout))
    assert f"weights of {made.checkpoint}" in said
    theirs = loaded(export(run.folder, tmp_path / "back", dtype=Dtype.BFLOAT16).folder)
    for name, value in theirs.named_parameters():
        assert torch.equal(value, tensors[name].float()), name
