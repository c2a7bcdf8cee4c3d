"""Read and write Qwen3-Next and the language models of Qwen3.5 in Hugging Face folders.

These models are hybrids: some layers are linear attention (gated delta nets), the others are usual
attention with an output gate and with RoPE on a part of each head. wlb.model computes both families
with the same layers, but their files fuse the projections of linear attention differently:

    Qwen3-Next   in_proj_qkvz = queries, keys, values and gates, ordered by key head
    Qwen3.5      in_proj_qkv  = queries, keys and values, one after the other

Released Qwen3.5 checkpoints are vision-language models; only their language model is read.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from wlb.plan import UserError
from wlb.plan.read_file import Fields
from wlb.spec import Activation, ExpertBalance, ExpertsSpec, LinearSpec, ModelSpec, Scoring

NEXT, DENSE, MIXTURE = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
ARCHITECTURES = {
    NEXT: "Qwen3NextForCausalLM",
    DENSE: "Qwen3_5ForCausalLM",
    MIXTURE: "Qwen3_5MoeForCausalLM",
}
"""Supported values of `architectures`, by model_type."""
WITH_IMAGES = {"qwen3_5": DENSE, "qwen3_5_moe": MIXTURE}
"""For each vision-language model_type, the model_type of its language model (`text_config`)."""
LEFT_OUT = {"mtp.": "the layer for multi-token prediction", "model.visual.": "the vision encoder"}
"""Name prefixes of tensors that are not part of the language model, and what they belong to."""
TEXT_PREFIX = "model.language_model."
"""Name prefix of the language model's tensors in the folder of a vision-language model.

In the folder of a language model the prefix is `model.`."""
READ = """
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim full_attention_interval attn_output_gate shared_expert_intermediate_size
    num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers
"""
"""Keys of config.json that Qwen3-Next and Qwen3.5 have in addition to those of Qwen3."""
HARMLESS = """
    mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype router_aux_loss_coef
    output_router_logits
"""
"""Keys that do not affect logits: multi-token prediction, auxiliary losses, dtype of states."""
ROPE = "mrope_section mrope_interleaved"
"""Keys of RoPE that matter only for images.

They say how RoPE uses the three coordinates of an image position; in text all three are equal."""

_FULL, _LINEAR = "full_attention", "linear_attention"
_SHARE = 0.25
"""transformers' default for partial_rotary_factor."""
_SIZES = {
    "linear_num_value_heads": ("num_value_heads", 32),
    "linear_num_key_heads": ("num_key_heads", 16),
    "linear_key_head_dim": ("key_head_dim", 128),
    "linear_value_head_dim": ("value_head_dim", 128),
    "linear_conv_kernel_dim": ("conv_kernel_dim", 4),
}
"""For each key of config.json: the field of `LinearSpec`, and transformers' default."""
_EXPERTS = {NEXT: (512, 10), MIXTURE: (256, 8)}
"""transformers' defaults for num_experts and num_experts_per_tok, by model_type."""
_WIDTH = 512
"""transformers' default for moe_intermediate_size and shared_expert_intermediate_size."""


def text_model(keys: Fields) -> Fields:
    """Return the keys of the language model in a config.json.

    For a vision-language model they are those of `text_config`. For other models all keys are
    returned unchanged.
    """
    model_type = WITH_IMAGES.get(str(keys.values.get("model_type")))
    if model_type is None:
        return keys
    text: Any = keys.values.get("text_config")
    if not isinstance(text, dict):
        raise keys.error("text_config", "must be a JSON object with the keys of the text model")
    made = Fields(cast("dict[str, Any]", text), f"{keys.where}: text_config")
    if made.values.get("model_type", model_type) != model_type:
        raise made.error("model_type", f"must be {model_type} in this vision-language model")
    # Some keys of the whole model apply to its language model as well.
    shared = {k: keys.values[k] for k in ("quantization_config",) if k in keys.values}
    tied = [
        f.values["tie_word_embeddings"] for f in (keys, made) if "tie_word_embeddings" in f.values
    ]
    if tied and tied[0] != tied[-1]:
        raise keys.error("tie_word_embeddings", f"contradicts the {tied[-1]} of text_config")
    shared |= {"tie_word_embeddings": tied[0]} if tied else {}
    return Fields({**made.values, **shared, "model_type": model_type}, made.where)


def read_hybrid(keys: Fields, model_type: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that only hybrids set, except RoPE and experts.

    Raises:
        UserError: wlb would compute the model differently from transformers.
    """
    if keys.values.get("attn_output_gate", True) is not True:
        raise keys.error(
            "attn_output_gate", f"must be true, because attention of a {model_type} has a gate"
        )
    if keys.values.get("use_sliding_window"):
        raise keys.error(
            "use_sliding_window", f"must be false, because a {model_type} has no sliding windows"
        )
    linear = LinearSpec(
        **{field: keys.whole(name, usual) for name, (field, usual) in _SIZES.items()}
    )
    return {
        "qk_norm": True,
        "attention_gate": True,
        "zero_centred_norms": True,
        **_pattern(keys, linear),
    }


def _pattern(keys: Fields, linear: LinearSpec) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that say which layers are linear attention.

    The result is {} if no layer is linear attention. Otherwise all layers except every n-th must be
    linear attention; another pattern raises UserError.

    Args:
        keys: Keys of config.json.
        linear: Sizes of the linear-attention layers.
    """
    num_layers = keys.whole("num_hidden_layers", at_most=10_000)
    every = keys.whole("full_attention_interval", 4)
    listed: Any = keys.values.get("layer_types")
    usual = [_FULL if (i + 1) % every == 0 else _LINEAR for i in range(num_layers)]
    types = cast("list[Any]", listed if isinstance(listed, list) else [listed]) if listed else usual
    if any(one not in (_FULL, _LINEAR) for one in types):
        raise keys.error("layer_types", f"must contain only {_FULL} and {_LINEAR}")
    if len(types) != num_layers:
        raise keys.error("layer_types", f"must have {num_layers} entries, one for each layer")
    if _LINEAR not in types:
        return {}
    first = types.index(_FULL) + 1 if _FULL in types else 0
    if not first or types != [
        _FULL if (i + 1) % first == 0 else _LINEAR for i in range(num_layers)
    ]:
        raise keys.error(
            "layer_types",
            "must have full attention in every n-th layer and linear attention in all others, "
            "because wlb supports no other pattern",
        )
    return {"full_every": first, "linear": linear}


def read_share(keys: Fields, rope: Fields) -> float:
    """Return the share of each head's channels that RoPE rotates, from 0 to 1.

    Args:
        keys: Keys of config.json, which contain the share in older files (partial_rotary_factor).
        rope: Keys of its rope_parameters, which contain the share in newer files.
    """
    share = keys.real("partial_rotary_factor", _SHARE)
    share = rope.real("partial_rotary_factor", share)
    if keys.real("partial_rotary_factor", share) != share:
        raise keys.error("partial_rotary_factor", f"contradicts the {share} of {rope.where}")
    return share


def read_experts(keys: Fields, model_type: str) -> ExpertsSpec:
    """Return the experts that a config.json describes; `ExpertsSpec()` if there are none."""
    if model_type == DENSE or keys.values.get("num_experts") == 0:
        return ExpertsSpec()
    num, per_token = _EXPERTS[model_type]
    width = keys.whole("moe_intermediate_size", _WIDTH)
    shared = keys.whole("shared_expert_intermediate_size", _WIDTH)
    if shared % width:
        raise keys.error(
            "shared_expert_intermediate_size",
            f"must be a multiple of moe_intermediate_size = {width}, because wlb's shared experts "
            f"are as large as the others",
        )
    normalised = keys.values.get("norm_topk_prob", True)
    if not isinstance(normalised, bool) or not (normalised or model_type == NEXT):
        why = "must be true or false" if model_type == NEXT else f"must be true in a {MIXTURE}"
        raise keys.error("norm_topk_prob", why)
    return ExpertsSpec(
        num=keys.whole("num_experts", num),
        per_token=keys.whole("num_experts_per_tok", per_token),
        hidden_size=width,
        shared=shared // width,
        shared_gate=True,
        normalised=normalised,
    )


def is_hybrid(spec: ModelSpec) -> bool:
    """Return whether a model has a part that only Qwen3-Next and Qwen3.5 have.

    These parts are linear attention, an output gate of attention, RoPE on a part of each head, and
    a gate of the shared experts. No other family that wlb imports or exports has one of them.
    """
    return bool(
        spec.linear.num_value_heads
        or spec.attention_gate
        or spec.rotary_share != 1.0
        or spec.experts.shared_gate
    )


def chosen_type(spec: ModelSpec, preferred: str = "") -> str:
    """Return the model_type under which a model with linear attention (a hybrid) is exported.

    If several model types compute the same, `preferred` is chosen.

    Args:
        spec: The model.
        preferred: The model_type of the folder from which the model was imported; "" if it was not
            imported.
    """
    if not spec.experts.num:
        return preferred if preferred in (NEXT, DENSE) else DENSE
    everywhere = spec.num_expert_layers == spec.num_layers
    fits = preferred == MIXTURE and spec.experts.normalised and everywhere
    return MIXTURE if fits else NEXT


def hybrid_type(spec: ModelSpec, preferred: str = "") -> str:
    """Return the model_type under which a hybrid is exported, after checking all of its parts.

    Args:
        spec: The model.
        preferred: The model_type of the folder from which the model was imported; "" if it was not
            imported.

    Raises:
        UserError: The model lacks a part that this model_type always has, or has a part that it
            cannot have.
    """
    model_type, experts = chosen_type(spec, preferred), spec.experts
    required: dict[str, tuple[Any, Any]] = {
        "attention_gate": (spec.attention_gate, True),
        "qk_norm": (spec.qk_norm, True),
        "zero_centred_norms": (spec.zero_centred_norms, True),
        "activation": (spec.activation, Activation.SILU),
    }
    for name in ("qkv_bias", "qk_norm_rows", "branch_norms", "scaled_embeddings"):
        required[name] = (getattr(spec, name), False)
    for name in ("sliding_window", "full_first", "attention_softcap", "logit_softcap"):
        required[name] = (getattr(spec, name), 0)
    for name in ("query_scale_size", "sliding_rope_theta"):
        required[name] = (getattr(spec, name), 0)
    if experts.num:
        required["experts.shared_gate"] = (experts.shared_gate, True)
        required["experts.scoring"] = (experts.scoring, Scoring.SOFTMAX)
    for name, (value, wanted) in required.items():
        if value != wanted:
            raise UserError(
                f"model.{name} = {_toml_text(value)} cannot be exported, because {model_type}, "
                f"the closest model type of Hugging Face, always has {_toml_text(wanted)}; train "
                f"with model.{name} = {_toml_text(wanted)}"
            )
    if experts.num and experts.balance == ExpertBalance.BIAS:
        raise UserError(
            f"model.experts.balance = bias cannot be exported, because {model_type} does not "
            "choose experts by biases; train with model.experts.balance = aux_loss or none"
        )
    return model_type


def _toml_text(value: Any) -> str:
    """Return a value as text in the form of a TOML file, such as "true"."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def hybrid_json(spec: ModelSpec, model_type: str, rope: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keys of config.json that a hybrid adds to those of Qwen3, or replaces.

    Args:
        spec: The model.
        model_type: The model_type of the config.json.
        rope: RoPE's scaling in the form of config.json; None without scaling.
    """
    linear = spec.linear if spec.linear.num_value_heads else LinearSpec(num_value_heads=32)
    types = [_LINEAR if spec.is_linear(i) else _FULL for i in range(spec.num_layers)]
    share = {"partial_rotary_factor": spec.rotary_share}
    scaling = rope or {"rope_type": "default"}
    config: dict[str, Any] = {
        **{name: getattr(linear, field) for name, (field, _) in _SIZES.items()},
        "layer_types": types,
        "attention_bias": False,
        **share,
        "rope_parameters": {"rope_theta": spec.rope_theta, **scaling, **share},
    }
    if spec.full_every:
        # Older versions of transformers read full_attention_interval instead of layer_types.
        config["full_attention_interval"] = spec.full_every
    if model_type == NEXT:
        config |= {
            "decoder_sparse_step": spec.experts.every,
            "mlp_only_layers": list(spec.experts.dense_layers),
            "norm_topk_prob": spec.experts.normalised,
            "num_experts": spec.experts.num,
        }
    if spec.experts.num:
        config |= {
            "num_experts": spec.experts.num,
            "num_experts_per_tok": spec.experts.per_token,
            "moe_intermediate_size": spec.experts.hidden_size,
            "shared_expert_intermediate_size": spec.experts.shared_hidden_size,
        }
    return config


class TensorPart(NamedTuple):
    """Which rows of a fused tensor in a Hugging Face folder belong to one parameter."""

    name: str  # name of the fused tensor, after `linear_attn.`
    shape: tuple[int, ...]  # shape of the fused tensor
    # For each row of the parameter, its index in the fused tensor, shape [rows of the parameter].
    rows: Tensor


@lru_cache
def parts_of(spec: ModelSpec, model_type: str) -> dict[str, TensorPart]:
    """Return where a linear-attention layer's parameters are in the fused tensors of a folder.

    Args:
        spec: The model.
        model_type: The folder's model_type, which decides how tensors are fused.

    Returns:
        The part of a fused tensor that belongs to each parameter, by the name of the parameter
        without `linear_attn.`. Only parameters that the folder stores in fused tensors are listed.
    """
    s, width = spec.linear, spec.hidden_size
    found: dict[str, TensorPart] = {}

    def add(name: str, shape: tuple[int, ...], rows: dict[str, Tensor]) -> None:
        found.update({own: TensorPart(name, shape, of) for own, of in rows.items()})

    def by_head(sizes: dict[str, int]) -> dict[str, Tensor]:
        """Return each projection's row indices in a tensor that fuses projections head by head.

        Args:
            sizes: Rows per head of each projection, in the order within a head.
        """
        each = torch.arange(s.num_key_heads * sum(sizes.values())).view(s.num_key_heads, -1)
        begins = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        return {
            f"{x}_proj.weight": each[:, begins[x] : begins[x] + n].flatten()
            for x, n in sizes.items()
        }

    # Row indices of Q, K and V in tensors where all of Q comes first, then K, then V.
    qkv = {
        "q": torch.arange(s.key_dim),
        "k": torch.arange(s.key_dim, 2 * s.key_dim),
        "v": torch.arange(2 * s.key_dim, 2 * s.key_dim + s.value_dim),
    }
    num_mixed = 2 * s.key_dim + s.value_dim
    add(
        "conv1d.weight",
        (num_mixed, 1, s.conv_kernel_dim),
        {f"{x}_conv": rows for x, rows in qkv.items()},
    )
    if model_type != NEXT:
        projections = {f"{x}_proj.weight": rows for x, rows in qkv.items()}
        add("in_proj_qkv.weight", (num_mixed, width), projections)
        return found
    # Qwen3-Next: the rows of one key head are together: its q, its k, and the v and z of all value
    # heads that share it.
    group = s.num_value_heads // s.num_key_heads
    values = group * s.value_head_dim
    sizes = {"q": s.key_head_dim, "k": s.key_head_dim, "v": values, "z": values}
    add("in_proj_qkvz.weight", (num_mixed + s.value_dim, width), by_head(sizes))
    add("in_proj_ba.weight", (2 * s.num_value_heads, width), by_head({"b": group, "a": group}))
    return found


# Parameters that are not fused but have another name in files: name in wlb.model -> name in files.
_RENAMED = {f"{x}_proj.weight": f"in_proj_{x}.weight" for x in "zab"}
_RENAMED["o_proj.weight"] = "out_proj.weight"


def name_in_files(name: str, spec: ModelSpec, model_type: str) -> tuple[str, TensorPart | None]:
    """Return which tensor of a Hugging Face folder contains a parameter, and where in the tensor.

    The result is the tensor's name, and which part of the tensor the parameter is. The part is None
    if the parameter is the whole tensor.

    Args:
        name: The parameter's name in wlb.model.
        spec: The model.
        model_type: The folder's model_type.
    """
    layer, marker, own = name.partition(".linear_attn.")
    if not marker:
        return name.replace(".mlp.shared_experts.", ".mlp.shared_expert."), None
    part = parts_of(spec, model_type).get(own)
    in_files = _RENAMED.get(own, own) if part is None else part.name
    return f"{layer}{marker}{in_files}", part
