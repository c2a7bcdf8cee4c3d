"""Qwen3-Next and the text models of Qwen3.5 in config.json and in files: layers with a gated delta
net, and attention with an output gate and RoPE of a part of each head.

The two families compute the same. Their files differ: Qwen3-Next's hold queries, keys, values and
gates of a linear layer in one tensor, ordered by key head; Qwen3.5's hold queries, keys and values
in one. Released Qwen3.5 folders are of models with images, of which the text model is read.
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
"""Architectures by model_type."""
WITH_IMAGES = {"qwen3_5": DENSE, "qwen3_5_moe": MIXTURE}
"""The text model's model_type, of models with images whose config.json has a text_config."""
LEFT_OUT = {
    "mtp.": "the layer that predicts several tokens",
    "model.visual.": "the images' encoder",
}
"""Beginnings of names of tensors that are no part of the text model, and what they are of."""
TEXT_PREFIX = "model.language_model."
"""How names of the text model begin in the folder of a model with images, instead of `model.`."""
READ = """
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim full_attention_interval attn_output_gate shared_expert_intermediate_size
    num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers
"""
"""Keys of config.json that these families have besides a Qwen3's."""
HARMLESS = """
    mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype router_aux_loss_coef
    output_router_logits
"""
"""Keys of the layer that predicts several tokens, of training, and of how states are stored."""
ROPE = "mrope_section mrope_interleaved"
"""Keys of RoPE by which places of images have three coordinates; those of text are all equal."""

_FULL, _LINEAR = "full_attention", "linear_attention"
_SHARE = 0.25
_SIZES = {
    "linear_num_value_heads": ("num_value_heads", 32),
    "linear_num_key_heads": ("num_key_heads", 16),
    "linear_key_head_dim": ("key_head_dim", 128),
    "linear_value_head_dim": ("value_head_dim", 128),
    "linear_conv_kernel_dim": ("conv_kernel_dim", 4),
}
"""Keys of config.json: the field of `LinearSpec`, and transformers' default."""
_EXPERTS = {NEXT: (512, 10), MIXTURE: (256, 8)}
"""Defaults of transformers for num_experts and num_experts_per_tok."""
_WIDTH = 512
"""Its default for moe_intermediate_size and shared_expert_intermediate_size."""


def text_model(keys: Fields) -> Fields:
    """The keys of the text model of a config.json; `keys` themselves of other families."""
    model_type = WITH_IMAGES.get(str(keys.values.get("model_type")))
    if model_type is None:
        return keys
    text: Any = keys.values.get("text_config")
    if not isinstance(text, dict):
        raise keys.error("text_config", "must be a JSON object with the keys of the text model")
    made = Fields(cast("dict[str, Any]", text), f"{keys.where}: text_config")
    if made.values.get("model_type", model_type) != model_type:
        raise made.error("model_type", f"is not {model_type}, which this model's is")
    said = {k: keys.values[k] for k in ("quantization_config",) if k in keys.values}
    tied = [
        f.values["tie_word_embeddings"] for f in (keys, made) if "tie_word_embeddings" in f.values
    ]
    if tied and tied[0] != tied[-1]:
        raise keys.error("tie_word_embeddings", f"contradicts the {tied[-1]} of text_config")
    said |= {"tie_word_embeddings": tied[0]} if tied else {}
    return Fields({**made.values, **said, "model_type": model_type}, made.where)


def read_hybrid(keys: Fields, model_type: str) -> dict[str, Any]:
    """Fields of `ModelSpec` besides sizes, RoPE and experts; UserError for what wlb lacks."""
    if keys.values.get("attn_output_gate", True) is not True:
        raise keys.error("attn_output_gate", f"is not true: attention of a {model_type} has a gate")
    if keys.values.get("use_sliding_window"):
        raise keys.error("use_sliding_window", f"is true, but a {model_type} has no windows")
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
    """Which layers are linear: all but each n-th, or none."""
    num_layers = keys.whole("num_hidden_layers", at_most=10_000)
    every = keys.whole("full_attention_interval", 4)
    listed: Any = keys.values.get("layer_types")
    usual = [_FULL if (i + 1) % every == 0 else _LINEAR for i in range(num_layers)]
    types = cast("list[Any]", listed if isinstance(listed, list) else [listed]) if listed else usual
    if any(one not in (_FULL, _LINEAR) for one in types):
        raise keys.error("layer_types", f"has others than {_FULL} and {_LINEAR}")
    if len(types) != num_layers:
        raise keys.error("layer_types", f"does not have {num_layers} entries, one a layer")
    if _LINEAR not in types:
        return {}
    first = types.index(_FULL) + 1 if _FULL in types else 0
    if not first or types != [
        _FULL if (i + 1) % first == 0 else _LINEAR for i in range(num_layers)
    ]:
        raise keys.error(
            "layer_types", "is not attention in each n-th layer, and wlb has no other pattern"
        )
    return {"full_every": first, "linear": linear}


def read_share(keys: Fields, rope: Fields) -> float:
    """The part of each head that RoPE rotates, which older files say beside RoPE's other keys."""
    share = keys.real("partial_rotary_factor", _SHARE)
    share = rope.real("partial_rotary_factor", share)
    if keys.real("partial_rotary_factor", share) != share:
        raise keys.error("partial_rotary_factor", f"contradicts the {share} of {rope.where}")
    return share


def read_experts(keys: Fields, model_type: str) -> ExpertsSpec:
    """The experts; none of a dense model."""
    if model_type == DENSE or keys.values.get("num_experts") == 0:
        return ExpertsSpec()
    num, per_token = _EXPERTS[model_type]
    width = keys.whole("moe_intermediate_size", _WIDTH)
    shared = keys.whole("shared_expert_intermediate_size", _WIDTH)
    if shared % width:
        raise keys.error(
            "shared_expert_intermediate_size",
            f"is not a multiple of moe_intermediate_size = {width}: wlb's shared experts are as "
            f"large as the others",
        )
    normalised = keys.values.get("norm_topk_prob", True)
    if not isinstance(normalised, bool) or not (normalised or model_type == NEXT):
        why = "must be true or false" if model_type == NEXT else f"is not true, as a {MIXTURE}'s is"
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
    """Whether a model has parts that, of the families of config.json, only these have."""
    return bool(
        spec.linear.num_value_heads
        or spec.attention_gate
        or spec.rotary_share != 1.0
        or spec.experts.shared_gate
    )


def chosen_type(spec: ModelSpec, preferred: str = "") -> str:
    """The model_type to write a model with: of those that compute the same, the one that it was
    imported with.
    """
    if not spec.experts.num:
        return preferred if preferred in (NEXT, DENSE) else DENSE
    everywhere = spec.num_expert_layers == spec.num_layers
    fits = preferred == MIXTURE and spec.experts.normalised and everywhere
    return MIXTURE if fits else NEXT


def hybrid_type(spec: ModelSpec, preferred: str = "") -> str:
    """The model_type to write a model with; UserError if the families lack a part or have more."""
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
                f"model.{name} = {_said(value)}: a {model_type} of transformers, whose other parts "
                f"this model has, has {_said(wanted)}; it cannot be exported"
            )
    if experts.num and experts.balance == ExpertBalance.BIAS:
        raise UserError(
            f"model.experts.balance = bias: a {model_type} has no biases of experts, by which this "
            f"model chooses them; train with aux_loss or none for an export"
        )
    return model_type


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def hybrid_json(spec: ModelSpec, model_type: str, rope: dict[str, Any] | None) -> dict[str, Any]:
    """Keys of config.json besides a Qwen3's, some of which they replace. rope: RoPE's scaling."""
    linear = spec.linear if spec.linear.num_value_heads else LinearSpec(num_value_heads=32)
    types = [_LINEAR if spec.is_linear(i) else _FULL for i in range(spec.num_layers)]
    share = {"partial_rotary_factor": spec.rotary_share}
    scaling = rope or {"rope_type": "default"}
    said: dict[str, Any] = {
        **{name: getattr(linear, field) for name, (field, _) in _SIZES.items()},
        "layer_types": types,
        "attention_bias": False,
        **share,
        "rope_parameters": {"rope_theta": spec.rope_theta, **scaling, **share},
    }
    if spec.full_every:
        # Older versions of transformers read the period instead of the list.
        said["full_attention_interval"] = spec.full_every
    if model_type == NEXT:
        said |= {
            "decoder_sparse_step": spec.experts.every,
            "mlp_only_layers": list(spec.experts.dense_layers),
            "norm_topk_prob": spec.experts.normalised,
            "num_experts": spec.experts.num,
        }
    if spec.experts.num:
        said |= {
            "num_experts": spec.experts.num,
            "num_experts_per_tok": spec.experts.per_token,
            "moe_intermediate_size": spec.experts.hidden_size,
            "shared_expert_intermediate_size": spec.experts.shared_hidden_size,
        }
    return said


class TensorPart(NamedTuple):
    """Where a parameter's rows are in a larger tensor of files."""

    name: str  # of the tensor of files, behind `linear_attn.`
    shape: tuple[int, ...]  # of that tensor
    rows: Tensor  # which of its rows are the parameter's, shape [D]


@lru_cache
def parts_of(spec: ModelSpec, model_type: str) -> dict[str, TensorPart]:
    """The parts of larger tensors in a linear layer, by the name behind `linear_attn.`."""
    s, width = spec.linear, spec.hidden_size
    found: dict[str, TensorPart] = {}

    def add(name: str, shape: tuple[int, ...], rows: dict[str, Tensor]) -> None:
        found.update({own: TensorPart(name, shape, of) for own, of in rows.items()})

    def by_head(sizes: dict[str, int]) -> dict[str, Tensor]:
        """Rows of several projections that a tensor holds for each key head."""
        each = torch.arange(s.num_key_heads * sum(sizes.values())).view(s.num_key_heads, -1)
        begins = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        return {
            f"{x}_proj.weight": each[:, begins[x] : begins[x] + n].flatten()
            for x, n in sizes.items()
        }

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
    group = s.num_value_heads // s.num_key_heads
    values = group * s.value_head_dim
    sizes = {"q": s.key_head_dim, "k": s.key_head_dim, "v": values, "z": values}
    add("in_proj_qkvz.weight", (num_mixed + s.value_dim, width), by_head(sizes))
    add("in_proj_ba.weight", (2 * s.num_value_heads, width), by_head({"b": group, "a": group}))
    return found


_RENAMED = {f"{x}_proj.weight": f"in_proj_{x}.weight" for x in "zab"}
_RENAMED["o_proj.weight"] = "out_proj.weight"


def name_in_files(name: str, spec: ModelSpec, model_type: str) -> tuple[str, TensorPart | None]:
    """The tensor of a folder that holds the parameter `name`, and where in it; None: it is it."""
    layer, marker, own = name.partition(".linear_attn.")
    if not marker:
        return name.replace(".mlp.shared_experts.", ".mlp.shared_expert."), None
    part = parts_of(spec, model_type).get(own)
    in_files = _RENAMED.get(own, own) if part is None else part.name
    return f"{layer}{marker}{in_files}", part
