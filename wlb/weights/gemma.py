"""Read and write the keys of config.json that only Gemma 2 and Gemma 3 (text models) have.

Both have norms with weights centred at zero, norms after attention and MLP, scaled embeddings and
GeGLU. Gemma 2 also has soft caps of attention scores and logits. Gemma 3 also has norms of queries
and keys, and another RoPE base in layers with a sliding window.
"""

from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.read_file import Fields
from wlb.spec import Activation, ModelSpec

GEMMA = ("gemma2", "gemma3_text")
"""Supported Gemma models, as values of model_type."""
KEYS = """
    attn_logit_softcapping final_logit_softcapping hidden_activation query_pre_attn_scalar
    rope_local_base_freq sliding_window_pattern _sliding_window_pattern use_bidirectional_attention
    cache_implementation
"""
"""Keys of config.json that only Gemma models have."""
_GELU = ("gelu_pytorch_tanh",)
"""Supported values of `hidden_activation`."""
_SIZE = 256
"""transformers' default for `query_pre_attn_scalar`."""
_LOCAL_BASE = 10_000.0
"""transformers' default for RoPE's base in layers with a sliding window."""


def read_gemma(keys: Fields, model_type: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that only Gemma sets, except windows and RoPE.

    Raises:
        UserError: wlb would compute the model differently from transformers.
    """
    values = keys.values
    if values.get("use_bidirectional_attention"):
        raise keys.error(
            "use_bidirectional_attention", "is not supported, because attention in wlb is causal"
        )
    if values.get("hidden_activation", _GELU[0]) not in _GELU:
        raise keys.error("hidden_activation", f"must be {_GELU[0]}, the activation of Gemma")
    if model_type == "gemma3_text" and values.get("attn_logit_softcapping"):
        raise keys.error(
            "attn_logit_softcapping", "is ignored by transformers for a Gemma 3; remove the key"
        )
    is_second = model_type == "gemma2"
    return {
        "activation": Activation.GELU_TANH,
        "branch_norms": True,
        "zero_centred_norms": True,
        "scaled_embeddings": True,
        "qk_norm": not is_second,
        "query_scale_size": keys.whole("query_pre_attn_scalar", _SIZE),
        "attention_softcap": _cap(keys, "attn_logit_softcapping", 50.0 if is_second else 0.0),
        "logit_softcap": _cap(keys, "final_logit_softcapping", 30.0 if is_second else 0.0),
    }


def _cap(keys: Fields, name: str, default: float) -> float:
    """Return the value of a key that is a soft cap; 0 means no cap.

    Args:
        keys: Keys of config.json.
        name: The key; null means no cap.
        default: transformers' default if the key is missing.
    """
    return keys.real(name, 0.0) if name in keys.values else default


def full_rope(keys: Fields) -> tuple[Fields, float]:
    """Separate the RoPE of a Gemma 3's full-attention layers from that of its sliding layers.

    Args:
        keys: Keys of config.json.

    Returns:
        A copy of the keys in which rope_parameters and rope_theta are those of full-attention
        layers, and RoPE's base in sliding layers.
    """
    values: dict[str, Any] = dict(keys.values)
    both: Any = values.get("rope_parameters") or {}
    where = f"{keys.where}: rope_parameters"
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(both, dict) or set(cast("dict[str, Any]", both)) - set(kinds):
        raise keys.error("rope_parameters", f"must hold {' and '.join(kinds)} and nothing else")
    parts: list[Any] = [cast("dict[str, Any]", both).get(kind) or {} for kind in kinds]
    if not all(isinstance(part, dict) for part in parts):
        raise keys.error("rope_parameters", "must hold a JSON object for each kind of layer")
    full, sliding = cast("list[dict[str, Any]]", parts)
    local = Fields(sliding, f"{where}: sliding_attention")
    if local.values.get("rope_type", "default") != "default":
        raise local.error("rope_type", "must be default: wlb does not scale RoPE in sliding layers")
    theta = full.get("rope_theta") or values.get("rope_theta")
    values |= {"rope_parameters": full, "rope_theta": theta}
    base = local.real("rope_theta", keys.real("rope_local_base_freq", _LOCAL_BASE))
    return Fields(values, keys.where), base


def is_gemma(spec: ModelSpec) -> bool:
    """Return whether a model has a part that, of all supported models, only Gemma has."""
    return bool(
        spec.zero_centred_norms
        or spec.branch_norms
        or spec.scaled_embeddings
        or spec.activation != Activation.SILU
        or spec.attention_softcap
        or spec.logit_softcap
        or spec.query_scale_size
        or spec.sliding_rope_theta
    )


def gemma_type(spec: ModelSpec) -> str:
    """Return the Gemma model_type under which a model is exported.

    Raises:
        UserError: The model lacks a part of Gemma or has a part that Gemma does not have.
    """
    has = {
        "zero_centred_norms": spec.zero_centred_norms,
        "branch_norms": spec.branch_norms,
        "scaled_embeddings": spec.scaled_embeddings,
        "sliding_window": spec.sliding_window > 0,
    }
    lacking = [name for name, is_there in has.items() if not is_there]
    model_type = "gemma3_text" if spec.qk_norm else "gemma2"
    if spec.activation != Activation.GELU_TANH:
        lacking.append("activation = gelu_tanh")
    found = [name for name in ("qkv_bias",) if getattr(spec, name)]
    # Soft caps exist only in Gemma 2, and a RoPE base for sliding layers only in Gemma 3.
    only = ("attention_softcap",) if spec.qk_norm else ("sliding_rope_theta",)
    found += [name for name in only if getattr(spec, name)]
    if lacking or found:
        words = f"lacks model.{', model.'.join(lacking)}" if lacking else ""
        words += " and " if lacking and found else ""
        words += f"has model.{', model.'.join(found)}" if found else ""
        raise UserError(
            f"the model cannot be exported: {model_type} is the most similar model type of Hugging "
            f"Face, but the model {words}; train with exactly the parts of {model_type}"
        )
    return model_type


def gemma_json(spec: ModelSpec, model_type: str, rope: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keys of config.json that Gemma adds to those of LLaMA, or replaces.

    Args:
        spec: The model.
        model_type: "gemma2" or "gemma3_text".
        rope: RoPE's scaling in the form of config.json; None without scaling.
    """
    config: dict[str, Any] = {
        "hidden_activation": _GELU[0],
        "hidden_act": _GELU[0],
        "query_pre_attn_scalar": spec.query_scale_size or spec.head_size,
        "attn_logit_softcapping": spec.attention_softcap or None,
        "final_logit_softcapping": spec.logit_softcap or None,
        "attention_bias": False,
    }
    if model_type == "gemma3_text":
        local = spec.sliding_rope_theta or spec.rope_theta
        if not spec.sliding_rope_theta and spec.rope_scaling.is_on:
            raise UserError(
                "model.sliding_rope_theta = 0 with model.rope_scaling cannot be exported, "
                "because Gemma 3 does not scale RoPE in its sliding layers; train with "
                "model.sliding_rope_theta above 0 (Gemma 3: 10000)"
            )
        full = {"rope_theta": spec.rope_theta, **(rope or {"rope_type": "default"})}
        sliding = {"rope_theta": local, "rope_type": "default"}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
        config["rope_local_base_freq"] = local
    return config
