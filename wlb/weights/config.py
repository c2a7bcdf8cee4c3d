"""Convert between Hugging Face's config.json and `ModelSpec`.

Keys of transformers 4 and 5 are read, with transformers' defaults for missing keys, and both forms
are written. If `wlb.model` would compute a model differently from transformers, UserError names the
key, its value and what to do.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.read_file import Fields, read_object
from wlb.spec import ExpertsSpec, ModelSpec, RopeKind, RopeScaling
from wlb.weights import expert_weights, hybrids
from wlb.weights.defaults import DEFAULTS, Defaults, default_ids
from wlb.weights.gemma import GEMMA, KEYS, full_rope, gemma_json, gemma_type, is_gemma, read_gemma
from wlb.weights.windows import WINDOW, flag, read_window, window_json

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **expert_weights.ARCHITECTURES,
    **hybrids.ARCHITECTURES,
}
"""Supported values of `architectures`, by model_type."""

_READ = """
    architectures attention_bias bos_token_id eos_token_id head_dim hidden_act hidden_size
    initializer_range intermediate_size layer_types max_position_embeddings mlp_bias model_type
    num_attention_heads num_hidden_layers num_key_value_heads partial_rotary_factor pretraining_tp
    quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    tie_word_embeddings vocab_size use_sliding_window max_window_layers
"""
# Keys that do not affect logits, in four groups. First: names, versions, custom code, settings of
# other libraries, and settings of how transformers runs the model. Second: special tokens. Third:
# dropout, which is off in evaluation. Fourth: settings of generation, which older versions of
# transformers wrote into config.json.
_HARMLESS = """
    _name_or_path name_or_path transformers_version torch_dtype dtype use_cache use_bfloat16
    torchscript return_dict output_hidden_states output_attentions attn_implementation
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled tf_legacy_loss
    chunk_size_feed_forward tokenizer_class finetuning_task task_specific_params problem_type
    id2label label2id unsloth_version unsloth_fixed max_sequence_length transformers.js_config
    auto_map custom_pipelines processor_class neftune_noise_alpha _commit_hash
    _attn_implementation_internal experts_implementation _experts_implementation
    is_llama_config is_decoder gradient_checkpointing
    pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id
    attention_dropout
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix
"""
_ROPE = """
    rope_type type rope_theta factor low_freq_factor high_freq_factor partial_rotary_factor
    original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim
    truncate
"""
"""Known keys of `rope_parameters` and `rope_scaling`."""
_KNOWN = frozenset(f"{_READ} {_HARMLESS} {expert_weights.READ} {expert_weights.HARMLESS}".split())
"""Keys of config.json that are read here, or that never affect logits."""
_MODEL = "AutoModelForCausalLM"
"""Key in config.json's `auto_map` under which the class of the model is named."""
_MORE = {
    "qwen3_moe": "use_qk_norm",
    **dict.fromkeys(GEMMA, KEYS),
    "gemma2": f"{KEYS} sliding_window_size",
    **dict.fromkeys(hybrids.ARCHITECTURES, f"{hybrids.READ} {hybrids.HARMLESS}"),
}
"""Further known keys of config.json, by model_type.

transformers does not read all of them: use_qk_norm and sliding_window_size only repeat what every
model of that type has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """The model that a config.json describes."""

    spec: ModelSpec
    model_type: str  # key `model_type`, such as "qwen3"
    max_positions: int  # longest text in training, in tokens
    bos_id: int | None = None  # token that begins a text; None if unknown
    eos_ids: tuple[int, ...] = ()  # tokens that end generation; empty if unknown
    # transformers' default for `eos_token_id` if the key is missing. It is only used if
    # generation_config.json names no token either.
    default_eos_ids: tuple[int, ...] = ()


def read_config(path: Path) -> HubModel:
    """Return the model that a config.json describes.

    Raises:
        UserError: `wlb.model` cannot compute the model.
    """
    values = read_object(path, wide=True)
    keys = Fields(values, str(path))
    text = hybrids.text_model(keys)
    model_type = _architecture(text, is_part=text is not keys)
    keys, values, usual = text, text.values, DEFAULTS[model_type]
    _refuse_other_maths(keys, model_type)
    num_heads = keys.whole("num_attention_heads")
    max_positions = keys.whole("max_position_embeddings", usual.positions)
    family = _family(keys, model_type)
    windows = {} if model_type in hybrids.ARCHITECTURES else read_window(keys, model_type)
    rope_keys = keys
    if model_type == "gemma3_text":
        rope_keys, base = full_rope(keys)
        family |= {"sliding_rope_theta": base} if windows else {}
    theta, share, scaling = _rope(rope_keys, max_positions, usual.rope_theta, model_type)
    experts = _experts(keys, model_type)
    # In Qwen3.5 with experts, every MLP consists of experts, so intermediate_size is missing.
    width = experts.hidden_size if model_type == hybrids.MIXTURE else None
    # If num_key_value_heads is missing, Llama takes num_attention_heads. Other families have a
    # fixed default that fits only one model size, so for them the key is required.
    needs_kv = model_type != "llama" and "num_key_value_heads" not in values
    tied = {"tie_word_embeddings": usual.is_tied, **values}
    spec = ModelSpec(
        vocab_size=keys.whole("vocab_size"),
        hidden_size=keys.whole("hidden_size"),
        num_layers=keys.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.whole("num_key_value_heads", None if needs_kv else num_heads),
        head_dim=keys.whole("head_dim") if values.get("head_dim") else usual.head_dim,
        ffn_hidden_size=keys.whole("intermediate_size", width),
        norm_eps=keys.real("rms_norm_eps", usual.norm_eps),
        experts=experts,
        tied_embeddings=flag(Fields(tied, keys.where), "tie_word_embeddings"),
        init_std=keys.real("initializer_range", 0.02),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_share=share,
        **family,
        **windows,
    )
    try:
        spec.check()
    except UserError as error:
        raise UserError(f"{path} describes a model that wlb does not support: {error}") from None
    made = HubModel(spec=spec, model_type=model_type, max_positions=max_positions)
    return _with_tokens(made, keys, usual)


def _with_tokens(model: HubModel, keys: Fields, usual: Defaults) -> HubModel:
    """Return the model with the ids of its BOS and EOS tokens.

    Args:
        model: The model without token ids.
        keys: Keys of its config.json.
        usual: transformers' defaults for missing keys.
    """
    size = model.spec.vocab_size
    bos = _token_ids(keys, "bos_token_id", size)
    bos = bos or default_ids(keys, "bos_token_id", usual.bos_id, size)
    return replace(
        model,
        bos_id=next(iter(bos), None),
        eos_ids=_token_ids(keys, "eos_token_id", size),
        default_eos_ids=default_ids(keys, "eos_token_id", usual.eos_id, size),
    )


def _family(keys: Fields, model_type: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that follow from the model_type.

    Sizes, sliding windows, RoPE and experts are read elsewhere.
    """
    if model_type in GEMMA:
        return read_gemma(keys, model_type)
    if model_type in hybrids.ARCHITECTURES:
        return hybrids.read_hybrid(keys, model_type)
    return {
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type.startswith("qwen3"),
        "qk_norm_rows": model_type == "olmoe",
    }


def _experts(keys: Fields, model_type: str) -> ExpertsSpec:
    """Return the experts that a config.json describes; `ExpertsSpec()` if there are none."""
    if model_type not in hybrids.ARCHITECTURES:
        return expert_weights.read_experts(keys, model_type)
    experts = hybrids.read_experts(keys, model_type)
    where = expert_weights.layers_with_experts(keys)
    if experts.num and model_type == hybrids.NEXT:
        return replace(experts, **where)
    if where != {"every": 1, "dense_layers": ()}:
        raise keys.error(
            "mlp_only_layers",
            f"and decoder_sparse_step must give experts to all layers, as every {model_type} has; "
            "remove both keys",
        )
    return experts


@dataclass(frozen=True, slots=True, kw_only=True)
class HubGeneration:
    """Contents of a generation_config.json."""

    settings: dict[str, Any]  # all keys except transformers_version and the ids of BOS and EOS
    eos_ids: tuple[int, ...]  # tokens that end generation


def read_generation(path: Path) -> HubGeneration:
    """Read a generation_config.json; the result is empty if the file does not exist."""
    if not path.is_file():
        return HubGeneration(settings={}, eos_ids=())
    values = read_object(path, wide=True)
    left_out = ("transformers_version", "bos_token_id", "eos_token_id", "_from_model_config")
    return HubGeneration(
        settings={key: value for key, value in values.items() if key not in left_out},
        eos_ids=_token_ids(Fields(values, str(path)), "eos_token_id"),
    )


def config_json(
    spec: ModelSpec,
    *,
    max_positions: int,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    dtype: str,
    model_type: str = "",
) -> dict[str, Any]:
    """Return the contents of a model's config.json, for transformers 4 and 5.

    Args:
        spec: The model.
        max_positions: Longest text in training, in tokens.
        bos_id: Token that begins a text; None if unknown.
        eos_ids: Tokens that end generation; empty if unknown.
        dtype: Type of the weights, such as "bfloat16".
        model_type: The model_type of the folder from which the model was imported, or "". It is
            used if several model types would compute the same.

    Raises:
        UserError: No supported model_type computes what this model computes.
    """
    model_type = _type_of(spec, model_type)
    rope = _rope_json(spec.rope_scaling)
    if model_type in hybrids.ARCHITECTURES:
        of_family = hybrids.hybrid_json(spec, model_type, rope)
    else:
        of_family = expert_weights.experts_json(spec, model_type) or window_json(spec, model_type)
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": rope,
        "rope_parameters": {"rope_theta": spec.rope_theta, **(rope or {"rope_type": "default"})},
        "attention_dropout": 0.0,
        **_FIXED.get(model_type, {}),
        **of_family,
        "tie_word_embeddings": spec.tied_embeddings,
        # Write null if a token is unknown, because transformers' defaults for Llama are 1 and 2.
        "bos_token_id": bos_id,
        "eos_token_id": one_or_many(eos_ids),
        "torch_dtype": dtype,
        "use_cache": True,
    } | (gemma_json(spec, model_type, rope) if model_type in GEMMA else {})


def _rope_json(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return the value of `rope_scaling` in config.json; None without scaling."""
    if not scaling.is_on:
        return None
    config: dict[str, Any] = {"rope_type": str(scaling.kind), "factor": scaling.factor}
    match scaling.kind:
        case RopeKind.LINEAR:
            return config
        case RopeKind.LLAMA3:
            config |= dict(
                zip(("low_freq_factor", "high_freq_factor"), scaling.bounds, strict=True)
            )
        case RopeKind.YARN:
            config |= dict(zip(("beta_slow", "beta_fast"), scaling.bounds, strict=True))
            if scaling.attention_factor:
                config["attention_factor"] = scaling.attention_factor
    return config | {"original_max_position_embeddings": scaling.original_context}


_FIXED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {},
    **{name: {} for name in GEMMA},
    "qwen2": {},
    "qwen3": {"attention_bias": False},
}
"""Keys of config.json that have the same value for every model of a model_type."""


def _type_of(spec: ModelSpec, preferred: str = "") -> str:
    """Return the model_type under which a model is exported.

    Args:
        spec: The model.
        preferred: The model_type that is taken if several compute the same; "" means none.

    Raises:
        UserError: No supported model_type computes what this model computes.
    """
    if hybrids.is_hybrid(spec):
        return hybrids.hybrid_type(spec, preferred)
    if spec.experts.num:
        return expert_weights.type_of(spec)
    if spec.qk_norm_rows:
        raise UserError(
            "model.qk_norm_rows = true cannot be exported without experts, because only OLMoE, "
            "which has experts, supports it; train with model.qk_norm_rows = false or with "
            "experts"
        )
    if is_gemma(spec):
        return gemma_type(spec)
    if spec.qkv_bias and spec.qk_norm:
        raise UserError(
            "model.qkv_bias = true and model.qk_norm = true cannot be exported together, because "
            "no supported model type of Hugging Face has both; train with one of them"
        )
    if spec.qkv_bias:
        if spec.head_dim not in (0, spec.hidden_size // spec.num_heads):
            raise UserError(
                f"model.head_dim = {spec.head_dim} cannot be exported as Qwen2 (model.qkv_bias = "
                "true), which requires hidden_size / num_heads = "
                f"{spec.hidden_size // spec.num_heads}; train with model.head_dim = "
                f"{spec.hidden_size // spec.num_heads}"
            )
        return "qwen2"
    if spec.qk_norm:
        return "qwen3"
    return "mistral" if spec.sliding_window else "llama"


def one_or_many(ids: tuple[int, ...]) -> int | list[int] | None:
    """Return token ids in the form of config.json: None for no id, the id itself, or a list."""
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def _architecture(keys: Fields, *, is_part: bool) -> str:
    """Return the model_type after checking that it is supported and fits `architectures`.

    Args:
        keys: Keys of the language model.
        is_part: Whether it is part of a vision-language model. `architectures` then names the
            whole model and is not checked.

    Raises:
        UserError: model_type or `architectures` is not supported.
    """
    why = f"is not supported; wlb supports {', '.join(ARCHITECTURES.values())}"
    model_type = keys.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise keys.error("model_type", why)
    expected = [ARCHITECTURES[model_type]]
    if not is_part and (keys.values.get("architectures") or expected) != expected:
        raise keys.error("architectures", why)
    return model_type


def _refuse_other_maths(keys: Fields, model_type: str) -> None:
    """Raise UserError for a key with which transformers computes something that wlb does not.

    Args:
        keys: Keys of the language model.
        model_type: Its model_type.
    """
    values = keys.values
    if values.get("quantization_config"):
        raise keys.error(
            "quantization_config",
            "means quantised weights, which wlb cannot import; import the original weights",
        )
    is_silu = values.get("hidden_act", "silu") in ("silu", "swish")
    # Gemma's activation is under hidden_activation; transformers ignores hidden_act for Gemma.
    if not is_silu and model_type not in GEMMA:
        raise keys.error(
            "hidden_act", "must be silu, the only activation that wlb supports besides Gemma's"
        )
    code: Any = values.get("auto_map") or {}
    named = cast("dict[str, Any]", code).get(_MODEL) if isinstance(code, dict) else code
    # Accept custom code if its class has the same name as the class in transformers. Such code
    # computes the same, for example with a faster attention kernel.
    if named is not None and str(named).rpartition(".")[2] != ARCHITECTURES[model_type]:
        raise keys.error(
            "auto_map", f"names code of another model than {ARCHITECTURES[model_type]}"
        )
    for name in ("attention_bias", "mlp_bias"):
        if flag(keys, name):
            raise keys.error(name, "is not supported, because wlb has no such biases")
    if keys.whole("pretraining_tp", 1) != 1:
        raise keys.error("pretraining_tp", "must be 1, because wlb does not split matrix products")
    known = _KNOWN.union(_MORE.get(model_type, "").split())
    window = values.get("sliding_window", WINDOW)
    if model_type == "gemma2" and values.get("sliding_window_size", window) != window:
        raise keys.error("sliding_window_size", f"contradicts the window of {window}; remove it")
    for name, value in values.items():
        if name not in known and value not in (None, False, {}, []):
            raise keys.error(
                name,
                "is an unknown key that may change what the model computes; remove the key if it "
                "does not",
            )


def _rope(
    keys: Fields, max_positions: int, default: float, model_type: str
) -> tuple[float, float, RopeScaling]:
    """Return RoPE's base, the share of each head that it rotates, and its scaling.

    transformers 5 writes them as `rope_parameters`; transformers 4 as `rope_theta`,
    `partial_rotary_factor` and `rope_scaling`. If a file has both forms, they must agree.

    Args:
        keys: Keys of config.json.
        max_positions: Longest text in training, in tokens.
        default: RoPE's base if no key gives it.
        model_type: The model_type.
    """
    values = keys.values
    given = [name for name in ("rope_parameters", "rope_scaling") if values.get(name)]
    for name in given:
        if not isinstance(values[name], dict):
            raise keys.error(name, "must be a JSON object")
    ropes = [Fields(values[name], f"{keys.where}: {name}") for name in given] or [Fields({}, "")]
    read = [
        (
            _theta(keys, rope, default, model_type),
            _share(keys, rope, model_type),
            _one_rope(rope, max_positions),
        )
        for rope in ropes
    ]
    if read[0] != read[-1]:
        raise UserError(
            f"{keys.where}: rope_parameters = {values['rope_parameters']} contradicts "
            f"rope_scaling = {values['rope_scaling']} with rope_theta = "
            f"{values.get('rope_theta')}; remove the wrong one"
        )
    return read[0]


def _theta(keys: Fields, rope: Fields, default: float, model_type: str) -> float:
    """Return RoPE's base, after checking that all of RoPE's keys are known.

    Args:
        keys: Keys of config.json.
        rope: Keys of its `rope_parameters` or `rope_scaling`.
        default: The base if no key gives it.
        model_type: The model_type.
    """
    known = f"{_ROPE} {hybrids.ROPE if model_type in hybrids.ARCHITECTURES else ''}".split()
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.error(name, "differs between layers, which wlb reads only in Gemma 3")
        if name not in known and value not in (None, False):
            raise rope.error(
                name, "is an unknown key that may change RoPE; remove it if it does not"
            )
    theta = rope.real("rope_theta", keys.real("rope_theta", default))
    if keys.real("rope_theta", theta) != theta:
        raise keys.error("rope_theta", f"contradicts the {theta} of {rope.where}")
    return theta


def _share(keys: Fields, rope: Fields, model_type: str) -> float:
    """Return the share of each head's channels that RoPE rotates, from 0 to 1.

    Args:
        keys: Keys of config.json.
        rope: Keys of its `rope_parameters` or `rope_scaling`.
        model_type: The model_type.
    """
    if model_type in hybrids.ARCHITECTURES:
        return hybrids.read_share(keys, rope)
    for each in (keys, rope):
        if each.real("partial_rotary_factor", 1.0) != 1.0:
            raise each.error(
                "partial_rotary_factor",
                f"must be 1, because wlb rotates whole heads of a {model_type}",
            )
    return 1.0


def _one_rope(rope: Fields, max_positions: int) -> RopeScaling:
    """Return RoPE's scaling from the keys of `rope_parameters` or of `rope_scaling`.

    Args:
        rope: The keys.
        max_positions: Longest text in training, in tokens.
    """
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope.values.get("type") not in (None, kind):
        raise rope.error("type", f"contradicts rope_type = {kind!r}; remove the wrong one")
    if kind == "default":
        return RopeScaling()
    if kind not in list(RopeKind):
        raise UserError(
            f"{rope.where}: rope_type = {kind!r} is not supported, so this model cannot be "
            f"imported; supported types are default, {', '.join(RopeKind)}"
        )
    return _scaling(RopeKind(kind), rope, max_positions)


def _scaling(kind: RopeKind, rope: Fields, max_positions: int) -> RopeScaling:
    """Return RoPE's scaling for a rope_type other than "default".

    Args:
        kind: The rope_type.
        rope: Keys of `rope_parameters` or `rope_scaling`.
        max_positions: Longest text in training, in tokens.
    """
    factor = rope.real("factor")
    if kind == RopeKind.LINEAR:
        return RopeScaling(kind=kind, factor=factor)
    original = rope.whole("original_max_position_embeddings", max_positions)
    if kind == RopeKind.LLAMA3:
        return RopeScaling(
            factor=factor,
            turns=(rope.real("low_freq_factor"), rope.real("high_freq_factor")),
            original_context=original,
        )
    if rope.values.get("truncate") is False:
        raise rope.error(
            "truncate",
            "must be true, because wlb's YaRN rounds the range of blended channels to whole pairs",
        )
    scales = [rope.real(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    # If attention_factor is missing, compute it as transformers does.
    attention_factor = rope.real("attention_factor", 0.0)
    if not attention_factor and all(scales) and factor > 1:
        numerator, denominator = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
        attention_factor = numerator / denominator
    return RopeScaling(
        kind=kind,
        factor=factor,
        turns=(rope.real("beta_slow", 1.0), rope.real("beta_fast", 32.0)),
        attention_factor=attention_factor,
        original_context=original,
    )


def _token_ids(keys: Fields, name: str, vocab_size: int = 2**31) -> tuple[int, ...]:
    """Return the token ids under a key whose value may be null, one id or a list of ids.

    Raises:
        UserError: The value has another type, or an id is not below `vocab_size`.
    """
    value = keys.values.get(name)
    ids: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    ids = [i for i in ids if i is not None]
    if not all(type(i) is int for i in ids):
        raise keys.error(name, "must be a token id or a list of token ids")
    if not all(0 <= i < vocab_size for i in ids):
        raise keys.error(name, f"must be between 0 and {vocab_size - 1}, a token of the vocabulary")
    return tuple(ids)
