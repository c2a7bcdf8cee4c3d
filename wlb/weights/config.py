"""Convert between Hugging Face's config.json and ModelSpec.

Reads the keys of transformers 4 and 5 with transformers' defaults for missing keys, and writes both
forms. Models that `wlb.model` would compute differently are refused with key, value and remedy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from wlb.plan import UserError
from wlb.spec import ModelSpec, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures by model_type. Mistral without a sliding window computes the same as Llama."""
_QWEN3_HEAD = 128
"""Default of transformers for a Qwen3 whose config.json has no head_dim."""

_MISTRAL_WINDOW = 4096
"""Default of transformers for a Mistral whose config.json has no sliding_window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """Contents of a config.json. max_positions: longest text in training. bos_id, eos_ids: None and
    empty if unknown."""

    spec: ModelSpec
    max_positions: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


class _Keys:
    """Typed look-ups in a JSON object; UserError with the file, the key and its value."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.error(name, "must be an integer of at least 1")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "must be a number")
        return float(value)

    def error(self, name: str, why: str) -> UserError:
        said = repr(self.values[name]) if name in self.values else "(missing)"
        return UserError(f"{self.where}: {name} = {said} {why}")


def read_config(path: Path) -> HubModel:
    """Read the model of a config.json; UserError for a model that `wlb.model` cannot compute."""
    values = read_json(path)
    keys = _Keys(values, str(path))
    model_type = _architecture(keys)
    _refuse_other_maths(keys, model_type)
    num_heads = keys.whole("num_attention_heads")
    is_qwen = model_type.startswith("qwen")
    max_positions = keys.whole("max_position_embeddings", 32768 if is_qwen else 2048)
    theta, scaling = _rope(keys, max_positions)
    # Other defaults than Llama's do not depend on num_attention_heads, so the key is required.
    needs_kv = model_type != "llama" and "num_key_value_heads" not in values
    head_dim = _QWEN3_HEAD if model_type == "qwen3" else 0
    spec = ModelSpec(
        vocab_size=keys.whole("vocab_size"),
        hidden_size=keys.whole("hidden_size"),
        num_layers=keys.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.whole("num_key_value_heads", None if needs_kv else num_heads),
        head_dim=keys.whole("head_dim") if values.get("head_dim") else head_dim,
        ffn_hidden_size=keys.whole("intermediate_size"),
        norm_eps=keys.real("rms_norm_eps", 1e-6),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        init_std=keys.real("initializer_range", 0.02),
        rope_theta=theta,
        rope_scaling=scaling,
    )
    try:
        spec.check()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return HubModel(
        spec=spec,
        max_positions=max_positions,
        bos_id=next(iter(_token_ids(keys, "bos_token_id")), None),
        eos_ids=_token_ids(keys, "eos_token_id"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubGeneration:
    """Contents of a generation_config.json. settings: all but what names the library's version and
    the ids of BOS and EOS. eos_ids: the tokens that end generation."""

    settings: dict[str, Any]
    eos_ids: tuple[int, ...]


def read_generation(path: Path) -> HubGeneration:
    """Read a generation_config.json; empty where there is none."""
    if not path.is_file():
        return HubGeneration(settings={}, eos_ids=())
    values = read_json(path)
    left_out = ("transformers_version", "bos_token_id", "eos_token_id", "_from_model_config")
    return HubGeneration(
        settings={key: value for key, value in values.items() if key not in left_out},
        eos_ids=_token_ids(_Keys(values, str(path)), "eos_token_id"),
    )


def config_json(
    spec: ModelSpec, *, max_positions: int, bos_id: int | None, eos_ids: tuple[int, ...], dtype: str
) -> dict[str, Any]:
    """Return the config.json of a model, for transformers 4 and 5. dtype: such as "bfloat16"."""
    model_type = _type_of(spec)
    scaling = spec.rope_scaling
    llama3 = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    rope = None if scaling.factor == 1.0 else llama3
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
        **_FIXED[model_type],
        "tie_word_embeddings": spec.tied_embeddings,
        # Written even if unknown, because LlamaConfig defaults to 1 and 2.
        "bos_token_id": bos_id,
        "eos_token_id": one_or_many(eos_ids),
        "torch_dtype": dtype,
        "use_cache": True,
    }


_FIXED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "qwen3": {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
}
"""Keys of a config.json by model_type whose values wlb's parts decide."""


def _type_of(spec: ModelSpec) -> str:
    """The model_type whose parts are a model's; UserError if transformers has none."""
    if spec.qkv_bias and spec.qk_norm:
        raise UserError(
            "model.qkv_bias = true and model.qk_norm = true: no model of transformers has biases "
            "of Q, K and V alone together with norms of heads; export a model with one of them"
        )
    if spec.qkv_bias:
        if spec.head_dim not in (0, spec.hidden_size // spec.num_heads):
            raise UserError(
                f"model.head_dim = {spec.head_dim}: heads of Qwen2, which has qkv_bias, are "
                f"hidden_size / num_heads = {spec.hidden_size // spec.num_heads} wide"
            )
        return "qwen2"
    return "qwen3" if spec.qk_norm else "llama"


def one_or_many(ids: tuple[int, ...]) -> int | list[int] | None:
    """Return token ids as in config.json: null, one id, or a list."""
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; UserError naming the file for anything else."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a JSON object, got {type(values).__name__}")
    return cast("dict[str, Any]", values)


def _architecture(keys: _Keys) -> str:
    """Return model_type; UserError if it or `architectures` is not supported."""
    why = f"is not known here; wlb reads {', '.join(ARCHITECTURES.values())}"
    model_type = keys.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise keys.error("model_type", why)
    expected = [ARCHITECTURES[model_type]]
    if (keys.values.get("architectures") or expected) != expected:
        raise keys.error("architectures", why)
    return model_type


def _refuse_other_maths(keys: _Keys, model_type: str) -> None:
    values = keys.values
    if values.get("quantization_config"):
        raise keys.error("quantization_config", "means quantised weights; import the original ones")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.error("hidden_act", "is not silu, the only activation that wlb has")
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise keys.error(name, "requires biases that wlb's linear layers do not have")
    if model_type.startswith("qwen"):
        layers: Any = values.get("layer_types") or []
        if values.get("use_sliding_window"):
            raise keys.error("use_sliding_window", "needs windows, which wlb's attention lacks")
        if any(kind != "full_attention" for kind in layers):
            raise keys.error("layer_types", "has others than full_attention, which wlb lacks")
    window = values.get("sliding_window", _MISTRAL_WINDOW)
    if model_type == "mistral" and window is not None:
        raise UserError(
            f"{keys.where}: sliding_window = {window}: wlb's attention has no window; only a "
            f"Mistral with sliding_window = null computes the same as a Llama"
        )


def _rope(keys: _Keys, max_positions: int) -> tuple[float, RopeScaling]:
    """Read base and scaling from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    values = keys.values
    given = [name for name in ("rope_parameters", "rope_scaling") if values.get(name)]
    for name in given:
        if not isinstance(values[name], dict):
            raise keys.error(name, "must be a JSON object")
    read = [
        _one_rope(keys, _Keys(values[name], f"{keys.where}: {name}"), max_positions)
        for name in given
    ] or [(keys.real("rope_theta", 10000.0), RopeScaling())]
    if read[0] != read[-1]:
        raise UserError(
            f"{keys.where}: rope_parameters = {values['rope_parameters']} and rope_scaling = "
            f"{values['rope_scaling']} (rope_theta = {values.get('rope_theta')}) contradict each "
            f"other; remove the wrong one"
        )
    return read[0]


def _one_rope(keys: _Keys, rope: _Keys, max_positions: int) -> tuple[float, RopeScaling]:
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.error(name, "differs between layers: wlb uses the same RoPE in all layers")
    theta = rope.real("rope_theta", keys.real("rope_theta", 10000.0))
    if keys.real("rope_theta", theta) != theta:
        raise keys.error("rope_theta", f"contradicts the {theta} of {rope.where}")
    for each in (keys, rope):
        if each.real("partial_rotary_factor", 1.0) != 1.0:
            raise each.error("partial_rotary_factor", "is not 1: wlb rotates whole heads")
    match rope.values.get("rope_type", rope.values.get("type", "default")):
        case "default":
            return theta, RopeScaling()
        case "llama3":
            return theta, RopeScaling(
                factor=rope.real("factor"),
                low_freq_factor=rope.real("low_freq_factor"),
                high_freq_factor=rope.real("high_freq_factor"),
                original_context=rope.whole("original_max_position_embeddings", max_positions),
            )
        case other:
            raise UserError(
                f"{rope.where}: rope_type = {other!r} is not known here; wlb computes default and "
                f"llama3"
            )


def _token_ids(keys: _Keys, name: str) -> tuple[int, ...]:
    value = keys.values.get(name)
    ids: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    ids = [i for i in ids if i is not None]
    if not all(type(i) is int for i in ids):
        raise keys.error(name, "must be a token id or a list of them")
    return tuple(ids)
