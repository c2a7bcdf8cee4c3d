"""Read and write the experts of Qwen3-MoE, Mixtral and OLMoE in Hugging Face folders.

Files have one matrix per expert; `wlb.model` stacks the matrices of a layer in one tensor. A key of
config.json that `wlb.model` does not support raises UserError.
"""

from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.read_file import Fields
from wlb.spec import ExpertBalance, ExpertsSpec, ModelSpec, Scoring

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
"""Supported values of `architectures` with experts, by model_type."""
READ = """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers clip_qkv
"""
"""Keys of config.json that describe experts."""
HARMLESS = "router_aux_loss_coef router_z_loss_coef output_router_logits router_jitter_noise"
"""Keys that do not affect logits in evaluation: auxiliary losses and router noise in training."""

_UNSUPPORTED = (
    *("full_every", "full_first", "attention_softcap", "logit_softcap", "query_scale_size"),
    *("branch_norms", "zero_centred_norms", "scaled_embeddings", "sliding_rope_theta"),
)
"""Fields of `ModelSpec` that cannot be exported together with experts."""
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Mixtral's names of an expert's matrices, by wlb's names."""


def read_experts(keys: Fields, model_type: str) -> ExpertsSpec:
    """Return the experts that a config.json describes; `ExpertsSpec()` if there are none."""
    if model_type not in ARCHITECTURES:
        for name in READ.split():
            if keys.values.get(name) is not None:
                raise keys.error(
                    name, f"describes experts, but a {model_type} has no experts; remove the key"
                )
        return ExpertsSpec()
    if model_type == "mixtral":
        return ExpertsSpec(
            num=_number(keys, 8),
            per_token=keys.whole("num_experts_per_tok", 2),
            hidden_size=keys.whole("intermediate_size"),
        )
    if keys.values.get("clip_qkv") is not None:
        raise keys.error("clip_qkv", "must be null, because wlb does not clip Q, K and V")
    normalised = keys.values.get("norm_topk_prob")
    if normalised not in (None, False, True):
        raise keys.error("norm_topk_prob", "must be true or false")
    is_olmoe = model_type == "olmoe"
    width = (
        keys.whole("intermediate_size") if is_olmoe else keys.whole("moe_intermediate_size", 768)
    )
    where = layers_with_experts(keys)
    if is_olmoe and where != {"every": 1, "dense_layers": ()}:
        raise UserError(
            f"{keys.where}: decoder_sparse_step = {where['every']} and mlp_only_layers = "
            f"{list(where['dense_layers'])} do not fit OLMoE, which has experts in every layer; "
            "remove these keys"
        )
    return ExpertsSpec(
        num=_number(keys, 64 if is_olmoe else 128),
        **where,
        per_token=keys.whole("num_experts_per_tok", 8),
        hidden_size=width,
        normalised=bool(normalised),
    )


def layers_with_experts(keys: Fields) -> dict[str, Any]:
    """Return which layers of a Qwen3-MoE or Qwen3-Next model have experts.

    Entries of mlp_only_layers that are not indices of layers are ignored, as in transformers.

    Returns:
        The fields `every` and `dense_layers` of `ExpertsSpec`.
    """
    listed: Any = keys.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(i) is not int for i in cast("list[Any]", listed)):
        raise keys.error("mlp_only_layers", "must be a list of whole numbers")
    layers = range(keys.whole("num_hidden_layers"))
    known = sorted({i for i in cast("list[int]", listed) if i in layers})
    return {"every": keys.whole("decoder_sparse_step", 1), "dense_layers": tuple(known)}


def _number(keys: Fields, default: int) -> int:
    """Return the number of experts of a layer; transformers accepts two keys for it.

    Args:
        keys: Keys of config.json.
        default: The number if both keys are missing.
    """
    names = [n for n in ("num_experts", "num_local_experts") if n in keys.values]
    numbers = [keys.whole(name) for name in names] or [default]
    if numbers[0] != numbers[-1]:
        raise keys.error(names[0], f"contradicts {names[-1]} = {numbers[-1]}; remove the wrong one")
    return numbers[0]


def type_of(spec: ModelSpec) -> str:
    """Return the model_type under which a model with experts is exported.

    Raises:
        UserError: No supported model_type computes what this model computes.
    """
    experts = spec.experts
    usual = {"shared": 0, "scoring": Scoring.SOFTMAX}
    for name, value in usual.items():
        if getattr(experts, name) != value:
            raise UserError(
                f"model.experts.{name} = {getattr(experts, name)} cannot be exported, because "
                f"Qwen3-MoE, Mixtral and OLMoE always have {value}; train with "
                f"model.experts.{name} = {value}"
            )
    if experts.balance == ExpertBalance.BIAS:
        raise UserError(
            "model.experts.balance = bias cannot be exported, because Qwen3-MoE, Mixtral and "
            "OLMoE do not choose experts by biases; train with model.experts.balance = aux_loss "
            "or none"
        )
    for name in _UNSUPPORTED:
        if value := getattr(spec, name):
            raise UserError(
                f"model.{name} = {value} cannot be exported with experts, because no supported "
                f"model type of Hugging Face has both; train without model.{name}"
            )
    if spec.qkv_bias:
        raise UserError(
            "model.qkv_bias = true cannot be exported with experts, because no supported model "
            "type of Hugging Face has both; train with model.qkv_bias = false"
        )
    return "qwen3_moe" if spec.qk_norm else _type_without_head_norms(spec)


def _type_without_head_norms(spec: ModelSpec) -> str:
    """Return the model_type of a model with experts but without qk_norm: "olmoe" or "mixtral"."""
    experts = spec.experts
    if spec.sliding_window:
        raise UserError(
            f"model.sliding_window = {spec.sliding_window} cannot be exported without "
            "model.qk_norm, because the only supported model type with experts and windows is "
            "Qwen3-MoE, which always has qk_norm; train with model.qk_norm = true or with "
            "model.sliding_window = 0"
        )
    if spec.num_expert_layers < spec.num_layers:
        raise UserError(
            f"model.experts.every = {experts.every} and model.experts.dense_layers = "
            f"{list(experts.dense_layers)} cannot be exported without model.qk_norm: without it "
            "the model is exported as Mixtral or OLMoE, which have experts in every layer; train "
            "with model.qk_norm = true or with experts in every layer"
        )
    if spec.qk_norm_rows:
        return "olmoe"
    if not experts.normalised:
        raise UserError(
            "model.experts.normalised = false cannot be exported without model.qk_norm: without "
            "it the model is exported as Mixtral, which divides expert scores by their sum; train "
            "with model.experts.normalised = true or model.qk_norm = true"
        )
    return "mixtral"


def experts_json(spec: ModelSpec, model_type: str) -> dict[str, Any]:
    """Return the keys of config.json that describe a model's experts; {} if it has none."""
    experts = spec.experts
    if not experts.num:
        return {}
    if model_type == "mixtral":
        return {
            "intermediate_size": experts.hidden_size,
            "num_local_experts": experts.num,
            "num_experts_per_tok": experts.per_token,
            "sliding_window": None,
        }
    keys: dict[str, Any] = {
        "num_experts": experts.num,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.normalised,
        "attention_bias": False,
    }
    if model_type == "olmoe":
        return keys | {"intermediate_size": experts.hidden_size, "clip_qkv": None}
    return keys | {
        "moe_intermediate_size": experts.hidden_size,
        "decoder_sparse_step": experts.every,
        "mlp_only_layers": list(experts.dense_layers),
        "use_sliding_window": spec.sliding_window > 0,
        "sliding_window": spec.sliding_window or None,
        # With 0, every version of transformers gives all layers the sliding window.
        "max_window_layers": 0,
    }


def names_in_files(name: str, spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the tensors in a Hugging Face folder that make up a parameter.

    A stack of experts' matrices has one tensor per expert in the folder; other parameters have one.

    Args:
        name: The parameter's name in wlb.model.
        spec: The model.
    """
    is_mixtral = not spec.norms_keys
    if not spec.experts.num or ".mlp." not in name:
        return (name,)
    layer, _, rest = name.partition(".mlp.")
    block = f"{layer}.block_sparse_moe" if is_mixtral else f"{layer}.mlp"
    if not rest.startswith("experts."):
        return (f"{block}.{rest}",)
    matrix = rest.split(".")[1]
    matrix = _MIXTRAL[matrix] if is_mixtral else matrix
    return tuple(f"{block}.experts.{i}.{matrix}.weight" for i in range(spec.experts.num))
